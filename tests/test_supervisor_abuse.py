"""A supervisor that is treated badly: stopped, cut off, starved, given what it cannot use."""

from __future__ import annotations

import os
import pty
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from conftest import wait_until
from gristmill import Client
from gristmill.errors import ExitCode
from machine import Machine
from probes import fetch

Configure = Callable[..., Path]

# Silence counts sooner: all else takes its time.
IMPATIENT = """
from gristmill_worker.supervisor import child, supervisor
child.SILENCE_S, supervisor.STOPPED_S = 6.0, 1.5
from gristmill_worker.cli import main
main()
"""


@pytest.fixture
def configure(redis_url: str, queue: str, tmp_path: Path) -> Configure:
    """Writes a configuration of one worker that computes nothing; again under the same name it is changed."""

    def write(model: Path, name: str = "a", **settings: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        basic = {"queue": f"{queue}-{name}", "model": str(model), "redis": redis_url}
        # In one step, as editors do: nobody reads half of it.
        path.with_suffix(".new").write_text(
            yaml.safe_dump(basic | {"engine": "null", "workers": 1, "cores": [0]} | settings)
        )
        path.with_suffix(".new").rename(path)
        return path

    return write


class TestStopped:
    def test_workers_are_not_judged_by_what_they_said_before_all_were_stopped(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier)), python=("-c", IMPATIENT)) as machine:
            (worker,) = [event["pid"] for event in machine.wait_for("worker_serves")]
            machine.signal(signal.SIGSTOP)
            os.kill(worker, signal.SIGSTOP)
            time.sleep(8)
            machine.signal(signal.SIGCONT)
            time.sleep(2)  # the order in which a freezer lets processes go on is nobody's choice
            os.kill(worker, signal.SIGCONT)
            time.sleep(6)
            assert not machine.events("worker_killed")
            assert [process.pid for process in machine.workers()] == [worker]
            os.kill(worker, signal.SIGSTOP)  # and this one alone does not report
            assert "did not report" in machine.wait_for("worker_killed")[0]["reason"]
            machine.wait_for("worker_serves", 2)
            assert len(machine.events("worker_killed")) == 1
            assert machine.stop() == ExitCode.OK

    def test_a_worker_that_loads_ends_at_once_with_its_supervisor(
        self, configure: Configure, tmp_path: Path
    ) -> None:
        (tmp_path / "model").mkdir()
        os.mkfifo(tmp_path / "model" / "gristmill.json")  # it waits for who writes
        with Machine(tmp_path, str(configure(tmp_path / "model"))) as machine:
            machine.wait_for("loading")
            workers = machine.workers()
            machine.process.kill()
            try:
                wait_until(lambda: not any(worker.is_running() for worker in workers))
            finally:
                for worker in workers:
                    if worker.is_running():
                        worker.kill()

    def test_a_supervisor_that_is_killed_while_workers_finish_does_not_cut_them_off(
        self, configure: Configure, tiny_classifier: Path, own_redis: Any, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, redis=own_redis.url))) as machine:
            machine.wait_for("worker_serves")
            (worker,) = machine.workers()
            own_redis.process.send_signal(signal.SIGSTOP)  # it waits for an answer
            try:
                time.sleep(0.5)
                machine.signal(signal.SIGTERM)
                machine.wait_for("draining", 2)
                time.sleep(0.5)
                machine.process.kill()
                time.sleep(2)
                assert worker.is_running()
            finally:
                own_redis.process.send_signal(signal.SIGCONT)
            wait_until(lambda: not worker.is_running())
            assert machine.events("stopped")


