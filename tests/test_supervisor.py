"""One command for a machine: workers on cores of their own, replaced, reloaded, scaled and drained."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner

from conftest import meanwhile, wait_until
from gristmill import Client, Result
from gristmill.errors import ExitCode
from gristmill_worker.cli import cli
from gristmill_worker.sources import black_box
from gristmill_worker.supervisor.watch import Watch
from machine import Machine

Configure = Callable[..., Path]
ORT = "onnxruntime"
TWO = "0,1" if os.cpu_count() != 1 else "0"


@pytest.fixture
def configure(redis_url: str, queue: str, tmp_path: Path) -> Configure:
    """Writes a configuration for a supervisor; again under the same name it is changed.

    The engine that computes nothing starts soonest: a real one is for what depends on it.
    """

    def write(model: Path, name: str = "a", *, engine: str = "null", **settings: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        basic = {"queue": f"{queue}-{name}", "model": str(model), "redis": redis_url, "engine": engine}
        shapes = {"max_wait_ms": 2, "shapes": [[1, 16], [32, 16], [4, 48]]}
        content = yaml.safe_dump(basic | {"batch": shapes} | settings)
        # In one step, as editors do: nobody reads half of it.
        path.with_suffix(".new").write_text(content)
        path.with_suffix(".new").rename(path)
        return path

    return write


@contextmanager
def load(client: Client, queue: str) -> Iterator[list[Result]]:
    """Submit steadily while the block runs; afterwards the list holds all results."""
    ids: list[str] = []
    results: list[Result] = []
    with meanwhile(lambda: ids.extend(client.submit_many(queue, ["grain of wheat", "water"]))):
        yield results
    results += [client.result(each, timeout_s=60) for each in ids]


def cpus_of(process: psutil.Process) -> set[str]:
    """Return the CPU lists that the threads of a process may run on, as the kernel has them."""
    lists = set()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        lines = (task / "status").read_text("ascii").splitlines()
        lists |= {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")}
    return lists


BEGAN = time.time()


def notes(pid: int) -> list[Path]:
    """Return the notes that a process has left of what it has in native code."""
    found = black_box.FOLDER.glob(f"gristmill-*-{pid}-*")
    return [path for path in found if path.stat().st_mtime > BEGAN]  # older: of another with its number


class TestCores:
    def test_each_worker_has_a_core_of_its_own_with_all_its_threads(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, engine=ORT)), "--cores", TWO) as machine:
            count = len(TWO.split(","))
            serving = machine.wait_for("worker_serves", count)
            assert {process.pid for process in machine.workers()} == {event["pid"] for event in serving}
            assert [cpus_of(process) for process in machine.workers()] == [{core} for core in TWO.split(",")]
            assert machine.stop() == ExitCode.OK

    def test_models_share_the_cores_and_where_these_are_not_enough_both_run_on_one(
        self, configure: Configure, tiny_classifier: Path, tiny_encoder: Path, client: Client, tmp_path: Path
    ) -> None:
        paths = [configure(tiny_classifier, "a"), configure(tiny_encoder, "b"), configure(tiny_encoder, "c")]
        with Machine(tmp_path, *map(str, paths), "--cores", TWO) as machine:
            machine.wait_for("worker_serves", 3)
            assert {frozenset(cpus_of(each)) for each in machine.workers()} == {
                frozenset({core}) for core in TWO.split(",")
            }
            queues = [yaml.safe_load(path.read_text())["queue"] for path in paths]
            assert "label" in client.score(queues[0], "grain")[0]
            assert len(client.score(queues[2], "grain")) > 1
            assert machine.stop() == ExitCode.OK

    def test_more_workers_than_fit_are_refused_with_what_fits(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier)), "--workers", "5000") as machine:
            assert machine.process.wait(timeout=60) == ExitCode.BAD_INPUT
            assert "at most" in machine.log.read_text("utf-8")


class TestReplacement:
    def test_a_killed_worker_is_replaced_and_nothing_is_lost(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, engine=ORT)), "--workers", "1") as machine:
            machine.wait_for("worker_serves")
            with load(client, f"{queue}-a") as results:
                for round_ in range(1, 4):
                    time.sleep(0.3)
                    machine.workers()[0].kill()
                    machine.wait_for("worker_serves", round_ + 1)
            assert len(results) > 100
            assert all(result.ok for result in results)
            assert {event["reason"] for event in machine.events("worker_ended")} == {
                "it was ended by SIGKILL"
            }
            assert machine.stop() == ExitCode.OK

    def test_a_killed_worker_that_takes_long_to_load_is_followed_by_one_that_serves_soon(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        records = shutil.ignore_patterns("selftest-*")  # of tests before
        model = Path(shutil.copytree(tiny_classifier, tmp_path / "model", ignore=records))
        with Machine(tmp_path, str(configure(model, engine="openvino")), "--workers", "1") as machine:
            machine.wait_for("worker_serves")
            machine.workers()[0].kill()
            with load(client, f"{queue}-a") as results:
                _, second, third = machine.wait_for("worker_serves", 3)
                assert third["instead_of"] == second["pid"]
            assert all(result.ok for result in results)
            # The one that serves soon has one compilation for all shapes, which was tried by the first one.
            assert [event["whole"] for event in machine.events("engine_ready")] == [True, False, True]
            assert len(machine.events("self_test")) == 2
            assert machine.stop() == ExitCode.OK
            assert len(machine.events("worker_starts")) == 3

    def test_a_spare_serves_at_once_and_is_replaced_itself(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, spares=1)
        with Machine(tmp_path, str(path), "--workers", "1") as machine:
            (first,) = machine.wait_for("worker_serves")
            spare = machine.wait_for("worker_starts", 2)[1]["pid"]
            machine.wait_for("engine_ready", 2)
            assert not notes(spare)  # it has taken nothing, and would leave it behind
            os.kill(first["pid"], signal.SIGKILL)
            assert machine.wait_for("worker_serves", 2)[1]["pid"] == spare
            assert client.score(f"{queue}-a", "grain")
            machine.wait_for("worker_starts", 3)
            # The spare came from elsewhere, and keeps to the core that it was given.
            assert cpus_of(psutil.Process(spare)) == {str(first["cores"][0])}
            machine.wait_for("engine_ready", 3)
            assert machine.stop() == ExitCode.OK
            assert not any(notes(event["pid"]) for event in machine.events("worker_starts"))

    def test_a_worker_that_grows_too_large_is_replaced_when_it_has_finished(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, engine=ORT)
        with Machine(tmp_path, str(path), "--workers", "1") as machine:
            (first,) = machine.wait_for("worker_serves")
            configure(tiny_classifier, engine=ORT, max_rss_mb=first["rss_mb"] + 30)
            machine.wait_for("worker_serves", 2)
            # Large bodies are memory in use while they run; it is weighed once a second.
            while not machine.events("worker_too_large"):
                ids = client.submit_many(f"{queue}-a", ["grain " * 100_000] * 160)
                assert all(client.result(each, timeout_s=60).ok for each in ids)
            machine.wait_for("worker_serves", 3)
            assert machine.stop() == ExitCode.OK


class TestStart:
    def test_a_model_that_cannot_be_used_ends_it_with_its_reason(
        self, configure: Configure, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tmp_path / "nothing"))) as machine:
            assert machine.process.wait(timeout=60) == ExitCode.BAD_INPUT
            assert "error: " in machine.log.read_text("utf-8")
            assert "nothing" in machine.log.read_text("utf-8").splitlines()[-1]
            assert not machine.events("machine_ready")

    def test_workers_that_end_again_and_again_end_it_with_the_last_reason(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        folders = [str(_broken(tmp_path)), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
        with Machine(tmp_path, str(configure(tiny_classifier)), "--workers", "1", env=environment) as machine:
            assert machine.process.wait(timeout=120) == ExitCode.CRASH_LOOP
            assert len(machine.events("worker_ended")) == 5
            last = machine.log.read_text("utf-8").splitlines()[-1]
            assert "5 workers in a row ended before they were ready" in last
            assert "SIGABRT" in last

    def test_a_redis_that_refuses_every_worker_ends_it_with_its_reason(
        self, configure: Configure, tiny_classifier: Path, own_redis: Any, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, redis=f"{own_redis.url}?db=99")  # it has 16
        with Machine(tmp_path, str(path), "--workers", "1") as machine:
            assert machine.process.wait(timeout=180) == ExitCode.BROKER_UNAVAILABLE
            assert len(machine.events("worker_ended")) == 5
            assert machine.log.read_text("utf-8").splitlines()[-1].startswith("error: ")

    def test_two_configurations_of_one_queue_are_refused(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path, queue: str
    ) -> None:
        paths = [configure(tiny_classifier, "a"), configure(tiny_classifier, "b", queue=f"{queue}-a")]
        with Machine(tmp_path, *map(str, paths)) as machine:
            assert machine.process.wait(timeout=60) == ExitCode.BAD_INPUT
            assert "each needs one of its own" in machine.log.read_text("utf-8")


def _broken(folder: Path) -> Path:
    """Return a folder with a tokenizer library that crashes as a native one does, at its first use."""
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizers.py").write_text("import os\nos.abort()\n")
    return folder / "broken"


class TestReload:
    def test_a_rolling_reload_under_load_fails_no_request(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, engine=ORT)), "--cores", TWO) as machine:
            count = len(TWO.split(","))
            before = {event["pid"] for event in machine.wait_for("worker_serves", count)}
            with load(client, f"{queue}-a") as results:
                machine.signal(signal.SIGHUP)
                machine.wait_for("worker_serves", 2 * count)
                wait_until(lambda: len(machine.workers()) == count)
            assert not before & {process.pid for process in machine.workers()}
            assert all(result.ok for result in results)
            assert not machine.events("worker_ended")
            assert machine.stop() == ExitCode.OK

    def test_a_changed_file_is_a_reload_and_a_changed_number_of_workers_only_scales(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, workers=1)
        with Machine(tmp_path, str(path)) as machine:
            (first,) = machine.wait_for("worker_serves")
            if os.cpu_count() != 1:
                configure(tiny_classifier, workers=2)
                machine.wait_for("worker_serves", 2)
                assert first["pid"] in {process.pid for process in machine.workers()}
            configure(tiny_classifier, workers=1, result_ttl_s=77)
            wait_until(lambda: [each.pid for each in machine.workers()] not in ([first["pid"]], []))
            wait_until(lambda: len(machine.workers()) == 1 and machine.workers()[0].pid != first["pid"])
            assert machine.stop() == ExitCode.OK

    def test_a_model_that_was_replaced_is_loaded(
        self,
        configure: Configure,
        tiny_classifier: Path,
        tiny_encoder: Path,
        client: Client,
        queue: str,
        tmp_path: Path,
    ) -> None:
        model = tmp_path / "model"
        shutil.copytree(tiny_classifier, model)
        with Machine(tmp_path, str(configure(model, engine=ORT)), "--workers", "1") as machine:
            machine.wait_for("worker_serves")
            assert "label" in client.score(f"{queue}-a", "grain")[0]
            model.rename(tmp_path / "old")
            shutil.copytree(tiny_encoder, model)
            machine.wait_for("worker_serves", 2)
            wait_until(lambda: len(machine.workers()) == 1)
            assert isinstance(client.score(f"{queue}-a", "grain")[0], float)
            assert machine.stop() == ExitCode.OK

    def test_what_cannot_be_used_changes_nothing(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, workers=1)
        with Machine(tmp_path, str(path)) as machine:
            (first,) = machine.wait_for("worker_serves")
            path.write_text("queue: [")
            machine.signal(signal.SIGHUP)
            assert "cannot be read" in machine.wait_for("reload_refused")[0]["error"]
            configure(tmp_path / "nothing", workers=1)
            machine.wait_for("reload_failed")
            assert [process.pid for process in machine.workers()] == [first["pid"]]
            assert client.score(f"{queue}-a", "grain")
            assert machine.stop() == ExitCode.OK


class TestWatch:
    def test_only_what_somebody_else_changed_in_a_model_counts(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model.mkdir()
        (model / "model.onnx").write_bytes(b"graph")
        watch = Watch()
        for name in ("selftest-0123456789ab.json", ".selftest-0123456789ab.json-x", ".quantize-1"):
            assert not watch.look([model])
            (model / name).write_text("{}")
            assert not watch.look([model])
            assert not watch.look([model])
        (model / "costs-0123456789ab.json").write_text("{}")
        assert not watch.look([model])  # it may not be complete
        assert watch.look([model]) == {model}
        assert not watch.look([model])


class TestScale:
    def test_signals_add_and_remove_a_worker(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier)), "--cores", TWO) as machine:
            count = len(TWO.split(","))
            machine.wait_for("worker_serves", count)
            machine.signal(signal.SIGTTIN)
            machine.wait_for("scaling_refused")
            if count > 1:
                machine.signal(signal.SIGTTOU)
                wait_until(lambda: len(machine.workers()) == 1)
                for refused in (2, 3):
                    machine.signal(signal.SIGTTOU)
                    machine.wait_for("scaling_refused", refused)
                machine.signal(signal.SIGTTIN)
                machine.wait_for("worker_serves", 3)
            assert machine.stop() == ExitCode.OK

    def test_lazy_models_are_loaded_when_asked_for_in_the_place_of_the_least_recently_used(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        names = ["a", "b", "c", "d"]
        paths = [configure(tiny_classifier, name, lazy=True, workers=1, cores=[0]) for name in names[:1]]
        paths += [configure(tiny_classifier, name, lazy=True) for name in names[1:]]
        with Machine(tmp_path, *map(str, paths), "--max-loaded", "2", "--cores", "0") as machine:
            wait_until(machine.log.exists)
            for name in names:
                assert client.score(f"{queue}-{name}", "grain", timeout_s=60)
                assert len(client.workers(f"{queue}-{name}")) == 1
            wait_until(lambda: len(machine.workers()) == 2)
            unloaded = [event["queue"][-1] for event in machine.events("model_unloaded")]
            assert unloaded == ["a", "b"]
            assert client.score(f"{queue}-a", "grain", timeout_s=60)
            assert machine.stop() == ExitCode.OK


class TestEnd:
    def test_a_second_signal_ends_it_at_once(
        self, configure: Configure, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier))) as machine:
            machine.wait_for("worker_serves")
            workers = machine.workers()
            machine.signal(signal.SIGINT)
            machine.signal(signal.SIGTERM)
            assert machine.process.wait(timeout=60) == ExitCode.FORCED
            wait_until(lambda: not any(worker.is_running() for worker in workers))

    def test_a_worker_that_does_not_finish_in_time_is_ended(
        self, configure: Configure, tiny_classifier: Path, own_redis: Any, tmp_path: Path
    ) -> None:
        path = configure(tiny_classifier, shutdown_s=1, redis=own_redis.url)
        with Machine(tmp_path, str(path), "--workers", "1") as machine:
            machine.wait_for("worker_serves")
            own_redis.process.send_signal(signal.SIGSTOP)  # an answer that never comes: nothing to drain to
            try:
                time.sleep(0.5)
                assert machine.stop() == ExitCode.OK
            finally:
                own_redis.process.send_signal(signal.SIGCONT)
            assert "shutdown_s" in machine.events("worker_killed")[0]["reason"]

    def test_workers_outlive_no_supervisor_and_finish_what_they_have(
        self, configure: Configure, tiny_classifier: Path, client: Client, queue: str, tmp_path: Path
    ) -> None:
        with Machine(tmp_path, str(configure(tiny_classifier, engine=ORT)), "--cores", TWO) as machine:
            machine.wait_for("worker_serves", len(TWO.split(",")))
            workers = machine.workers()
            ids = client.submit_many(f"{queue}-a", ["grain"] * 500)
            machine.process.kill()
            wait_until(lambda: not any(worker.is_running() for worker in workers))
            depth = client.depth(f"{queue}-a")
            stopped = machine.events("stopped")
            assert len(stopped) == len(workers)
            assert (depth.pending, depth.waiting + sum(event["requests"] for event in stopped)) == (
                0,
                len(ids),
            )


def test_the_command_line_explains_itself_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    for args, code, text in (
        (["--help"], ExitCode.OK, "SIGHUP"),
        (["--workers", "many"], ExitCode.USAGE, "neither 'auto' nor a number"),
        (["--spares", "-1"], ExitCode.USAGE, "--spares"),
        ([str(tmp_path / "none.yaml")], ExitCode.USAGE, "does not exist"),
    ):
        found = CliRunner().invoke(cli, ["run", *args])
        assert found.exit_code == code
        assert text in found.output
