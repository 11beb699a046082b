"""What a worker counts, as Prometheus sees it."""

import math
import signal
from pathlib import Path

import orjson

from conftest import Workers, wait_until
from gristmill import Client
from gristmill.core import Depth
from gristmill.errors import Status
from gristmill.wire import Result
from gristmill_worker import metrics
from gristmill_worker.jobs import BatchRun
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.rq.depth import RqDepths
from gristmill_worker.vitals import BOUNDS, Vitals
from probes import fetch_metrics, samples
from rq_fleet import RqFleet


def test_a_worker_counts_what_it_did_and_what_its_queue_holds(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, "--metrics", "0", config="batch: {max_items: 64, max_wait_ms: 50}")
    good = client.score_many(queue, [f"the mill grinds {i}" for i in range(90)])
    assert all(result.ok for result in good)
    bad = client.score_many(queue, [{"text": 5}] * 7)
    late = client.score_many(queue, ["bread"] * 3, deadline_s=0)
    assert [result.status for result in bad + late] == ["error"] * 7 + ["expired"] * 3
    wait_until(lambda: samples(fetch_metrics(workers.log()))["gristmill_request_seconds_count"][()] == 100)
    client.pause(queue)
    found = samples(fetch_metrics(workers.log()))
    statuses = {dict(labels)["status"]: count for labels, count in found["gristmill_results_total"].items()}
    assert statuses == {"ok": 90, "error": 7, "expired": 3, "cancelled": 0, "dead": 0}
    assert found["gristmill_queued_seconds_count"][()] == 90
    batches = found["gristmill_batches_total"][()]
    assert (
        found["gristmill_batch_seconds_count"][()] == found["gristmill_batch_requests_count"][()] == batches
    )
    assert found["gristmill_batch_requests_sum"][()] == 90
    tokens, padded = (found[f"gristmill_{name}_total"][()] for name in ("tokens", "padded_tokens"))
    assert tokens == sum(result.tokens or 0 for result in good) <= padded
    assert math.isclose(
        found["gristmill_engine_seconds_total"][()], found["gristmill_batch_seconds_sum"][()], rel_tol=0.01
    )
    stages = {dict(labels)["stage"] for labels in found["gristmill_stage_cpu_seconds_total"]}
    assert stages == {"take", "encode", "plan", "run", "finish"}
    assert found["gristmill_worker_resident_memory_bytes"][()] > 10e6
    assert found["gristmill_worker_ready"][()] == found["gristmill_redis_up"][()] == 1
    assert found["gristmill_queue_waiting"][()] == found["gristmill_queue_dead_letters"][()] == 0
    info = next(dict(labels) for labels in found["gristmill_worker_info"])
    assert info["pid"] == str(workers.processes[0].pid)
    assert info["engine"]

    def shows_the_pause() -> bool:
        if client.depth(queue).waiting < 4:  # some may still be taken, by a worker that does not know yet
            client.submit(queue, "bread")
        now = samples(fetch_metrics(workers.log()))
        return now["gristmill_queue_paused"][()] == 1 and now["gristmill_queue_waiting"][()] == 4

    wait_until(shows_the_pause)
    assert samples(fetch_metrics(workers.log()))["gristmill_queue_oldest_seconds"][()] > 0


def test_every_value_falls_into_its_bucket() -> None:
    vitals = Vitals("w", "q", max_wait_s=0, batch_timeout_s=0)
    for size, run_ms in ((1, 1.0), (2, 1.1), (513, 60_001.0)):
        vitals.ran(BatchRun(size, (size, 8), 0.0, run_ms))
    result = Result("a", Status.OK, timing_ms={"queued": 5.0, "encode": 0.0, "run": 0.0})
    dead = Outcome(Delivery(b"1-0", {}, 6), Result("b", "error"), reason="max_deliveries")
    ahead = Delivery(b"99999999999999-0", {}, 1)  # by a clock that is ahead of ours
    vitals.finished([Outcome(ahead, result), dead, Outcome(Delivery(b"1-1", {}, 1), None, reason="no ID")])
    found = samples(metrics.render([orjson.loads(orjson.dumps(vitals.snapshot()))], {}).decode())

    def count(name: str, bound: str) -> float:
        return found[f"gristmill_{name}_bucket"][(("le", bound),)]

    assert (count("batch_requests", "1.0"), count("batch_requests", "2.0")) == (1, 2)
    assert (count("batch_requests", "512.0"), count("batch_requests", "+Inf")) == (2, 3)
    assert (count("batch_seconds", "0.001"), count("batch_seconds", "60.0")) == (1, 2)
    assert (count("queued_seconds", "0.005"), count("queued_seconds", "+Inf")) == (1, 1)
    assert (count("request_seconds", "0.005"), count("request_seconds", "1800.0")) == (1, 1)
    assert count("request_seconds", "+Inf") == 3
    assert found["gristmill_results_total"][(("status", "ok"),)] == 1
    assert found["gristmill_results_total"][(("status", "dead"),)] == 2
    assert all(list(bounds) == sorted(bounds) for bounds in BOUNDS.values())


def test_a_counter_that_nobody_described_is_shown_too_and_hostile_names_are_quoted() -> None:
    made = Vitals('a"} 1\nx{y="', "q", max_wait_s=0, batch_timeout_s=0).snapshot()
    made["counters"]["cache_hits"] = 7
    text = metrics.render([made], {"other": Depth(3, 2, 1, 9, paused=True, oldest_s=4.5)}).decode()
    found = samples(text)
    assert found["gristmill_cache_hits_total"][()] == 7
    assert found["gristmill_queue_oldest_seconds"][()] == 4.5
    assert 'gristmill_redis_up{queue="other"} 1.0\ngristmill_redis_up{queue="q"} 0.0' in text
    assert not [line for line in text.splitlines() if line.startswith("x{")]


def test_an_rq_queue_is_measured_as_rq_keeps_it(fleet: RqFleet, workers: Workers) -> None:
    fleet.start("--metrics", "0")
    fleet.wait(fleet.enqueue_many(20))
    fleet.wait([fleet.enqueue({"text": 5})])

    def page() -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        return samples(fetch_metrics(workers.log()))

    wait_until(lambda: page()["gristmill_request_seconds_count"][()] == 21)
    assert page()["gristmill_results_total"][(("status", "error"),)] == 1
    wait_until(lambda: page()["gristmill_queue_dead_letters"][()] == 1)
    assert page()["gristmill_queue_waiting"][()] == 0
    workers.processes[0].send_signal(signal.SIGTERM)
    assert workers.processes[0].wait(60) == 0
    reader = RqDepths(workers.url)
    assert reader.depth(workers.queue).oldest_s is None
    fleet.enqueue_many(3)
    depth = reader.depth(workers.queue)
    assert (depth.waiting, depth.pending, depth.dead, depth.paused) == (3, 0, 1, False)
    assert depth.oldest_s is not None
    assert 0 <= depth.oldest_s < 60
    reader.close()
