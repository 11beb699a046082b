"""What the tests of configs/recipes share: a queue with its worker, and the processes of recipes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil
import pytest
from redis import Redis

from conftest import Server, Workers
from gristmill import Client, keys
from topologies import free_ports

ROOT: Final = Path(__file__).parent.parent
RECIPES: Final = ROOT / "configs" / "recipes"
NODE_MODULES: Final = ROOT / ".tools" / "node_modules"
TIMEOUT_S: Final = 8.0


class Mill:
    """A Redis on a TCP port, one worker, and the processes of recipes."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.queue = "topics"
        self.server = Server(folder)
        [self.port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start_redis()
        self.workers = Workers(self.url, self.queue, folder)
        self.worker = self.workers.start(model)
        self.client = Client(self.url)
        path = f"{RECIPES}:{folder}:{os.environ.get('PYTHONPATH', '')}"
        settings = {"GRISTMILL_REDIS": self.url, "SCORE_TIMEOUT_S": str(int(TIMEOUT_S))}
        self.env = {
            **os.environ,
            **settings,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(folder),
        }

    def start_redis(self) -> None:
        self.server.start(port=str(self.port), bind="127.0.0.1")

    @contextmanager
    def away(self) -> Iterator[None]:
        """The worker hears and does nothing meanwhile."""
        self.worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.worker.send_signal(signal.SIGCONT)

    @contextmanager
    def running(self, *command: str, clean: bool = True) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``python -m command``; if ``clean`` its log has no traceback when it has ended."""
        log = self.folder / f"{command[0]}-{time.monotonic_ns()}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=out, stderr=out, env=self.env, cwd=self.folder
            )
        try:
            yield process
            process.terminate()
            process.wait(timeout=60)
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()
            print(log.read_text("utf-8"))
        assert not clean or "Traceback" not in log.read_text("utf-8")

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=120, env=self.env, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def unfinished(self) -> int:
        depth = self.client.depth(self.queue)
        return depth.waiting + depth.pending

    def label(self, text: str) -> str:
        label: str = self.client.score(self.queue, text)[0]["label"]
        return label

    def readers(self) -> set[bytes]:
        """Return the names of the processes that had results pushed to them."""
        with Redis.from_url(self.url) as redis:
            return set(redis.scan_iter(keys.reply(self.queue, "*").replace("{", "[{]").replace("}", "[}]")))

    def close(self) -> None:
        self.client.close()
        self.workers.close()
        self.server.stop(signal.SIGKILL)


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    value: Any


@dataclass(frozen=True)
class Web:
    """A web server with a recipe's app."""

    name: str
    port: int

    def post(self, body: Any) -> Answer:
        """POST ``body`` as JSON, or as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/score", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        is_json = response.headers["Content-Type"] == "application/json"
        return Answer(response.status, response.headers["Retry-After"], json.loads(text) if is_json else text)

    def listens(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


NODE_DRIVER: Final = """
import { createInterface } from "node:readline";
import { connect } from "./node_client.mjs";
const mill = await connect(...process.argv.slice(2));
for await (const line of createInterface({ input: process.stdin })) {
  const { texts, options, timeoutMs } = JSON.parse(line);
  const answers = texts.map((text) => mill.score(text, options, timeoutMs).catch((error) => error.code));
  console.log("sent");
  console.log(JSON.stringify(await Promise.all(answers)));
}
await mill.close();
"""


class NodeClient:
    """A Node.js process with the recipe's client; a context manager."""

    def __init__(self, folder: Path, url: str, queue: str) -> None:
        if not (NODE_MODULES / "redis").is_dir():
            pytest.skip("the npm package is not there: make .tools/node_modules/redis")
        for script in ("submit.lua", "listen.lua"):
            shutil.copy(ROOT / "producer" / "gristmill" / "scripts" / script, folder)
        shutil.copy(RECIPES / "node_client.mjs", folder)
        (folder / "node_modules").symlink_to(NODE_MODULES)
        (folder / "driver.mjs").write_text(NODE_DRIVER)
        self.process = subprocess.Popen(
            [Path(sys.executable).parent / "node", folder / "driver.mjs", url, queue],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def send(self, *texts: str, timeout_s: float = 60.0, **options: Any) -> None:
        assert self.process.stdin is not None
        line = {"texts": texts, "options": options, "timeoutMs": timeout_s * 1000}
        print(json.dumps(line), file=self.process.stdin, flush=True)
        assert self._line() == "sent\n"

    def receive(self) -> list[Any]:
        answers: list[Any] = json.loads(self._line())
        return answers

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()