class TestOutput:
    def test_a_log_that_nobody_reads_any_more_ends_no_work(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str
    ) -> None:
        command = [sys.executable, "-m", "gristmill_worker", "run", str(configure(tiny_classifier))]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert process.stderr.readline()
            process.stderr.close()
            try:
                assert client.score(f"{queue}-a", "grain", timeout_s=60)
                (worker,) = psutil.Process(process.pid).children()
                worker.kill()
                wait_until(lambda: worker not in psutil.Process(process.pid).children())
                assert client.score(f"{queue}-a", "grain", timeout_s=60)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == ExitCode.OK
            finally:
                process.kill()

    def test_it_runs_without_the_three_standard_files(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
        with Machine(tmp_path, str(configure(tiny_classifier)), wrapped=closed) as machine:
            wait_until(lambda: client.workers(f"{queue}-a") or machine.process.poll() is not None)
            assert client.score(f"{queue}-a", "grain", timeout_s=60)
            assert machine.stop() == ExitCode.OK

    def test_it_writes_to_a_terminal_that_stops_others_in_the_background(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str
    ) -> None:
        command = [sys.executable, "-m", "gristmill_worker", "run", str(configure(tiny_classifier))]
        script = f"stty tostop; {shlex.join(command)} & echo $! > $0; wait $!; exit $?"
        pid_file = configure(tiny_classifier).with_name("pid")
        ours, theirs = pty.openpty()
        shell = ["setsid", "--ctty", "bash", "-mc", script, str(pid_file)]
        with subprocess.Popen(shell, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            thread = threading.Thread(target=_drain, args=(ours,))
            thread.start()
            try:
                wait_until(lambda: pid_file.exists() and pid_file.read_text())
                assert client.score(f"{queue}-a", "grain", timeout_s=60)
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
                assert process.wait(timeout=60) == ExitCode.OK
            finally:
                for left in (
                    psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ()
                ):
                    left.kill()
                process.kill()
                thread.join()
                os.close(ours)


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def _drain(terminal: int) -> None:
    """Read what a terminal shows until nobody has it any more."""
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


class TestSurroundings:
    def test_modules_in_the_working_folder_are_not_for_workers(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "orjson.py").write_text("raise SystemExit(77)\n")
        path = str(configure(tiny_classifier))
        # As the installed command runs, which has its own folder where 'python -m' has the working folder.
        python = ("-P", "-m", "gristmill_worker")
        with Machine(tmp_path, path, python=python, cwd=tmp_path / "here") as machine:
            machine.wait_for("worker_serves")
            assert machine.stop() == ExitCode.OK

    def test_where_no_process_can_be_started_it_tries_again(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, spares=1))) as machine:
            machine.wait_for("worker_serves")
            machine.wait_for("engine_ready", 2)
            before = resource.prlimit(machine.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(machine.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
            machine.workers()[0].kill()
            machine.wait_for("worker_not_started", 2)
            resource.prlimit(machine.process.pid, resource.RLIMIT_NOFILE, before)
            machine.wait_for("engine_ready", 3)
            assert len(machine.workers()) == 2
            assert machine.stop() == ExitCode.OK

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"cores": [0, 4000]}, "may not use 4000"),
            ({"model": "a\0b"}, "NUL"),
            ({"metrics": 1}, "one address is for all workers"),
        ],
    )
    def test_settings_that_cannot_be_used_end_it_with_the_reason(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path, settings: Any, reason: str
    ) -> None:
        paths = [
            configure(**{"model": tiny_classifier} | settings),
            configure(tiny_classifier, "b", workers="auto", metrics=0),
        ]
        with Machine(tmp_path, *map(str, paths)) as machine:
            assert machine.process.wait(timeout=60) == ExitCode.BAD_INPUT
            assert reason in machine.log.read_text("utf-8").splitlines()[-1]

    def test_a_redis_url_that_is_none_is_refused_at_the_start_and_at_a_reload(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, lazy=True, redis="nowhere"))) as machine:
            assert machine.process.wait(timeout=60) == ExitCode.USAGE
            assert "not a Redis URL" in machine.log.read_text("utf-8").splitlines()[-1]
        with Machine(tmp_path, str(configure(tiny_classifier, lazy=True))) as machine:
            machine.wait_for("machine_ready")
            configure(tiny_classifier, lazy=True, redis="nowhere")
            machine.wait_for("reload_refused")
            assert machine.stop() == ExitCode.OK

    def test_metrics_are_served_whichever_configuration_asks_for_them(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        paths = [configure(tiny_classifier), configure(tiny_classifier, "b", workers="auto", metrics=0)]
        with Machine(tmp_path, *map(str, paths)) as machine:
            machine.wait_for("metrics_served")
            machine.wait_for("worker_serves", 2)
            assert machine.stop() == ExitCode.OK

    def test_a_limit_below_what_a_new_worker_has_is_told_and_replaces_nobody(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, max_rss_mb=20))) as machine:
            machine.wait_for("max_rss_mb_too_small")
            time.sleep(3)  # it would be weighed by then
            assert len(machine.events("worker_starts")) == 1
            assert machine.stop() == ExitCode.OK


