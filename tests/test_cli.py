"""The command line as its users meet it: real processes, their output and their exit codes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from conftest import Workers, wait_until
from gristmill import Client
from gristmill.errors import ExitCode

GRISTMILL = (sys.executable, "-m", "gristmill.cli")
ROWS = 200_000  # more than a test waits for


def gristmill(
    *arguments: object, stdin: bytes = b"", url: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run one command to its end; ``url`` is the default Redis."""
    return subprocess.run(
        [*GRISTMILL, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "GRISTMILL_REDIS": url or "redis://127.0.0.1:1", **(env or {})},
    )


def write_rows(path: Path, count: int) -> Path:
    lines = (f"{i},the mill grinds {i} sacks of corn in the night\n" for i in range(count))
    path.write_text("id,text\n" + "".join(lines))
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class TestUsage:
    def test_help_names_the_commands_and_the_exit_codes(self) -> None:
        done = gristmill("--help")
        text = " ".join(done.stdout.decode().split())
        assert done.returncode == ExitCode.OK
        for name in ("score", "submit", "result", "queue"):
            assert name in text
            assert gristmill(name, "--help").returncode == ExitCode.OK
        for code in ExitCode:
            assert f"{code.value} {code.name.lower().replace('_', ' ')}" in text

    @pytest.mark.parametrize(
        "arguments",
        [
            ["nonsense"],
            ["score", "in.csv"],
            ["score", "in.csv", "--out", "out.csv", "--text-column", "t"],
            ["score", "in.csv", "--out", "o.csv", "--text-column", "t", "--model", "m", "--queue", "q"],
            [
                "score",
                "in.csv",
                "--out",
                "o.csv",
                "--text-column",
                "t",
                "--model",
                "m",
                "--redis",
                "redis://x",
            ],
            ["score", "in.csv", "--out", "o.csv", "--text-column", "t", "--queue", "q", "--workers", "2"],
            ["score", "in.csv", "--out", "o.csv", "--text-column", "t", "--queue", "q", "--delimiter", "ab"],
            ["submit", "q"],
            ["submit", "q", "text", "--json", "{}"],
            ["submit", "q", "--json", "[1]"],
            ["submit", "q", "--json", "{"],
            ["submit", "q", "-", "--pair", "x"],
            ["submit", "q", "-", "--id", "x"],
            ["submit", "bad queue", "text"],
            ["submit", "q", "text", "--redis", "http://localhost"],
            ["result", "q"],
        ],
    )
    def test_wrong_arguments_are_said_to_be_in_one_line(self, arguments: Sequence[str]) -> None:
        done = gristmill(*arguments)
        assert done.returncode == ExitCode.USAGE
        assert done.stderr.decode().splitlines()[-1].lower().startswith("error: ")
        assert b"Traceback" not in done.stderr

    def test_an_unreachable_redis_has_its_own_exit_code(self) -> None:
        done = gristmill("queue", "--redis", "redis://127.0.0.1:1")
        assert done.returncode == ExitCode.BROKER_UNAVAILABLE
        assert done.stderr.startswith(b"error: Redis at 127.0.0.1:1 is not available")
        assert len(done.stderr.splitlines()) == 1


