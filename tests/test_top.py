"""``gristmill top``: what it finds in Redis, and what reaches the terminal."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import Client, keys
from gristmill.errors import ExitCode
from gristmill.watch import Watch

COMMAND = [sys.executable, "-m", "gristmill.cli", "top"]


def run(*flags: str, url: str) -> subprocess.CompletedProcess[str]:
    return gristmill("top", *flags, url=url)


def gristmill(*words: str, url: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [*COMMAND[:-1], *words, "--redis", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def beat(redis: Redis, queue: str, name: str | bytes, **fields: Any) -> None:
    """Write a heartbeat as a worker does."""
    stream = keys.requests(queue)
    redis.sadd(keys.QUEUES, queue)
    if not redis.exists(stream):
        redis.xgroup_create(stream, keys.GROUP, "0", mkstream=True)
    redis.execute_command("XGROUP", "CREATECONSUMER", stream, keys.GROUP, name)
    shown = name if isinstance(name, bytes) else name.encode()
    key = keys.worker(queue, "").encode() + shown
    mapping: dict[Any, Any] = {"name": shown, **fields}
    redis.hset(key, mapping=mapping)


class Terminal:
    """A ``gristmill top`` on a terminal of its own, 100 columns by 30 rows."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        env = {**os.environ, "TERM": "xterm", "LINES": "30", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [*COMMAND, "--redis", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        self.output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.output += os.read(self._master, 65_536)
            except OSError:
                return

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.text()) is not None

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.decode("utf-8", "replace"))

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self._reader.join(30)
        os.close(self._master)


@pytest.fixture
def terminal(own_redis: Server) -> Iterator[Terminal]:
    made = Terminal(own_redis.url)
    yield made
    made.close()


def test_once_prints_queues_and_workers_without_a_terminal(
    own_redis: Server, own_client: Client, workers: Workers, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)
    assert len(own_client.score_many(workers.queue, ["the mill"] * 40)) == 40
    own_client.submit("waiting", "nobody comes")

    def counted() -> bool:
        [first, second] = json.loads(run("--json", url=own_redis.url).stdout)
        assert (first["name"], first["depth"]["waiting"], first["workers"]) == ("waiting", 1, [])
        [worker] = second["workers"]
        assert (worker["name"], worker["pid"]) == ("w0", workers.processes[0].pid)
        assert worker["rss_bytes"] > 10e6
        assert 0 <= worker["age_s"] < 60
        return bool(worker["counters"]["requests"] == 40)

    wait_until(counted)
    [_, record] = json.loads(run("--json", url=own_redis.url).stdout)
    [worker] = record["workers"]
    assert 0 < worker["busy"] < 1
    assert 0 < worker["efficiency"] <= 1
    assert record["requests_s"] == worker["requests_s"] > 0
    for flags in (["--once"], []):
        done = run(*flags, url=own_redis.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"waiting +1 +0 +0 .*no worker", done.stdout)
        assert re.search(rf"w0 +{workers.queue} .* checkpoint@.*MiB", done.stdout)


def test_rates_are_those_between_the_last_two_heartbeats(own_redis: Server, own_client: Client) -> None:
    with Redis.from_url(own_redis.url) as redis:
        now_ms = int(time.time() * 1000)
        common = {"started_ms": now_ms - 100_000}
        counters = {"requests": 1000, "tokens": 900, "padded_tokens": 1000, "engine_us": 50_000_000}
        beat(redis, "q", "w", beat_ms=now_ms, **common, **counters)
        watch = Watch(own_client)
        [[worker]] = [look.workers for look in watch.look()]
        assert (worker.requests_s, worker.busy, worker.efficiency) == (10.0, 0.5, 0.9)  # since the start
        counters = {"requests": 1100, "tokens": 910, "padded_tokens": 1020, "engine_us": 51_500_000}
        beat(redis, "q", "w", beat_ms=now_ms + 2000, **common, **counters)
        for _ in range(3):  # also where several looks find the same heartbeat
            [[worker]] = [look.workers for look in watch.look()]
            assert (worker.requests_s, worker.busy, worker.efficiency) == (50.0, 0.75, 0.5)
        # Another process under the same name begins anew.
        beat(redis, "q", "w", beat_ms=now_ms + 5000, started_ms=now_ms + 4000, requests=7, engine_us=0)
        [[worker]] = [look.workers for look in watch.look()]
        assert (worker.requests_s, worker.busy) == (7.0, 0.0)