class TestReload:
    def test_a_model_that_is_still_being_copied_is_loaded_when_it_is_complete(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        shutil.copytree(tiny_classifier, model)
        path = configure(model, engine="onnxruntime", batch={"shapes": [[1, 48]]})
        with Machine(tmp_path, str(path)) as machine:
            machine.wait_for("worker_serves")
            model.rename(tmp_path / "old")
            model.mkdir()
            shutil.copy(tiny_classifier / "gristmill.json", model)
            time.sleep(6)  # a large file takes its time
            for file in tiny_classifier.iterdir():
                shutil.copy(file, model)
            machine.wait_for("worker_serves", 2)
            assert machine.stop() == ExitCode.OK

    def test_after_a_bad_change_a_dead_worker_is_replaced_by_one_with_the_good_settings(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier))) as machine:
            (first,) = machine.wait_for("worker_serves")
            configure(tmp_path / "nothing")
            machine.wait_for("worker_starts", 2)
            machine.signal(signal.SIGHUP)  # the same again, while nobody knows yet that it cannot be used
            machine.wait_for("reload_failed")
            os.kill(first["pid"], signal.SIGKILL)
            machine.wait_for("worker_serves", 2)
            assert client.score(f"{queue}-a", "grain", timeout_s=60)
            assert machine.stop() == ExitCode.OK

    def test_one_that_is_killed_while_it_loads_ends_no_reload(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier))) as machine:
            machine.wait_for("worker_serves")
            machine.signal(signal.SIGHUP)
            os.kill(machine.wait_for("worker_starts", 2)[1]["pid"], signal.SIGKILL)
            machine.wait_for("worker_serves", 2)
            assert not machine.events("reload_failed")
            assert machine.stop() == ExitCode.OK

    def test_a_model_that_cannot_be_loaded_any_more_leaves_the_others_at_work(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        shutil.copytree(tiny_classifier, model)
        paths = [configure(tiny_classifier, lazy=True), configure(model, "b", workers="auto")]
        with Machine(tmp_path, *map(str, paths)) as machine:
            machine.wait_for("machine_ready")
            model.rename(tmp_path / "elsewhere")
            machine.workers()[0].kill()
            machine.wait_for("model_cannot_start")
            assert client.score(f"{queue}-a", "grain", timeout_s=60)
            (tmp_path / "elsewhere").rename(model)
            assert client.score(f"{queue}-b", "grain", timeout_s=60)
            assert machine.stop() == ExitCode.OK

    def test_scaling_brings_no_queue_back_that_is_no_longer_served(
        self, configure: Configure, tiny_classifier: Path, own_redis: Any, queue: str, tmp_path: Path
    ) -> None:
        settings = {"cores": sorted(os.sched_getaffinity(0)), "redis": own_redis.url}
        path = configure(tiny_classifier, workers=1, **settings)
        with Machine(tmp_path, str(path)) as machine:
            machine.wait_for("worker_serves")
            own_redis.process.send_signal(signal.SIGSTOP)  # the worker that is to end waits for an answer
            try:
                time.sleep(0.5)
                configure(tiny_classifier, workers=1, **settings | {"queue": f"{queue}-other"})
                machine.wait_for("worker_serves", 2)
                assert len(machine.workers()) == 2
                machine.signal(signal.SIGTTIN)
                machine.wait_for("worker_starts" if len(settings["cores"]) > 1 else "scaling_refused", 3)
            finally:
                own_redis.process.send_signal(signal.SIGCONT)
            wait_until(lambda: len(machine.workers()) <= 2)
            served = [event["queue"] for event in machine.events("worker_starts")]
            assert served.count(f"{queue}-a") == 1
            assert machine.stop() == ExitCode.OK

    def test_metrics_are_served_where_a_reload_wants_them(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, metrics="127.0.0.1:0"))) as machine:
            machine.wait_for("worker_serves")
            configure(tiny_classifier, metrics="127.0.0.2:0")
            before, after = (event["address"] for event in machine.wait_for("metrics_served", 2))
            assert fetch(after, "/metrics")[0] == 200
            wait_until(lambda: not _is_open(before))
            with socket.create_server(("127.0.0.3", 0)) as taken:
                configure(tiny_classifier, metrics=f"127.0.0.3:{taken.getsockname()[1]}")
                assert "cannot be listened at" in machine.wait_for("reload_refused")[0]["error"]
                assert fetch(after, "/metrics")[0] == 200
            port = after.rpartition(":")[2]
            for number, host in ((3, "127.0.0.2"), (4, "0.0.0.0")):  # noqa: S104 - the old one is in the way
                configure(tiny_classifier, metrics=f"{host}:{port}")
                moved = machine.wait_for("metrics_served", number)[-1]["address"]
                assert moved == f"{host}:{port}"
            assert fetch(after, "/metrics")[0] == 200
            configure(tiny_classifier)
            wait_until(lambda: not _is_open(after))
            assert machine.stop() == ExitCode.OK

    def test_a_renamed_queue_whose_model_cannot_be_loaded_leaves_the_workers_at_work(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier))) as machine:
            (first,) = machine.wait_for("worker_serves")
            configure(tmp_path / "nothing", queue=f"{queue}-other")
            assert "nothing" in machine.wait_for("reload_failed")[0]["error"]
            wait_until(lambda: [process.pid for process in machine.workers()] == [first["pid"]])
            assert client.score(f"{queue}-a", "grain", timeout_s=60)
            machine.workers()[0].kill()  # the team lives on, not just its last worker
            machine.wait_for("worker_serves", 2)
            configure(tiny_classifier, queue=f"{queue}-other")
            assert client.score(f"{queue}-other", "grain", timeout_s=60)
            wait_until(lambda: not client.workers(f"{queue}-a"))
            assert machine.stop() == ExitCode.OK
