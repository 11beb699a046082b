"""RQ queues under a supervisor: a worker for each core, replaced, reloaded, loaded on demand, drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rq import Callback, Worker
from rq.job import Job

from conftest import meanwhile, wait_until
from gristmill import Client
from gristmill.errors import ExitCode
from gristmill_worker.depths import Readers
from gristmill_worker.settings import load_settings
from machine import Machine
from probes import address_of, metrics_of
from rq_fleet import SCORE, RqFleet

CORES = sorted(os.sched_getaffinity(0))[:2]
ORT = "onnxruntime"
WITHOUT_RQ = "import sys; sys.modules['rq'] = None; from gristmill_worker.cli import main; main()"


def configure(fleet: RqFleet, name: str = "rq", **settings: Any) -> Path:
    """Write a configuration, of the fleet's queue unless ``settings`` say otherwise."""
    path = fleet.workers.folder / f"{name}.yaml"
    basic = {"source": "rq", "queue": fleet.queue.name, "model": str(fleet.model), "name": "w"}
    more = {"redis": fleet.workers.url, "engine": "null", "cores": CORES, "lease_s": 3600}
    if settings.get("source", "rq") == "rq":
        more["rq"] = {"path": str(fleet.workers.folder)}
    path.write_text(yaml.safe_dump(basic | more | settings))
    return path


def start(fleet: RqFleet, *args: str, **keywords: Any) -> Machine:
    return Machine(fleet.workers.folder, *args, **keywords)


@contextmanager
def load(fleet: RqFleet) -> Iterator[list[Job]]:
    """Enqueue steadily while the block runs; afterwards the list holds all jobs, which have ended."""
    jobs: list[Job] = []
    with meanwhile(lambda: jobs.extend(fleet.enqueue_many(5))):
        yield jobs
    fleet.wait(jobs)


def test_the_command_rq_serves_with_a_worker_on_each_core_that_rq_lists(fleet: RqFleet) -> None:
    flags = ["--queue", fleet.queue.name, "--model", str(fleet.model), "--redis", fleet.workers.url]
    flags += ["--cores", ",".join(map(str, CORES)), "--path", str(fleet.workers.folder), "--allow-pickle"]
    pickled = fleet.pickled.enqueue(
        SCORE, ("bread", "water"), on_success=Callback("callbacks_of_rq.succeeded")
    )
    with start(fleet, *flags, "--name", "w", "--spares", "1", command="rq") as machine:
        machine.wait_for("machine_ready")
        wait_until(lambda: len(Worker.all(queue=fleet.queue)) == len(CORES))
        names = {f"w-{event['pid']}" for event in machine.events("worker_serves")}
        assert {worker.name for worker in Worker.all(queue=fleet.queue)} == names
        info = [sys.executable, "-m", "rq.cli", "info", "--url", fleet.workers.url, "--raw"]
        shown = subprocess.run(info, capture_output=True, text=True, timeout=60, check=True).stdout
        assert all(name in shown for name in names)
        jobs = fleet.enqueue_many(500)
        fleet.wait([*jobs, pickled])
        fleet.assert_each_ended_once([*jobs, pickled])
        assert fleet.said(pickled)
        assert 60 < fleet.redis.ttl(jobs[0].key) <= 500  # RQ's default
        assert {job.worker_name for job in Job.fetch_many([j.id for j in jobs], fleet.redis) if job} <= names
        assert machine.stop() == ExitCode.OK
    assert Worker.all(queue=fleet.queue) == []
    assert fleet.notes() == []


def test_a_killed_worker_is_replaced_and_its_jobs_run_again(fleet: RqFleet) -> None:
    path = configure(fleet, engine=ORT, batch={"shapes": [[1, 48]]})
    with start(fleet, str(path)) as machine:
        machine.wait_for("machine_ready")
        with load(fleet) as jobs:
            for round_ in range(1, 4):
                wait_until(lambda: fleet.held() > 0)
                machine.workers()[0].kill()
                machine.wait_for("worker_serves", len(CORES) + round_)
        fleet.assert_each_ended_once(jobs)
        wait_until(lambda: len(Worker.all(queue=fleet.queue)) == len(CORES))  # the dead are not listed
        assert machine.stop() == ExitCode.OK


@pytest.mark.parametrize("text", ["bread", ""], ids=["success", "failure"])
def test_a_callback_that_crashes_workers_fails_its_job_and_takes_no_neighbour_along(
    fleet: RqFleet, text: str
) -> None:
    crash, told = Callback("callbacks_of_rq.crash"), Callback("callbacks_of_rq.succeeded")
    jobs = fleet.enqueue_many(50)
    poison = fleet.enqueue(text, on_success=crash, on_failure=crash)
    jobs += [fleet.enqueue("bread", on_success=told) for _ in range(20)]  # they wait for the callback before
    with start(fleet, str(configure(fleet, max_deliveries=2, workers=1))) as machine:
        fleet.wait([poison, *jobs])
        assert "given up: 3 deliveries" in fleet.reason(poison)
        fleet.assert_each_ended_once(jobs)
        assert {len(fleet.said(job)) for job in jobs[50:]} == {1}
        # Both deliveries, and the failure callback of what was given up.
        assert [event["reason"] for event in machine.events("worker_ended")] == [
            "it was ended by SIGABRT"
        ] * 3
        assert machine.stop() == ExitCode.OK


