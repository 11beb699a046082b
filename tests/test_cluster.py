"""A Redis Cluster: queues on several nodes, a slot that moves, a node that dies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from conftest import Workers, wait_until
from gristmill import Client, keys
from gristmill.embedded import find_redis_server
from gristmill.errors import BrokerUnavailable, ExitCode
from test_cli import gristmill
from topologies import Cluster, slot_of
from traffic import Traffic


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(find_redis_server(), tmp_path_factory.mktemp("cluster")) as nodes:
        for port in nodes.ports:
            nodes.add_users(port, *nodes.queues)
        yield nodes


@pytest.fixture(scope="module")
def workers(
    cluster: Cluster, tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Workers]]:
    """One worker process for each queue."""
    started = []
    for queue in cluster.queues:
        started.append(Workers(cluster.url_of("worker"), queue, tmp_path_factory.mktemp(queue)))
        started[-1].start(tiny_classifier, "--engine", "onnxruntime", "--lease-s", "5", ready=False)
    with Client(cluster.url) as client:
        wait_until(lambda: all(client.workers(queue) for queue in cluster.queues))
    yield started
    for each in started:
        assert each.processes[0].poll() is None
        each.processes[0].terminate()
        assert each.processes[0].wait(60) == 0
        log = each.log().read_text()
        assert "Traceback" not in log
        assert "NOPERM" not in log
        each.close()


def test_each_queue_is_on_the_node_of_its_slot_and_every_command_finds_it(
    cluster: Cluster, workers: list[Workers]
) -> None:
    with Traffic(cluster.url_of("producer"), cluster.queues, lambda _: True) as traffic:
        traffic.wait_for(5)
    certain, lost = traffic.check(lambda _: True)
    assert certain >= 60
    assert lost == 0
    for queue, node in zip(cluster.queues, cluster.nodes, strict=True):
        names = {*cluster.at(node).scan_iter()} - {keys.QUEUES.encode()}
        assert keys.requests(queue).encode() in names
        assert {key_slot(name) for name in names} == {slot_of(queue)}

    one_node = cluster.url_of("operator").partition(",")[0]  # the others are learnt from it
    shown = json.loads(gristmill("queue", "--json", url=one_node).stdout)
    assert [each["queue"] for each in shown] == sorted(cluster.queues)
    assert [[worker["name"] for worker in each["workers"]] for each in shown] == [["w0"]] * 3
    queue, node = cluster.queues[1], cluster.nodes[1]
    letter: Any = {
        "reason": "max_deliveries",
        "deliveries": 5,
        "worker": "w9",
        "id": "late",
        "body": '{"text":"bread"}',
    }
    cluster.at(node).xadd(keys.dead(queue), letter)
    assert json.loads(gristmill("dead", "ls", queue, "--json", url=one_node).stdout)["id"] == "late"
    assert gristmill("dead", "retry", queue, "--all", url=one_node).stdout == b"late\tqueued\n"
    assert gristmill("queue", "limit", queue, "5000", url=one_node).returncode == ExitCode.OK
    with Client(one_node) as client:
        assert client.result("late", queue=queue).ok
        cluster.at(node).xadd(keys.dead(queue), letter)
        assert client.purge_dead(queue, older_than_s=0) == 1
        assert client.depth(queue).max_length == 5000


def test_a_slot_moves_while_its_requests_are_answered(cluster: Cluster, workers: list[Workers]) -> None:
    queue = cluster.queues[1]
    slot, source, target = slot_of(queue), cluster.nodes[1], cluster.nodes[2]
    moved, asked = cluster.errors("MOVED"), cluster.errors("ASK") + cluster.errors("TRYAGAIN")
    with Traffic(cluster.url_of("producer"), cluster.queues, lambda _: True) as traffic:
        traffic.wait_for(5)
        cluster.migrate(slot, source, target)
        traffic.wait_for(5)
    certain, lost = traffic.check(lambda _: True)
    assert certain == sum(len(batch.ids) for batch in traffic.batches)
    assert lost == 0
    assert cluster.owner(slot, cluster.nodes[0]) == target
    assert cluster.at(target).exists(keys.requests(queue))
    assert cluster.errors("MOVED") > moved
    assert cluster.errors("ASK") + cluster.errors("TRYAGAIN") > asked


def test_a_node_that_dies_is_replaced_by_its_replica(cluster: Cluster, workers: list[Workers]) -> None:
    queue, node = cluster.queues[0], cluster.nodes[0]

    def replicated(of: str) -> bool:
        return of != queue or cluster.has_replicated(node, queue)

    with Traffic(cluster.url_of("producer"), cluster.queues, replicated) as traffic:
        traffic.wait_for(5)
        cluster.kill(node)
        wait_until(lambda: cluster.owner(slot_of(queue), cluster.nodes[1]) == cluster.replica)
        switched = time.monotonic()
        traffic.wait_for(5)
    before = sum(batch.replicated and batch.queue == queue for batch in traffic.batches)
    traffic.check(lambda batch: batch.replicated or batch.began > switched)
    assert before >= 5


def test_what_is_wrong_is_said(cluster: Cluster) -> None:
    for url, words in (
        (f"redis://127.0.0.1:{cluster.nodes[2]}", r"use redis\+cluster://"),
        ("redis+cluster://127.0.0.1:1", r"Redis Cluster \(127\.0\.0\.1:1\) is not available"),
        (cluster.url_of("producer").replace("change-me", "no"), "refused the login"),
    ):
        with Client(url, retry_s=0.1) as client, pytest.raises(BrokerUnavailable, match=words):
            client.submit(cluster.queues[0], "bread")