def test_of_a_thousand_queues_the_fullest_are_looked_at_each_time_and_all_in_turn(
    own_redis: Server, own_client: Client
) -> None:
    with Redis.from_url(own_redis.url) as redis:
        redis.sadd(keys.QUEUES, *(f"q{i:03}" for i in range(1000)))
        for _ in range(5):
            redis.xadd(keys.requests("q777"), {"id": "x", "body": "{}"})
        watch = Watch(own_client)
        calls = redis.info("commandstats")
        assert len(watch.look()) == 100
        per_look = _scripts(redis.info("commandstats")) - _scripts(calls)
        assert per_look <= 101  # the first script is sent twice: Redis does not know it yet
        for _ in range(20):
            looks = watch.look()
        assert len(looks) == 1000
        assert (looks[0].name, looks[0].held) == ("q777", 5)
        redis.xadd(keys.requests("q777"), {"id": "y", "body": "{}"})
        assert watch.look()[0].held == 6
        redis.srem(keys.QUEUES, *(f"q{i:03}" for i in range(999)))
        assert [look.name for look in watch.look()] == ["q999"]
    assert run("--once", url=own_redis.url).stdout.count("\n") < 20


def _scripts(stats: Any) -> int:
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


def test_what_anybody_wrote_into_redis_does_not_reach_the_terminal_raw(own_redis: Server) -> None:
    evil = "\x1b]0;pwned\x07\x1b[2J[red]bold[/red]\u202e\r\n"
    with Redis.from_url(own_redis.url) as redis:
        beat(redis, "q", "w", host=evil * 1000, model=evil, engine=evil, pid=evil, requests="9" * 5000)
        beat(redis, "q", b"\xff\xfe", model=b"\xff")
        beat(redis, "q", "gone-wrong", beat_ms="-5", rss_bytes="1e400")
        redis.sadd(keys.QUEUES, "\x1b[2J", b"\xff", "string")
        redis.set(keys.requests("string"), "no stream")
    for flags in (["top", "--once"], ["queue", "show", "q"]):
        done = gristmill(*flags, url=own_redis.url)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"[^\n\x20-\x7e\u00a0-\u200d\u2010-\u2029\u2030-\uffff]", done.stdout)
        assert "[red]" in done.stdout  # as text, not as a colour
    assert re.search(r"string +Redis at", run("--once", url=own_redis.url).stdout)
    assert run("--json", url=own_redis.url).returncode == 0


def test_on_a_terminal_it_is_drawn_anew_until_q(
    own_redis: Server, own_client: Client, terminal: Terminal
) -> None:
    own_client.submit("first", "bread")
    wait_until(lambda: terminal.shows(r"first +1 "))
    own_client.submit_many("second", ["bread"] * 23)
    wait_until(lambda: terminal.shows(r"second +23 "))
    own_redis.stop(signal.SIGKILL)
    wait_until(lambda: terminal.shows("Redis at"))
    own_redis.start()
    seen = len(terminal.output)
    wait_until(lambda: b"second" in terminal.output[seen:] and terminal.process.poll() is None)
    terminal.press(b"x")
    terminal.press(b"q")
    assert terminal.process.wait(30) == 0
    assert terminal.is_as_before()
    # Cursor and screen are as before, once all was read.
    wait_until(lambda: terminal.output.endswith(b"\x1b[?25h\x1b[?1049l"))


def test_ctrl_c_ends_it_too(own_client: Client, terminal: Terminal) -> None:
    wait_until(lambda: terminal.shows("queues"))
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(30) == 0
    assert terminal.is_as_before()


def test_a_redis_that_is_away_is_an_error_with_a_code(tmp_path: Path) -> None:
    done = run("--once", url=f"unix://{tmp_path}/none.sock")
    assert done.returncode == ExitCode.BROKER_UNAVAILABLE
    assert "not available" in done.stderr
