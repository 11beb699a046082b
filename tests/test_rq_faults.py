"""RQ jobs while workers die, freeze, crash on a job, or lose Redis: each ends exactly once."""

import os
import signal
import time
from pathlib import Path

import pytest
from redis import Redis
from rq import Callback, Queue, SimpleWorker
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from conftest import Server, wait_until
from faulty_worker import CRASHED
from gristmill.driver import Connections
from gristmill.errors import ExitCode
from gristmill_worker.sources.rq import holding
from gristmill_worker.sources.rq.holding import Holding
from gristmill_worker.sources.rq.names import Names
from rq_fleet import RqFleet

SMALL = "batch: {max_items: 64, shapes: [[1, 48]]}\n"  # one text at a time: many are held
NO_LEASE = "lease_s: 3600\n"  # nothing in a test waits for its end
FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)


def test_what_a_killed_worker_held_is_run_by_others_at_once_whatever_the_lease(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(3000)
    for number in range(3):
        victim = fleet.start(config=NO_LEASE + SMALL)
        wait_until(lambda name=f"w{number}": fleet.held(name) > 0)  # type: ignore[misc]
        victim.kill()
        victim.wait()
    fleet.start(config=NO_LEASE)
    fleet.wait(jobs)
    fleet.assert_each_ended_once(jobs)
    wait_until(lambda: fleet.redis.smembers(f"rq:workers:{fleet.queue.name}") == {b"rq:worker:w3"})
    assert not [*fleet.redis.scan_iter(f"gm:{{{fleet.queue.name}}}:rq:popped:*")]
    fields = fleet.redis.hkeys(jobs[0].key)
    assert b"gm_deliveries" not in fields


def test_a_worker_of_the_same_name_begins_with_what_the_last_one_held(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(500)
    victim = fleet.start("--name", "always", config=NO_LEASE + SMALL, ready=False)
    wait_until(lambda: fleet.held("always") > 0)
    victim.kill()
    victim.wait()
    fleet.start("--name", "always", config=NO_LEASE, ready=False)
    fleet.wait(jobs)
    fleet.assert_each_ended_once(jobs)


def test_a_frozen_workers_jobs_are_run_by_others_and_it_ends_none_twice(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(1000)
    frozen = fleet.start(config="lease_s: 1\n" + SMALL)
    wait_until(lambda: fleet.held("w0") > 0)
    frozen.send_signal(signal.SIGSTOP)
    fleet.start(config="lease_s: 1\n")
    fleet.wait(jobs)
    frozen.send_signal(signal.SIGCONT)
    more = fleet.enqueue_many(200)  # and goes on as if nothing had been
    fleet.wait(more)
    frozen.terminate()
    assert frozen.wait(timeout=60) == ExitCode.OK
    fleet.assert_each_ended_once([*jobs, *more])


def test_a_job_that_crashes_workers_fails_and_takes_no_neighbour_along(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(50)
    poison = fleet.enqueue("water turns the wheel")
    jobs += fleet.enqueue_many(50)
    config = NO_LEASE + "max_deliveries: 2\n"
    codes = []
    while fleet.statuses([poison]) != ["failed"] or not fleet.is_clean():
        process = fleet.start(config=config, program=FAULTY, ready=False)
        wait_until(
            lambda process=process: (  # type: ignore[misc]
                process.poll() is not None or (fleet.statuses([poison]) == ["failed"] and fleet.is_clean())
            )
        )
        codes.append(process.poll())
    assert codes == [CRASHED, CRASHED, None]
    assert "dead_lettered: given up: 2 deliveries" in fleet.reason(poison)
    assert [fleet.reason(job) for job in jobs if job.is_failed] == []
    assert {*fleet.statuses(jobs)} == {"finished"}
    assert poison.id in fleet.queue.failed_job_registry
    # Put back by hand, it is a job like any other.
    poison.requeue()
    wait_until(lambda: fleet.workers.processes[-1].poll() is not None)
    assert fleet.workers.processes[-1].returncode == CRASHED


def test_an_error_of_the_tokenizer_fails_one_job(fleet: RqFleet) -> None:
    jobs, bad = fleet.enqueue_many(30), fleet.enqueue("explode")
    fleet.start(program=FAULTY)
    fleet.wait([*jobs, bad])
    assert "cannot be encoded" in fleet.reason(bad)
    assert {*fleet.statuses(jobs)} == {"finished"}


def test_sigterm_finishes_what_was_taken_and_leaves_the_rest_in_the_queue(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(5000)
    process = fleet.start(config=SMALL)
    wait_until(lambda: "finished" in fleet.statuses(jobs[:64]))
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    statuses = fleet.statuses(jobs)
    waiting = statuses.count("queued")
    assert 0 < waiting < len(jobs)
    assert statuses == ["finished"] * (len(jobs) - waiting) + ["queued"] * waiting  # in order
    assert fleet.queue.get_job_ids() == [job.id for job in jobs[-waiting:]]
    assert fleet.notes() == []


def test_a_second_signal_ends_at_once_and_loses_nothing(fleet: RqFleet) -> None:
    slow = fleet.enqueue("bread", on_success=Callback("callbacks_of_rq.asleep"))
    jobs = fleet.enqueue_many(100)
    process = fleet.start(config=NO_LEASE)
    fleet.wait(jobs)  # they do not wait for the callback
    assert fleet.statuses([slow]) == ["started"]
    process.terminate()
    time.sleep(0.5)  # the worker does
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.FORCED
    fleet.redis.hset(slow.key, "success_callback_name", "callbacks_of_rq.succeeded")
    fleet.start(config=NO_LEASE)
    fleet.wait([slow])
    fleet.assert_each_ended_once([slow, *jobs])


def test_redis_may_go_and_come_back_in_the_midst_of_it(own_fleet: RqFleet, own_redis: Server) -> None:
    jobs = own_fleet.enqueue_many(2000)
    process = own_fleet.start(config=SMALL)
    for _ in range(2):
        wait_until(lambda: own_fleet.held("w0") > 0)
        own_redis.stop(signal.SIGKILL)
        time.sleep(0.5)
        own_redis.start()
    own_fleet.wait(jobs)
    own_fleet.assert_each_ended_once(jobs)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK


def test_a_drain_without_redis_ends_too(own_fleet: RqFleet, own_redis: Server) -> None:
    jobs = own_fleet.enqueue_many(2000)
    process = own_fleet.start(config=SMALL)
    wait_until(lambda: own_fleet.held("w0") > 0)
    own_redis.stop(signal.SIGKILL)
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    own_redis.start()
    own_fleet.start()
    own_fleet.wait(jobs)
    own_fleet.assert_each_ended_once(jobs)


def test_failures_and_callbacks_wait_for_redis_as_well(own_fleet: RqFleet, own_redis: Server) -> None:
    bad = [own_fleet.enqueue("") for _ in range(600)]
    told = own_fleet.enqueue("bread", on_success=Callback("callbacks_of_rq.succeeded"))
    own_fleet.start()
    wait_until(lambda: "failed" in own_fleet.statuses(bad))
    own_redis.stop(signal.SIGKILL)
    time.sleep(0.5)
    own_redis.start()
    own_fleet.wait([*bad, told])
    assert {*own_fleet.statuses(bad)} == {"failed"}
    assert own_fleet.queue.failed_job_registry.count == 600
    assert own_fleet.statuses([told]) == ["finished"]
    wait_until(own_fleet.is_clean)


def test_what_runs_for_long_is_not_abandoned_in_rqs_eyes(
    redis: Redis, redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_S", 0.0)
    rq_queue = Queue(queue, connection=redis, serializer=JSONSerializer)
    job = rq_queue.enqueue("gristmill.rq_jobs.score", "bread")
    names = Names.of(rq_queue, "w")
    connections = Connections(redis_url)
    held_jobs = Holding(connections, names, "w", 30)
    held_jobs.enter()
    entry = f"{job.id}:0011"
    redis.lpop(names.queue)
    redis.hset(names.held, entry, "1")
    redis.hset(job.key, "status", "started")
    redis.zadd(names.started, {entry: time.time() + 1})
    held_jobs.add(entry, suspect=False)
    held_jobs.renew(connections)
    time.sleep(2.1)
    StartedJobRegistry(queue=rq_queue).cleanup()  # as another worker's maintenance does
    assert job.get_status() == "started"
    held_jobs.leave()
    assert rq_queue.get_job_ids() == [job.id]
    assert job.get_status() == "queued"
    connections.close()


def test_plain_rq_workers_maintenance_leaves_batch_workers_alone(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(1500)
    fleet.start(config=SMALL)
    while {*fleet.statuses(jobs)} != {"finished"}:
        plain = SimpleWorker([fleet.queue], connection=fleet.redis, serializer=JSONSerializer)
        plain.clean_registries()
        os.sched_yield()
    fleet.assert_each_ended_once(jobs)
