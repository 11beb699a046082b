"""RQ jobs in batches: clients are plain RQ, jobs end as RQ's own workers would end them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rq
from rq import Callback, Queue, Retry, Worker
from rq.job import Dependency
from rq.registry import ScheduledJobRegistry
from rq.version import VERSION

from conftest import LABELS, wait_until
from gristmill.errors import ExitCode
from rq_fleet import SCORE, RqFleet


def test_the_version_is_the_one_that_is_to_be_tested() -> None:
    assert os.environ.get("RQ_VERSION", VERSION) == VERSION


def test_jobs_end_as_rqs_own_workers_end_them(fleet: RqFleet) -> None:
    jobs = fleet.enqueue_many(500)
    marked = fleet.enqueue("bread", meta={"customer": 7}, result_ttl=60)
    fleet.start()
    fleet.wait([*jobs, marked])
    for job in (jobs[0], jobs[-1], marked):
        job.refresh()
        result = job.latest_result()
        assert result is not None
        assert job.return_value() == result.return_value
        assert {each["label"] for each in fleet.value(job)} <= {*LABELS}
        assert job.is_finished
        assert job.worker_name == "w0"
        assert job.enqueued_at is not None
        assert job.started_at is not None
        assert job.ended_at is not None
        assert job.enqueued_at <= job.started_at <= job.ended_at
        assert job.get_executions() == []
    assert marked.meta == {"customer": 7}
    assert 0 < fleet.redis.ttl(marked.key) <= 60
    assert 0 < fleet.redis.ttl(f"rq:results:{marked.id}") <= 60
    assert 60 < fleet.redis.ttl(jobs[0].key) <= 500  # RQ's default
    assert fleet.queue.finished_job_registry.count == 501
    assert fleet.queue.failed_job_registry.count == 0
    assert fleet.is_clean()
    (worker,) = Worker.all(queue=fleet.queue)
    assert worker.successful_job_count == 501
    assert 0 < worker.total_working_time < 90


def test_the_worker_is_listed_while_it_serves_and_not_afterwards(fleet: RqFleet) -> None:
    process = fleet.start()
    (worker,) = Worker.all(queue=fleet.queue)
    assert (worker.name, worker.pid, worker.get_state()) == ("w0", process.pid, "idle")
    info = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info", "--url", fleet.workers.url, "--raw"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "w0" in info.stdout
    beat = fleet.redis.hget("rq:worker:w0", "last_heartbeat")
    wait_until(lambda: fleet.redis.hget("rq:worker:w0", "last_heartbeat") != beat)
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    assert Worker.all(queue=fleet.queue) == []


def test_an_item_is_a_text_a_pair_or_a_body(fleet: RqFleet) -> None:
    jobs = [
        fleet.enqueue("bread"),
        fleet.enqueue(["bread", "water"]),
        fleet.enqueue("bread", pair="water"),
        fleet.enqueue({"text": "bread", "pair": "water", "options": {"top_k": 2}}),
        fleet.enqueue("bread", options={"top_k": None}),
        fleet.queue.enqueue(SCORE, kwargs={"item": "bread"}),
    ]
    fleet.start()
    fleet.wait(jobs)
    values = [fleet.value(job) for job in jobs]
    assert [len(value) for value in values] == [1, 1, 1, 2, 3, 1]
    assert values[0] == values[5]
    assert values[1] == values[2]
    assert values[3][0] == values[1][0]


def test_embeddings_come_as_lists(fleet: RqFleet, tiny_encoder: Path) -> None:
    job = fleet.enqueue("bread")
    fleet.start(model=tiny_encoder)
    fleet.wait([job])
    assert all(isinstance(number, float) for number in fleet.value(job))


def test_each_bad_job_fails_with_its_reason_and_harms_no_neighbour(fleet: RqFleet) -> None:
    good = fleet.enqueue_many(100)
    bad = {
        fleet.queue.enqueue("os.getcwd"): "runs gristmill.rq_jobs.score only; the job calls 'os.getcwd'",
        fleet.queue.enqueue(SCORE): "missing 1 required positional argument: 'item'",
        fleet.queue.enqueue(SCORE, "bread", top=3): "unexpected keyword argument 'top'",
        fleet.enqueue(7): "an item is a text",
        fleet.enqueue(["one", "two", "three"]): "an item is a text",
        fleet.enqueue("  "): "'text' is empty",
        fleet.enqueue("bread", options={"top": 3}): "option 'top' is unknown",
        fleet.enqueue("bread", options=[3]): "options have to be a mapping",
        fleet.enqueue("bread", deadline_s="soon"): "deadline_s is 'soon'",
        fleet.enqueue("bread", deadline_s=0): "its deadline passed before it ran",
        fleet.enqueue("bread" * 300_000): "the body has",
        fleet.enqueue("\ud800"): "not valid JSON",
        fleet.pickled.enqueue(SCORE, "bread"): "is a pickle, which may run any code",
    }
    no_call = fleet.enqueue("bread")
    fleet.redis.hset(no_call.key, "data", b"no call at all")
    bad[no_call] = "the job's data is not JSON"
    no_data = fleet.enqueue("bread")
    fleet.redis.hdel(no_data.key, "data")
    fleet.redis.rpush(fleet.queue.key, "gone", "wrong-type", b"\xff\xfe")
    fleet.redis.set("rq:job:wrong-type", "no record")
    unreadable = fleet.enqueue("  ", failure_ttl=50)
    fleet.redis.hset(unreadable.key, "failure_ttl", "soon")
    odd = [fleet.enqueue("bread") for _ in range(5)]
    for job, value in zip(odd, (b"nan", b"inf", b"-1e400", b"soon", b"\xff"), strict=True):
        for name in ("timeout", "enqueued_at", "repeats_left"):
            fleet.redis.hset(job.key, name, value)
    fleet.redis.rpush(fleet.queue.key, b"not-text-\xff")
    fleet.redis.hset(b"rq:job:not-text-\xff", "data", b"[]")
    good += fleet.enqueue_many(100)
    fleet.start()
    fleet.wait([*good, *bad, unreadable, *odd])
    assert {*fleet.statuses(good)} == {"finished"}
    for job, reason in bad.items():
        assert reason in fleet.reason(job)
        assert job.is_failed
        assert job.id in fleet.queue.failed_job_registry
    assert fleet.statuses([unreadable, no_data]) == ["failed", "queued"]  # RQ has no such job either
    wait_until(fleet.is_clean)


def test_a_pickled_job_runs_where_pickles_are_allowed(fleet: RqFleet) -> None:
    job = fleet.pickled.enqueue(SCORE, ("bread", "water"), meta={"since": time.gmtime()})
    fleet.start(rq="allow_pickle: true")
    fleet.wait([job])
    assert fleet.value(job)[0]["label"] in LABELS
    assert job.get_meta()["since"].tm_year > 2000


def test_callbacks_run_and_a_broken_or_endless_one_fails_its_job_only(fleet: RqFleet) -> None:
    def callback(name: str, timeout: int = 60) -> Callback:
        return Callback(f"callbacks_of_rq.{name}", timeout=timeout)

    told = fleet.enqueue("bread", on_success=callback("succeeded"), on_failure=callback("failed"))
    failed = fleet.enqueue("", on_success=callback("succeeded"), on_failure=callback("failed"))
    broken = fleet.enqueue("bread", on_success=callback("broken"), on_failure=callback("failed"))
    endless = fleet.enqueue("bread", on_success=callback("endless", 2))
    asleep = fleet.enqueue("bread", on_success=callback("asleep", 1))
    missing = fleet.enqueue("bread", on_success=Callback("no_such_module.callback"))
    plain = fleet.enqueue_many(300)
    process = fleet.start()
    fleet.wait([told, failed, broken, endless, asleep, missing, *plain])
    assert fleet.said(told) == [f"ok {fleet.value(told)[0]['label']}"]
    assert fleet.said(failed) == [f"ScoringError: request {failed.id!r} failed: empty_input: 'text' is empty"]
    assert fleet.said(broken) == ["KeyError: 'no such customer'"]
    assert fleet.statuses([told, failed, broken, endless, asleep, missing]) == ["finished", *["failed"] * 5]
    for job in (endless, asleep):
        assert "JobTimeoutException" in fleet.reason(job)
    assert {*fleet.statuses(plain)} == {"finished"}
    assert fleet.said(endless) == ["begins"]
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK


def test_dependents_follow_a_success_and_not_a_failure_unless_that_is_allowed(fleet: RqFleet) -> None:
    parent, failing = fleet.enqueue("bread"), fleet.enqueue("")
    child = fleet.enqueue("water", depends_on=parent)
    grandchild = fleet.enqueue("corn", depends_on=[parent, child])
    waits = fleet.enqueue("water", depends_on=failing)
    goes_on = fleet.enqueue("water", depends_on=Dependency(failing, allow_failure=True))
    fleet.start()
    fleet.wait([parent, child, grandchild, failing, goes_on])
    assert fleet.statuses([parent, child, grandchild, failing, goes_on]) == [
        "finished",
        "finished",
        "finished",
        "failed",
        "finished",
    ]
    assert fleet.statuses([waits]) == ["deferred"]
    wait_until(fleet.is_clean)


def test_a_failed_job_is_retried_as_it_says(fleet: RqFleet) -> None:
    at_once = fleet.enqueue("", retry=Retry(max=2))
    later = fleet.enqueue("", retry=Retry(max=1, interval=3600))
    refused = fleet.queue.enqueue("os.getcwd", retry=Retry(max=5))
    succeeds = fleet.enqueue("bread", retry=Retry(max=2))
    fleet.start()
    fleet.wait([at_once, refused, succeeds])
    wait_until(lambda: fleet.statuses([later]) == ["scheduled"])
    assert later.id in ScheduledJobRegistry(queue=fleet.queue)
    at_once.refresh()
    assert (at_once.retries_left, at_once.get_status()) == (0, "failed")
    assert refused.is_failed  # it will never be another job
    assert succeeds.is_finished
    (worker,) = Worker.all(queue=fleet.queue)
    wait_until(lambda: int(fleet.redis.hget(worker.key, "failed_job_count") or 0) == 5)
    wait_until(fleet.is_clean)


def test_scheduled_jobs_come_back_where_that_is_asked_for(fleet: RqFleet) -> None:
    job = fleet.enqueue("", retry=Retry(max=1, interval=1))
    process = fleet.start(rq="with_scheduler: true")
    wait_until(lambda: fleet.statuses([job]) == ["failed"])
    job.refresh()
    assert job.retries_left == 0
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    assert not fleet.redis.exists(f"rq:scheduler-lock:{fleet.queue.name}")


def test_repeated_jobs_and_times_to_live_are_kept(fleet: RqFleet) -> None:
    has_repeat = hasattr(rq, "Repeat")  # RQ 2.0 has none
    repeated = fleet.enqueue("bread", **({"repeat": rq.Repeat(times=2)} if has_repeat else {}))
    discarded = fleet.enqueue("bread", result_ttl=0)
    for_ever = fleet.enqueue("bread", result_ttl=-1)
    failed = fleet.enqueue("", failure_ttl=70)
    told, plain = (
        fleet.enqueue("bread", on_success=Callback("callbacks_of_rq.succeeded")),
        fleet.enqueue("bread"),
    )
    fleet.start(config="result_ttl_s: 900")
    fleet.wait([discarded, for_ever, failed, told, plain])
    wait_until(lambda: len(repeated.results()) == (3 if has_repeat else 1))
    wait_until(lambda: fleet.statuses([repeated]) == ["finished"])
    assert fleet.statuses([discarded]) == [None]
    assert fleet.redis.ttl(for_ever.key) == -1
    assert fleet.redis.ttl(f"rq:results:{for_ever.id}") == -1
    assert for_ever.id in fleet.queue.finished_job_registry
    assert 0 < fleet.redis.ttl(failed.key) <= 70
    assert 500 < fleet.redis.ttl(told.key) <= 900
    assert 500 < fleet.redis.ttl(plain.key) <= 900
    wait_until(fleet.is_clean)


def test_a_job_cancelled_or_deleted_in_the_queue_is_not_run(fleet: RqFleet) -> None:
    cancelled, deleted, kept = fleet.enqueue("bread"), fleet.enqueue("bread"), fleet.enqueue("bread")
    cancelled.cancel()
    fleet.redis.delete(deleted.key)  # as a time to live does
    fleet.start()
    fleet.wait([kept])
    assert fleet.statuses([cancelled, deleted, kept]) == ["canceled", None, "finished"]
    wait_until(fleet.is_clean)


def test_suspended_workers_take_nothing_until_they_are_resumed(own_fleet: RqFleet) -> None:
    from rq.suspension import resume, suspend  # noqa: PLC0415

    suspend(own_fleet.redis)
    process = own_fleet.start()
    jobs = own_fleet.enqueue_many(10)
    time.sleep(1)
    assert {*own_fleet.statuses(jobs)} == {"queued"}
    resume(own_fleet.redis)
    own_fleet.wait(jobs)
    assert {*own_fleet.statuses(jobs)} == {"finished"}
    assert process.poll() is None


def test_what_cannot_be_served_ends_with_a_named_code(fleet: RqFleet) -> None:
    process = fleet.workers.start_command(["rq", "--queue", "a queue", "--model", str(fleet.model)])
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    process = fleet.workers.start_command(["rq", "--model", str(fleet.model)])
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    cluster = ["--redis", "redis+cluster://127.0.0.1:1"]
    process = fleet.workers.start_command(["rq", "--queue", "q", "--model", str(fleet.model), *cluster])
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    assert "from a cluster" in fleet.workers.log(2).read_text()


def test_a_plain_rq_worker_passes_its_jobs_on_or_says_who_can_run_them(
    fleet: RqFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rq import SimpleWorker  # noqa: PLC0415

    lost = fleet.enqueue("bread")
    SimpleWorker([fleet.queue], connection=fleet.redis, serializer=fleet.queue.serializer).work(burst=True)
    assert "gristmill-worker rq" in fleet.reason(lost)
    monkeypatch.setenv("GRISTMILL_REDIS", fleet.workers.url)
    fleet.workers.start(fleet.model)
    job, bad = fleet.enqueue(["bread", "water"], options={"top_k": 2}), fleet.enqueue("")
    SimpleWorker([fleet.queue], connection=fleet.redis, serializer=fleet.queue.serializer).work(burst=True)
    assert len(fleet.value(job)) == 2
    assert "empty_input" in fleet.reason(bad)


def test_two_kinds_of_worker_share_a_queue_of_other_jobs(fleet: RqFleet) -> None:
    elsewhere = Queue(f"{fleet.queue.name}-other", connection=fleet.redis, serializer=fleet.queue.serializer)
    after = elsewhere.enqueue("os.getcwd", depends_on=(first := fleet.enqueue("bread")))
    fleet.start()
    fleet.wait([first])
    wait_until(lambda: elsewhere.get_job_ids() == [after.id])  # its own workers take it