class TestScoreWithRunningWorkers:
    def test_scores_a_file_and_sums_up(
        self, workers: Workers, queue: str, redis_url: str, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        workers.start(tiny_classifier)
        source, out = write_rows(tmp_path / "in.csv", 300), tmp_path / "out.jsonl"
        arguments = ["score", source, "--out", out, "--text-column", "text", "--queue", queue]
        done = gristmill(*arguments, "--preview", 2, url=redis_url)
        assert done.returncode == ExitCode.OK, done.stderr
        summary = dict(line.split(maxsplit=1) for line in done.stderr.decode().splitlines())
        assert list(summary) == ["rows", "errors", "rate", "latency", "output"]
        assert summary["rows"].startswith("300 in ")
        assert summary["errors"] == "0"
        assert summary["output"] == str(out)
        assert b"gm_label" in done.stdout
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["id"] for row in rows] == [str(i) for i in range(300)]

        again = gristmill(*arguments, url=redis_url)
        assert again.returncode == ExitCode.BAD_INPUT
        assert again.stderr.decode() == f"error: {out} exists already: use --force to replace it\n"
        costs = gristmill(*arguments, "--force", "--cost-per-hour", "0.36", url=redis_url)
        summary = dict(line.split(maxsplit=1) for line in costs.stderr.decode().splitlines())
        seconds = float(summary["rows"].removeprefix("300 in ").removesuffix(" s"))
        cost, per_million, per_million_tokens = re.findall(r"[\d.,e+-]*\d", summary["cost"])
        assert float(cost) == pytest.approx(seconds * 0.36 / 3600, abs=0.06 * 0.36 / 3600)
        assert float(per_million.replace(",", "")) == pytest.approx(float(cost) / 300 * 1e6, rel=0.01)
        assert "per million tokens" in summary["cost"]
        assert float(per_million_tokens.replace(",", "")) < float(per_million.replace(",", ""))
        quiet = gristmill(*arguments, "--force", "--quiet", url=redis_url)
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (ExitCode.OK, b"", b"")

    def test_takes_standard_input_and_reports_failed_rows(
        self, workers: Workers, queue: str, redis_url: str, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        workers.start(tiny_classifier)
        out = tmp_path / "out.csv"
        arguments = ["score", "-", "--out", out, "--text-column", "a text", "--delimiter", "\\t"]
        stdin = b"id\ta text\n1\tthe mill\n2\n3\tthe wheel\n"
        done = gristmill(*arguments, "--queue", queue, "--prefix", "p.", stdin=stdin, url=redis_url)
        assert done.returncode == ExitCode.ROWS_FAILED
        assert b"errors    1 (1 bad_request)" in done.stderr
        lines = out.read_text().splitlines()
        assert lines[0] == "id\ta text\tp.label\tp.score\tp.error"
        assert [line.split("\t")[0] for line in lines[1:]] == ["1", "2", "3"]

    def test_a_queue_that_nobody_serves_has_its_own_exit_code(
        self, queue: str, redis_url: str, tmp_path: Path
    ) -> None:
        source = write_rows(tmp_path / "in.csv", 1)
        arguments = ["score", source, "--out", tmp_path / "out.csv", "--text-column", "text"]
        done = gristmill(*arguments, "--queue", queue, "--wait", 0.1, url=redis_url)
        assert done.returncode == ExitCode.NO_WORKER
        assert done.stderr.startswith(b"error: no worker serves the queue")

    def test_waits_for_a_worker_to_come(
        self, workers: Workers, queue: str, redis_url: str, tiny_encoder: Path, tmp_path: Path
    ) -> None:
        source = write_rows(tmp_path / "in.csv", 10)
        arguments = ["score", source, "--out", tmp_path / "out.csv", "--text-column", "text"]
        with subprocess.Popen(
            [*GRISTMILL, *map(str, arguments), "--queue", queue, "--redis", redis_url],
            stderr=subprocess.DEVNULL,
        ) as process:
            workers.start(tiny_encoder)
            assert process.wait(timeout=60) == ExitCode.OK
        assert len(json.loads(read_csv(tmp_path / "out.csv")[9]["gm_embedding"])) > 1


def parts(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def start_private(model: Path, source: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Start a scoring that takes long, and return when its first rows are written."""
    arguments = ["score", source, "--out", out, "--text-column", "text", "--model", model]
    process = subprocess.Popen([*GRISTMILL, *map(str, arguments), *flags], stderr=subprocess.PIPE)
    rows = out.with_name(out.name + ".parts") / "rows"
    wait_until(lambda: process.poll() is not None or any(part.stat().st_size for part in parts(rows)))
    assert process.poll() is None
    return process


def what_it_started(process: subprocess.Popen[bytes]) -> tuple[list[psutil.Process], Path]:
    """Return the processes that a private run started, and its temporary folder."""
    started = psutil.Process(process.pid).children(recursive=True)
    commands = [child.cmdline() for child in started]
    folder = next(command[command.index("--remove") + 1] for command in commands if "--remove" in command)
    assert any("redis-server" in command[0] for command in commands)
    assert any("gristmill_worker" in command for command in commands)
    return started, Path(folder)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestScoreWithAPrivateWorker:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_needs_nothing_and_leaves_nothing_but_the_output(
        self, tiny_classifier: Path, tmp_path: Path, workers: int
    ) -> None:
        source, out = write_rows(tmp_path / "in.csv", 2000), tmp_path / "out.csv"
        arguments = ["score", source, "--out", out, "--text-column", "text", "--model", tiny_classifier]
        done = gristmill(*arguments, "--workers", workers, env={"TMPDIR": str(tmp_path)})
        assert done.returncode == ExitCode.OK, done.stderr
        assert [row["id"] for row in read_csv(out)] == [str(i) for i in range(2000)]
        assert not list(tmp_path.glob("gristmill-*"))

    def test_ctrl_c_keeps_what_was_scored_cleans_up_and_says_how_to_go_on(
        self, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        source, out = write_rows(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
        with start_private(tiny_classifier, source, out, "--force") as process:
            started, folder = what_it_started(process)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == ExitCode.INTERRUPTED
        lines = [line for line in stderr.decode().splitlines() if line]
        assert lines[0] == "finishing what is in flight; once more to stop at once"
        assert lines[1].endswith(f" scored rows are kept in {out}.parts")
        assert lines[2].startswith(f"to go on: cli.py score {source} --out {out} --text-column text --model")
        assert "--force" not in lines[2]
        assert b"Traceback" not in stderr
        assert not folder.exists()
        assert not any(map(is_running, started))
        assert not out.exists()
        rows = [row for part in parts(tmp_path / "out.csv.parts" / "rows") for row in read_csv(part)]
        assert lines[1].startswith(f"{len(rows):,} scored rows")
        assert [row["id"] for row in rows] == [str(i) for i in range(len(rows))]

        arguments = ["score", source, "--out", out, "--text-column", "text", "--model", tiny_classifier]
        command = [*GRISTMILL, *map(str, arguments)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            process.kill()
        assert " ".join(line.split()) == f"going on after {len(rows):,} rows that are in {out}.parts"

    def test_what_cannot_be_gone_on_with_is_not_said_to_be(
        self, workers: Workers, queue: str, redis_url: str, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        workers.start(tiny_classifier)
        source = write_rows(tmp_path / "in.csv", 20)
        source.write_text(source.read_text() + "20,\n")
        arguments = ["score", source, "--out", tmp_path / "out.csv", "--text-column", "text"]
        arguments += ["--queue", queue, "--max-errors", 0]
        assert b"21 scored rows are kept" in gristmill(*arguments, url=redis_url).stderr
        changed = gristmill(*arguments, "--top-k", 2, url=redis_url)
        assert changed.returncode == ExitCode.BAD_INPUT
        assert b"top_k was 1, now it is 2" in changed.stderr
        assert b"going on" not in changed.stderr
        piped = ["-", "--in-format", "csv", *arguments[2:]]
        afresh = gristmill("score", *piped, url=redis_url, stdin=b"text\nthe mill\n")
        assert afresh.returncode == ExitCode.OK
        assert b"standard input cannot be resumed" in afresh.stderr

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_nothing_outlives_it_however_it_is_killed(
        self, tiny_classifier: Path, tmp_path: Path, number: signal.Signals
    ) -> None:
        source, out = write_rows(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
        with start_private(tiny_classifier, source, out) as process:
            started, folder = what_it_started(process)
            process.send_signal(number)
            process.communicate(timeout=60)
        assert process.returncode == (ExitCode.INTERRUPTED if number == signal.SIGTERM else -number)
        wait_until(lambda: not any(map(is_running, started)) and not folder.exists(), timeout_s=15)
        assert not out.exists()

    def test_the_death_of_the_worker_ends_the_run_with_its_log(
        self, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        source, out = write_rows(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
        with start_private(tiny_classifier, source, out) as process:
            started, folder = what_it_started(process)
            for child in started:
                if child.cmdline()[1:3] == ["-m", "gristmill_worker"]:
                    child.kill()
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == ExitCode.FAILURE
        assert stderr.decode().splitlines()[-1] == "error: the worker ended with exit code 137"
        assert f"scored rows are kept in {out}.parts" in stderr.decode()
        assert not any(map(is_running, started))
        assert not folder.exists()

    def test_a_model_that_cannot_be_used_is_bad_input(self, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "in.csv", 1)
        arguments = ["score", source, "--out", tmp_path / "out.csv", "--text-column", "text", "--model"]
        missing = gristmill(*arguments, tmp_path / "none")
        assert missing.returncode == ExitCode.BAD_INPUT
        assert b"is not a model directory" in missing.stderr
        (tmp_path / "empty").mkdir()
        empty = gristmill(*arguments, tmp_path / "empty")
        assert empty.returncode == ExitCode.BAD_INPUT
        assert b"Traceback" not in empty.stderr
        assert not list(tmp_path.glob("out*"))

    def test_says_what_to_install_where_there_is_no_redis(
        self, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        source = write_rows(tmp_path / "in.csv", 1)
        arguments = ["score", source, "--out", tmp_path / "out.csv", "--text-column", "text"]
        env = {"GRISTMILL_REDIS_SERVER": str(tmp_path / "no-redis")}
        done = gristmill(*arguments, "--model", tiny_classifier, env=env)
        assert done.returncode == ExitCode.BAD_INPUT
        assert b"GRISTMILL_REDIS_SERVER" in done.stderr
        assert len(done.stderr.splitlines()) == 1


class TestSubmitAndResult:
    def test_a_submitted_text_has_a_result(
        self, workers: Workers, queue: str, redis_url: str, tiny_classifier: Path
    ) -> None:
        workers.start(tiny_classifier)
        request_id = gristmill("submit", queue, "the mill", url=redis_url).stdout.decode().strip()
        done = gristmill("result", queue, request_id, url=redis_url)
        assert done.returncode == ExitCode.OK, done.stderr
        result = json.loads(done.stdout)
        assert (result["id"], result["status"]) == (request_id, "ok")

        named = gristmill("submit", queue, "the mill", "--pair", "a wheel", "--id", "mine", url=redis_url)
        assert named.stdout == b"mine\n"
        assert json.loads(gristmill("result", queue, "mine", url=redis_url).stdout)["status"] == "ok"

        body = json.dumps({"text": 7})
        bad = gristmill("submit", queue, "--json", body, url=redis_url).stdout.decode().strip()
        failed = gristmill("result", queue, bad, url=redis_url)
        assert failed.returncode == ExitCode.REQUEST_FAILED
        assert json.loads(failed.stdout)["error"]["code"] == "bad_request"

    def test_each_line_of_standard_input_is_a_request(
        self, queue: str, redis_url: str, redis: Redis, client: Client
    ) -> None:
        lines = b"".join(b"text %d\r\n\n" % i for i in range(2500))
        done = gristmill(
            "submit", queue, "-", "--ttl", 60, "--deadline-ms", 60000, stdin=lines, url=redis_url
        )
        assert done.returncode == ExitCode.OK
        assert len(set(done.stdout.split())) == 2500
        assert client.depth(queue).waiting == 2500
        entry: dict[bytes, bytes] = redis.xrange(f"gm:{{{queue}}}:requests", count=1)[0][1]  # type: ignore[assignment,index]
        assert json.loads(entry[b"body"]) == {"text": "text 0"}
        assert entry[b"ttl"] == b"60"
        assert int(entry[b"deadline"]) > time.time() * 1000
        assert b"reply" not in entry

    def test_lines_that_are_no_text_are_named(self, queue: str, redis_url: str) -> None:
        done = gristmill("submit", queue, "-", stdin=b"fine\ncaf\xe9\n", url=redis_url)
        assert done.returncode == ExitCode.USAGE
        assert done.stderr == b"error: line 2 of standard input is not valid UTF-8\n"

    def test_a_full_queue_names_what_it_took(self, queue: str, redis_url: str, redis: Redis) -> None:
        redis.hset(f"gm:{{{queue}}}:config", "max_length", "3")
        done = gristmill("submit", queue, "-", stdin=b"text\n" * 5, url=redis_url)
        assert done.returncode == ExitCode.FAILURE
        assert len(done.stdout.split()) == 3
        assert b"is full: 2 of 5" in done.stderr

    def test_no_result_in_time_has_its_own_exit_code(self, queue: str, redis_url: str) -> None:
        done = gristmill("result", queue, "unknown", "--timeout", 0.1, url=redis_url)
        assert done.returncode == ExitCode.TIMEOUT
        assert done.stderr.startswith(b"error: no result of request 'unknown'")


class TestQueue:
    def test_shows_what_queues_hold_and_who_serves_them(
        self, workers: Workers, queue: str, redis_url: str, tiny_classifier: Path
    ) -> None:
        gristmill("submit", queue, "-", stdin=b"text\n" * 3, url=redis_url)
        first = self.only(queue, redis_url)
        assert {name: first[name] for name in ("waiting", "pending", "dead")} == {
            "waiting": 3,
            "pending": 0,
            "dead": 0,
        }
        assert first["workers"] == []
        workers.start(tiny_classifier)
        wait_until(lambda: self.only(queue, redis_url)["waiting"] == 0)
        worker = self.only(queue, redis_url)["workers"][0]
        assert worker["task"] == "text-classification"
        table = gristmill("queue", queue, url=redis_url, env={"COLUMNS": "200"}).stdout.decode()
        assert queue in table
        assert worker["engine"] in table
        assert queue in gristmill("queue", url=redis_url, env={"COLUMNS": "200"}).stdout.decode()

    def only(self, queue: str, url: str) -> dict[str, Any]:
        records = json.loads(gristmill("queue", queue, "--json", url=url).stdout)
        assert [record["queue"] for record in records] == [queue]
        found: dict[str, Any] = records[0]
        return found

    def test_does_not_complain_when_its_reader_goes_away(self, redis_url: str) -> None:
        command = f"{' '.join(GRISTMILL)} queue --redis {redis_url} | true"
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
        assert done.stderr == b""
