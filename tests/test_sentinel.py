"""A primary that is replaced by its replica, by sentinels: clients and workers go on by themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from conftest import Workers, carried_redis_server, wait_until
from gristmill import Client
from gristmill.errors import BrokerUnavailable, ExitCode
from gristmill.sentinel import GLANCE_S
from test_cli import gristmill
from topologies import SENTINEL_PASSWORD, SERVICE, Watched
from traffic import Traffic

QUEUE = "topics"  # that the users of the example have rights to


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(carried_redis_server(), tmp_path_factory.mktemp("watched")) as servers:
        yield servers


@pytest.fixture(scope="module")
def worker(
    watched: Watched, tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    workers = Workers(watched.url_of("worker"), QUEUE, tmp_path_factory.mktemp("worker"))
    workers.start(tiny_classifier, "--engine", "onnxruntime", "--lease-s", "5")
    yield workers
    assert workers.processes[0].poll() is None
    workers.processes[0].terminate()
    assert workers.processes[0].wait(60) == 0
    log = workers.log().read_text()
    assert "Traceback" not in log
    assert "NOPERM" not in log
    workers.close()


def test_a_planned_failover_is_followed_before_the_old_primary_knows_of_it(
    watched: Watched, worker: Workers
) -> None:
    old = watched.data[0]
    with Traffic(watched.url_of("producer"), [QUEUE], partial(watched.has_replicated, old)) as traffic:
        traffic.wait_for(20)
        watched.fail_over()
        new = watched.wait_for_another(old)
        switched = time.monotonic() + 2 * GLANCE_S
        time.sleep(2 * GLANCE_S)
        traffic.wait_for(20)
    certain, _ = traffic.check(lambda batch: batch.replicated or batch.began > switched)
    assert certain > 100
    # Sentinel would do it ten seconds after the failover.
    watched.ask(old, "REPLICAOF", "127.0.0.1", new)
    wait_until(lambda: watched.is_replica(old))


def test_after_the_death_of_the_primary_all_that_was_replicated_is_answered(
    watched: Watched, worker: Workers
) -> None:
    old = watched.data[1]
    with Traffic(watched.url_of("producer"), [QUEUE], partial(watched.has_replicated, old)) as traffic:
        traffic.wait_for(20)
        watched.kill(old)
        watched.wait_for_another(old)
        switched = time.monotonic()
        traffic.wait_for(20)
    before = sum(len(batch.ids) for batch in traffic.batches if batch.replicated)
    certain, _ = traffic.check(lambda batch: batch.replicated or batch.began > switched)
    assert before > 50
    assert certain > before + 50
    shown = gristmill("queue", "--json", url=watched.url_of("producer"))
    assert shown.returncode == ExitCode.OK, shown.stderr
    assert [each["queue"] for each in json.loads(shown.stdout)] == [QUEUE]


def test_what_is_wrong_is_said(watched: Watched) -> None:
    for url, words in (
        (watched.url.replace(f"/{SERVICE}", "/mil"), "the sentinels know no service 'mil'"),
        (watched.url.replace(SENTINEL_PASSWORD, "no"), "refused the login"),
        (watched.url_of("producer").replace("change-me", "no"), "refused the login"),
        (f"redis+sentinel://127.0.0.1:1/{SERVICE}", r"sentinels 127\.0\.0\.1:1\) is not available"),
    ):
        with Client(url, retry_s=0.1) as client, pytest.raises(BrokerUnavailable, match=words) as caught:
            client.submit(QUEUE, "bread")
        assert f"Redis '{'mil' if 'mil' in words else SERVICE}' (sentinels 127.0.0.1:" in str(caught.value)