def test_a_rolling_reload_under_load_fails_no_job_and_runs_none_twice(fleet: RqFleet) -> None:
    with start(fleet, str(configure(fleet, engine=ORT))) as machine:
        machine.wait_for("machine_ready")
        before = {event["pid"] for event in machine.events("worker_serves")}
        with load(fleet) as jobs:
            machine.signal(signal.SIGHUP)
            wait_until(lambda: not before & {worker.pid for worker in machine.workers()})
        fleet.assert_each_ended_once(jobs)
        assert not machine.events("worker_ended")
        assert not machine.events("worker_died")
        assert machine.stop() == ExitCode.OK
        stopped = machine.events("stopped")
        assert sum(event["requests"] for event in stopped) == len(jobs)


def test_sigterm_lets_all_workers_finish_what_they_have_and_leaves_the_rest(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(5000)
    path = configure(fleet, engine=ORT, batch={"max_items": 64, "shapes": [[1, 48]]})
    with start(fleet, str(path)) as machine:
        machine.wait_for("machine_ready")
        wait_until(lambda: "finished" in fleet.statuses(jobs))
        assert machine.stop() == ExitCode.OK
        statuses = fleet.statuses(jobs)
        assert {*statuses} == {"finished", "queued"}
        assert fleet.queue.get_job_ids() == [
            job.id for job, status in zip(jobs, statuses, strict=True) if status == "queued"
        ]
        assert fleet.notes() == []
        assert len(machine.events("stopped")) == len(CORES)


def test_workers_whose_supervisor_was_killed_finish_and_sign_off(fleet: RqFleet) -> None:
    path = configure(fleet, engine=ORT, batch={"max_items": 64, "shapes": [[1, 48]]})
    with start(fleet, str(path)) as machine:
        machine.wait_for("machine_ready")
        workers = machine.workers()
        with load(fleet) as jobs:
            wait_until(lambda: fleet.held() > 0)
            machine.process.kill()
            wait_until(lambda: not any(worker.is_running() for worker in workers))
            assert fleet.notes() == []
            assert Worker.all(queue=fleet.queue) == []
            fleet.start()
    fleet.assert_each_ended_once(jobs)


def test_an_rq_queue_and_a_queue_of_streams_share_a_machine_and_its_metrics(
    fleet: RqFleet, client: Client
) -> None:
    paths = [configure(fleet, metrics="0", workers=1), configure(fleet, "b", source="streams", queue="other")]
    with start(fleet, *map(str, paths)) as machine:
        machine.wait_for("machine_ready")
        address = address_of(machine.log)

        def shown(name: str, queue: str) -> float:
            lines = metrics_of(address).splitlines()
            return float(
                next(x for x in lines if x.startswith(f'gristmill_{name}{{queue="{queue}"}}')).split()[1]
            )

        name = fleet.queue.name
        assert client.score("other", "bread", timeout_s=60)
        fleet.wait([fleet.enqueue(""), *fleet.enqueue_many(20)])
        wait_until(lambda: shown("queue_dead_letters", name) == 1)
        assert shown("queue_dead_letters", "other") == 0
        assert shown("redis_up", name) == shown("redis_up", "other") == 1
        # One core set each, where there are two.
        cores = {event["queue"]: event["cores"] for event in machine.events("worker_serves")}
        assert len({*map(str, cores.values())}) == len(CORES)
        worker = psutil.Process(next(each.pid for each in Worker.all(queue=fleet.queue) if each.pid))
        worker.suspend()
        try:
            wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
            jobs = fleet.enqueue_many(7)
            wait_until(lambda: shown("queue_waiting", name) + shown("queue_pending", name) == 7)
            assert shown("queue_waiting", name) >= 6  # it may have one, if it was waiting for it
        finally:
            worker.resume()
        fleet.wait(jobs)
        wait_until(lambda: shown("queue_waiting", name) + shown("queue_pending", name) == 0)
        assert machine.stop() == ExitCode.OK


def test_lazy_models_are_loaded_when_their_rq_queue_has_jobs(fleet: RqFleet, client: Client) -> None:
    other = f"{fleet.queue.name}-streams"
    paths = [configure(fleet, lazy=True), configure(fleet, "b", source="streams", queue=other, lazy=True)]
    with start(fleet, *map(str, paths), "--max-loaded", "1") as machine:
        wait_until(machine.log.exists)
        assert client.score(other, "bread", timeout_s=60)
        assert not Worker.all(queue=fleet.queue)
        jobs = fleet.enqueue_many(20)
        fleet.wait(jobs)
        assert {*fleet.statuses(jobs)} == {"finished"}
        assert machine.wait_for("model_unloaded")[0]["queue"] == other
        assert client.score(other, "bread", timeout_s=60)
        wait_until(lambda: not Worker.all(queue=fleet.queue))
        assert machine.stop() == ExitCode.OK


def test_a_lazy_model_is_loaded_for_a_scheduled_job_whose_time_has_come(fleet: RqFleet) -> None:
    job = fleet.queue.enqueue_in(timedelta(seconds=1), SCORE, "bread")
    options = {"with_scheduler": True}
    with start(fleet, str(configure(fleet, lazy=True, rq=options))) as machine:
        fleet.wait([job])
        assert job.is_finished
        assert machine.stop() == ExitCode.OK


def test_the_scheduler_is_one_workers_and_soon_anothers_after_a_reload(fleet: RqFleet) -> None:
    lock = f"rq:scheduler-lock:{fleet.queue.name}"
    with start(fleet, str(configure(fleet, rq={"with_scheduler": True}))) as machine:
        machine.wait_for("machine_ready")
        wait_until(lambda: fleet.redis.exists(lock))
        first = fleet.redis.get(lock)
        before = {event["pid"] for event in machine.events("worker_serves")}
        soon = [fleet.queue.enqueue_in(timedelta(seconds=1), SCORE, "bread") for _ in range(20)]
        fleet.wait(soon)
        fleet.assert_each_ended_once(soon)
        machine.signal(signal.SIGHUP)
        wait_until(lambda: not before & {worker.pid for worker in machine.workers()})
        wait_until(lambda: fleet.redis.get(lock) not in {first, None})
        later = fleet.queue.enqueue_in(timedelta(seconds=1), SCORE, "bread")
        fleet.wait([later])
        fleet.assert_each_ended_once([later])
        assert machine.stop() == ExitCode.OK
    assert not fleet.redis.exists(lock)


def test_what_a_reload_cannot_use_is_refused_and_the_workers_stay(fleet: RqFleet) -> None:
    path = configure(fleet)
    with start(fleet, str(path)) as machine:
        machine.wait_for("machine_ready")
        before = {worker.pid for worker in machine.workers()}
        configure(fleet, source="streams", rq={"allow_pickle": True})
        machine.signal(signal.SIGHUP)
        assert "say 'source: rq' as well" in machine.wait_for("reload_refused")[0]["error"]
        jobs = fleet.enqueue_many(10)
        fleet.wait(jobs)
        assert {worker.pid for worker in machine.workers()} == before
        assert machine.stop() == ExitCode.OK


@pytest.mark.parametrize(
    ("settings", "python", "message"),
    [
        ({}, ("-c", WITHOUT_RQ), "the package 'rq' is missing: pip install 'gristmill[rq]'"),
        ({"redis": "redis+sentinel://x/mymaster"}, (), "not through sentinels"),
        ({"rq": {"path": "/no/such/folder"}}, (), "rq.path: /no/such/folder is no folder"),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_what_cannot_be_served_is_refused_with_its_reason(
    fleet: RqFleet, settings: dict[str, Any], python: tuple[str, ...], message: str, command: str
) -> None:
    path = configure(fleet, **settings)
    with start(fleet, str(path), command=command, python=python or ("-m", "gristmill_worker")) as machine:
        assert machine.process.wait(timeout=60) == ExitCode.BAD_INPUT
        text = machine.log.read_text()
        assert message in text.splitlines()[-1] if command == "serve" else message in text
        assert "engine_ready" not in text  # no model was loaded for nothing


def test_due_and_popped_jobs_count_where_a_worker_would_bring_them_back(fleet: RqFleet) -> None:
    name = fleet.queue.name
    fleet.queue.enqueue_in(timedelta(seconds=0), SCORE, "bread")
    fleet.queue.enqueue_in(timedelta(hours=1), SCORE, "bread")
    fleet.enqueue_many(3)
    fleet.redis.lpush(fleet.queue.key, "no-job")
    fleet.redis.set("rq:job:no-job", "no record")  # anybody may write there: the depth is known all the same
    fleet.redis.hset(f"gm:{{{name}}}:rq:processes", "dead", "process")
    fleet.redis.lmove(fleet.queue.key, f"gm:{{{name}}}:rq:popped:dead", "RIGHT", "LEFT")
    time.sleep(1.1)  # RQ counts in seconds
    found = []
    for scheduler in (False, True):
        settings = load_settings(configure(fleet, rq={"with_scheduler": scheduler}), {}, {})
        readers = Readers([settings])
        depth = readers.depth(name)
        readers.close()
        found.append((depth.waiting, depth.pending))
    assert found == [(3, 1), (4, 1)]
