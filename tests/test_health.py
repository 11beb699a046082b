"""/healthz and /readyz: what a real worker answers, and what its snapshot says where it hangs."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import Server, Workers, wait_until
from gristmill import Client
from gristmill.errors import ExitCode
from gristmill_worker import health, vitals
from gristmill_worker.depths import Depths, Readers
from gristmill_worker.settings import Settings
from gristmill_worker.vitals import Snapshot, Vitals, trouble, unready
from probes import address_of, ask, fetch, metrics_of

NOWHERE = "unix:///nowhere/redis.sock"


def snapshot(**more: Any) -> Snapshot:
    made = Vitals("w", "q", max_wait_s=0.0, batch_timeout_s=10.0)
    made.ready = made.redis_up = True
    made.move()
    return {**made.snapshot(), **more}  # type: ignore[typeddict-item]


@contextmanager
def served(*snapshots: Snapshot) -> Iterator[str]:
    with health.serve("0", lambda: snapshots, Client(NOWHERE)) as server:
        yield server.address


def test_a_worker_is_alive_while_it_loads_and_ready_when_its_engine_is_warm(
    client: Client, workers: Workers, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, "--metrics", "0", ready=False)
    address = address_of(workers.log())
    assert ask(address, "/healthz") == (200, {"ok": True, "workers": 1, "reasons": {}})
    wait_until(lambda: fetch(address, "/readyz")[0] == 200)
    assert client.score(workers.queue, "bread")
    assert fetch(address, "/")[0] == 404
    assert fetch(address, "/metrics", "POST")[0] == 501
    assert fetch(address, "/readyz", "HEAD") == (200, b"")


def test_a_redis_that_is_away_makes_a_worker_unready_but_not_dead(
    own_redis: Server, workers: Workers, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, "--metrics", "0", url=own_redis.url)
    address = address_of(workers.log())
    wait_until(lambda: fetch(address, "/readyz")[0] == 200)
    assert b"gristmill_redis_up" in fetch(address, "/metrics")[1]
    own_redis.stop(signal.SIGKILL)
    wait_until(lambda: fetch(address, "/readyz")[0] == 503)
    assert ask(address, "/readyz")[1]["reasons"] == {"w0": "Redis could not be reached"}
    assert fetch(address, "/healthz")[0] == 200
    wait_until(lambda: f'gristmill_redis_up{{queue="{workers.queue}"}} 0.0' in metrics_of(address))
    assert "gristmill_queue_waiting{" not in metrics_of(address)
    own_redis.start()
    wait_until(lambda: fetch(address, "/readyz")[0] == 200)
    wait_until(lambda: f'gristmill_redis_up{{queue="{workers.queue}"}} 1.0' in metrics_of(address))


def test_a_redis_that_answers_nothing_holds_up_no_scrape(own_redis: Server) -> None:
    own_redis_up = 'gristmill_redis_up{queue="q"} 1.0'
    with health.serve("0", lambda: [snapshot()], Client(own_redis.url, retry_s=0)) as server:
        assert own_redis_up in metrics_of(server.address)
        assert own_redis.process is not None
        own_redis.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: 'gristmill_redis_up{queue="q"} 0.0' in metrics_of(server.address))
            looks = [thread for thread in threading.enumerate() if thread.name == "depths"]
            assert len(looks) <= 1  # however often it is asked
        finally:
            own_redis.process.send_signal(signal.SIGCONT)
        wait_until(lambda: own_redis_up in metrics_of(server.address))


def test_a_redis_that_answers_nothing_hides_no_queue_of_another(
    own_redis: Server, redis_url: str, queue: str
) -> None:
    here, there = f"{queue}-here", {f"{queue}-{i}" for i in range(4)}
    urls = {here: redis_url, **dict.fromkeys(there, own_redis.url)}
    readers = Readers(Settings(queue=name, model=Path("m"), redis=url) for name, url in urls.items())
    depths = Depths(readers)
    wait_until(lambda: depths.get(urls).keys() == urls.keys())
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: here not in depths.get(urls) or depths.get(urls).keys() == {here})
        assert here in depths.get(urls)
    finally:
        own_redis.process.send_signal(signal.SIGCONT)
    wait_until(lambda: depths.get(urls).keys() == urls.keys())
    depths.close()


def test_a_loop_that_hangs_is_dead_and_one_that_waits_for_its_engine_is_not() -> None:
    now = time.monotonic()
    assert trouble(snapshot(), now) == ""
    hung = snapshot(moved_at=now - 100)
    assert trouble(hung, now) == "the loop has not come around for 100 s"
    assert unready(hung, now) == trouble(hung, now)
    assert trouble(snapshot(moved_at=now - 100, batch_at=now - 9), now) == ""
    assert "in one batch for 16 s" in trouble(snapshot(moved_at=now, batch_at=now - 16), now)
    assert trouble(snapshot(moved_at=now - 1000, batch_at=now - 1000, batch_timeout_s=0), now) == ""
    assert trouble(snapshot(moved_at=None), now + 1000) == ""  # it loads


def test_the_snapshot_of_a_process_that_is_stopped_grows_old() -> None:
    old = snapshot()
    assert trouble(old, old["taken_at"] + vitals.STALL_S - 1) == ""
    assert "not come around" in trouble(old, old["taken_at"] + vitals.STALL_S + 1)
    busy = snapshot(batch_at=old["taken_at"], batch_timeout_s=0)
    assert "not come around" in trouble(busy, old["taken_at"] + vitals.STALL_S + 1)


def test_of_several_workers_the_one_that_hangs_is_named() -> None:
    hung = snapshot(name="b", moved_at=time.monotonic() - 100)
    with served(snapshot(name="a"), hung) as address:
        status, found = ask(address, "/healthz")
        assert (status, found["workers"], list(found["reasons"])) == (503, 2, ["b"])
        assert fetch(address, "/readyz")[0] == 503
        text = metrics_of(address)
        assert 'gristmill_worker_stalled{model="",queue="q",worker="a"} 0.0' in text
        assert 'gristmill_worker_stalled{model="",queue="q",worker="b"} 1.0' in text
    with served() as address:
        assert fetch(address, "/healthz")[0] == 200
        assert ask(address, "/readyz") == (
            503,
            {"ok": False, "workers": 0, "reasons": {"": "no worker runs"}},
        )


def test_clients_that_say_nothing_hold_up_nobody() -> None:
    with served(snapshot()) as address:
        host, port = address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(3 * health.MOST)]
        try:
            assert fetch(address, "/healthz")[0] == 200
            # The oldest were closed to make room, so that threads stay few.
            silent[0].settimeout(30)
            assert silent[0].recv(1) == b""
        finally:
            for each in silent:
                each.close()


def test_half_a_request_and_no_request_at_all_harm_nobody() -> None:
    with served(snapshot()) as address:
        host, port = address.split(":")
        for junk in (b"GET /metr", b"\x00" * 70_000, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000):
            # It may be closed before it has read all.
            with (
                closing(socket.create_connection((host, int(port)))) as connection,
                suppress(ConnectionError),
            ):
                connection.sendall(junk)
        assert fetch(address, "/healthz")[0] == 200


@pytest.mark.parametrize("address", ["x", "host:", ":70000", "1.2.3.4.5:80", "no.such.host.invalid:80"])
def test_an_address_that_cannot_be_listened_at_ends_the_start(
    workers: Workers, tiny_classifier: Path, address: str
) -> None:
    process = workers.start(tiny_classifier, "--metrics", address, ready=False)
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    assert "metrics" in workers.log().read_text("utf-8")


def test_without_being_asked_no_port_is_opened(workers: Workers, tiny_classifier: Path) -> None:
    process = workers.start(tiny_classifier)
    sockets = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now
            sockets.add(link.readlink().name)
    listening = [
        line.split()
        for name in ("tcp", "tcp6")
        if (table := Path(f"/proc/{process.pid}/net/{name}")).exists()
        for line in table.read_text("ascii").splitlines()[1:]
    ]
    assert not [row for row in listening if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_a_machines_workers_are_shown_together(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path, redis_url: str
) -> None:
    command = ["run", "--model", str(tiny_classifier), "--queue", queue, "--redis", redis_url]
    machine = workers.start_command([*command, "--metrics", "0", "--engine", "onnxruntime"])
    address = address_of(workers.log())
    assert fetch(address, "/healthz")[0] == 200  # while it loads
    wait_until(lambda: fetch(address, "/readyz")[0] == 200)
    assert client.score(queue, "bread")
    wait_until(lambda: '"machine_ready"' in workers.log().read_text("utf-8"))
    wait_until(lambda: ask(address, "/readyz")[1]["ok"])
    count = ask(address, "/healthz")[1]["workers"]
    assert count > 0
    wait_until(lambda: len(client.workers(queue)) == count)
    wait_until(lambda: sum(settled(metrics_of(address))) == 1)
    assert len(settled(metrics_of(address))) == count
    victim = int(client.workers(queue)[0]["pid"])
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: str(victim) not in shown_pids(address) and len(shown_pids(address)) == count)
    wait_until(lambda: fetch(address, "/readyz")[0] == 200)
    machine.terminate()
    assert machine.wait(60) == 0


def shown_pids(address: str) -> list[str]:
    return re.findall(r'gristmill_worker_info\{.*pid="(\d+)"', metrics_of(address))


def settled(text: str) -> list[float]:
    """Return how many requests each worker answered well."""
    found = re.findall(r'^gristmill_results_total\{.*status="ok".*\} (\S+)$', text, flags=re.MULTILINE)
    return [float(each) for each in found]
