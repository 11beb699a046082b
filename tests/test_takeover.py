"""Who takes over what from whom, and when."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from conftest import Workers, wait_until
from gristmill import Client, keys
from gristmill.driver import Connections
from gristmill_worker import process
from gristmill_worker.sources import black_box
from gristmill_worker.sources.base import Delivery
from gristmill_worker.sources.black_box import BlackBox
from gristmill_worker.sources.streams import StreamSource

TEXTS = ["the miller grinds the corn", "water turns the wheel", "bread", "a horse and a cart on the road"]
FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)
NO_LEASE = "{lease_s: 3600}"  # nothing in a test waits for its end


def texts(count: int) -> list[str]:
    return [f"{TEXTS[i % 4]} {i}" for i in range(count)]


def pending(redis: Redis, queue: str) -> list[dict[str, Any]]:
    rows: list[Any] = redis.xpending_range(keys.requests(queue), keys.GROUP, "-", "+", 10_000)
    return rows


def owners(redis: Redis, queue: str) -> dict[bytes, bytes]:
    """Return entry -> consumer of all that is pending."""
    rows = pending(redis, queue)
    return {row["message_id"]: row["consumer"] for row in rows}


def consumers(redis: Redis, queue: str) -> set[bytes]:
    return {row["name"] for row in redis.execute_command("XINFO CONSUMERS", keys.requests(queue), keys.GROUP)}


def freeze_at_work(client: Client, victim: subprocess.Popen[bytes], queue: str, redis: Redis) -> None:
    """Stop ``victim`` while it has entries."""

    def is_frozen() -> bool:
        wait_until(lambda: client.depth(queue).pending > 0)
        victim.send_signal(signal.SIGSTOP)
        if b"w0" in owners(redis, queue).values():
            return True
        victim.send_signal(signal.SIGCONT)  # it had finished them by then
        return False

    wait_until(is_frozen)


def test_a_worker_killed_on_this_host_is_succeeded_at_once_whatever_the_lease(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    victim = workers.start(tiny_classifier, config=NO_LEASE)
    ids = client.submit_many(queue, texts(3000))
    freeze_at_work(client, victim, queue, redis)
    workers.start(tiny_classifier, config=NO_LEASE)
    victim.kill()
    victim.wait()
    assert all(client.result(request_id).ok for request_id in ids)
    wait_until(lambda: consumers(redis, queue) == {b"w1"})
    assert "worker_died" in workers.log(1).read_text()
    assert [worker["name"] for worker in client.workers(queue)] == ["w1"]
    assert redis.hkeys(keys.processes(queue)) == [b"w1"]


def test_a_worker_that_starts_later_succeeds_one_that_died_before(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    victim = workers.start(tiny_classifier, config=NO_LEASE)
    ids = client.submit_many(queue, texts(3000))
    freeze_at_work(client, victim, queue, redis)
    victim.kill()  # not waited for: a zombie is dead too
    redis.delete(keys.worker(queue, "w0"))  # its heartbeat has ended long ago
    workers.start(tiny_classifier, config=NO_LEASE)
    assert all(client.result(request_id).ok for request_id in ids)


def test_a_worker_killed_on_another_host_is_succeeded_after_its_lease(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    victim = workers.start(tiny_classifier, config="{lease_s: 10}")
    ids = client.submit_many(queue, texts(3000))
    freeze_at_work(client, victim, queue, redis)
    frozen = time.monotonic()
    redis.hset(keys.processes(queue), "w0", "elsewhere/6d0c/pid:[4026531836]/4711/1234")
    victim.kill()
    held = [entry for entry, owner in owners(redis, queue).items() if owner == b"w0"]
    workers.start(tiny_classifier, config="{lease_s: 10}")
    assert all(client.result(request_id).ok for request_id in ids)
    assert held
    assert time.monotonic() - frozen > 10 / 3  # it renews after a third of the lease, or somewhat later
    assert b"w0" in consumers(redis, queue)


def test_what_a_dead_worker_held_runs_before_what_a_busy_one_holds(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    slow = "{lease_s: 3600, batch: {max_items: 64, shapes: [[2, 48]]}}"  # 32 batches a window
    victim, _ = (workers.start(tiny_classifier, config=slow, program=FAULTY) for _ in range(2))
    ids = client.submit_many(queue, [f"slow {i}" for i in range(256)])
    wait_until(lambda: [*owners(redis, queue).values()].count(b"w0") > 64)  # more than one window
    wait_until(lambda: [*owners(redis, queue).values()].count(b"w1") > 64)
    victim.kill()
    victim.wait()
    held = {
        name: {entry for entry, at in owners(redis, queue).items() if at == name} for name in (b"w0", b"w1")
    }
    assert held[b"w0"]
    wait_until(lambda: not held[b"w0"] & owners(redis, queue).keys())
    assert len(held[b"w1"] & owners(redis, queue).keys()) > len(held[b"w1"]) / 2
    assert all(client.result(request_id).ok for request_id in ids)


def test_a_frozen_worker_that_wakes_up_takes_nothing_back(redis_url: str, redis: Redis, queue: str) -> None:
    frozen = StreamSource(redis_url, queue, "frozen", lease_s=30, result_ttl_s=60)
    other = StreamSource(redis_url, queue, "other", lease_s=30, result_ttl_s=60)
    stream = keys.requests(queue)
    for i in range(4):
        redis.execute_command("XADD", stream, "*", "id", f"r-{i}", "body", "{}")
    taken = frozen.take(4, 0.0)
    assert other.take(4, 0.0) == []
    redis.execute_command("XCLAIM", stream, keys.GROUP, "other", 0, taken[0].entry_id, taken[2].entry_id)
    time.sleep(0.05)
    frozen.renew(Connections(redis_url))
    assert list(owners(redis, queue).values()) == [b"other", b"frozen", b"other", b"frozen"]
    rows = pending(redis, queue)
    ages = [row["time_since_delivered"] for row in rows]  # ms
    assert min(ages[0], ages[2]) >= max(ages[1], ages[3]) + 45  # only its own were renewed
    assert [row["times_delivered"] for row in rows] == [2, 1, 2, 1]


def test_a_name_that_another_process_has_by_now_is_not_robbed(
    redis_url: str, redis: Redis, queue: str
) -> None:
    source = StreamSource(redis_url, queue, "w0", lease_s=30, result_ttl_s=60)
    redis.execute_command("XADD", keys.requests(queue), "*", "id", "r", "body", "{}")
    assert source.take(1, 0.0)
    names = [keys.processes(queue), keys.worker(queue, "w0"), *keys.streams(queue)]

    def inherit(its_process: str) -> Any:
        return Connections(redis_url).run("inherit", names, [keys.GROUP, "w1", "w0", its_process, 10])

    assert inherit(f"{process.here()}4711/1") == []
    assert set(owners(redis, queue).values()) == {b"w0"}
    (entry_id,) = owners(redis, queue)
    assert inherit(process.own()) == [keys.PRIORITIES.index(keys.DEFAULT) + 1, [entry_id]]
    assert set(owners(redis, queue).values()) == {b"w1"}


def test_entries_of_the_dead_keep_their_count_until_they_run(
    redis_url: str, redis: Redis, queue: str
) -> None:
    victim = StreamSource(redis_url, queue, "victim", lease_s=3600, result_ttl_s=60)
    heir = StreamSource(redis_url, queue, "heir", lease_s=3600, result_ttl_s=60)
    for i in range(40):
        redis.execute_command("XADD", keys.requests(queue), "*", "id", f"r-{i}", "body", "{}")
    assert len(victim.take(40, 0.0)) == 40
    redis.hset(keys.processes(queue), "victim", f"{process.here()}4711/1")
    assert heir.take(40, 0.0) == []
    heir.look(Connections(redis_url))
    for _ in range(40):
        (delivery,) = heir.take(40, 0.0)  # each alone
        assert delivery.deliveries == 2
    rows = pending(redis, queue)
    assert {(row["consumer"], row["times_delivered"]) for row in rows} == {(b"heir", 2)}
    assert heir.take(40, 0.0) == []
    assert consumers(redis, queue) == {b"heir"}


EXPOSED = """
import sys, time
from gristmill_worker import process
from gristmill_worker.sources.base import Delivery
from gristmill_worker.sources.black_box import BlackBox

box = BlackBox()
box.open()
with box.exposing([Delivery(b"1-0", {}, 1)]):
    pass
with box.exposing([Delivery(b"%d-0" % i, {}, 1, "high") for i in range(int(sys.argv[1]))]):
    print(process.own(), flush=True)
    time.sleep(600)
"""


def note_of_the_dead(count: int) -> tuple[str, Any]:
    """Return the name of a process that was killed with ``count`` requests in native code, and its note."""
    command = [sys.executable, "-c", EXPOSED, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        child.kill()
    return name, black_box.read(name)


def note_path(name: str) -> Path:
    """Return where the process ``name`` has its note: its number alone may have been another one's before."""
    number, started = name.split("/")[-2:]
    return black_box.FOLDER / f"gristmill-{os.getuid()}-{number}-{started}"


def _open_and_close() -> None:
    """Do what each worker does at its start."""
    black_box.remove(process.own())  # of a source that an earlier test did not close
    box = BlackBox()
    box.open()
    box.close()


class TestBlackBox:
    def test_what_was_in_native_code_can_be_read_after_a_kill(self) -> None:
        name, found = note_of_the_dead(300)
        assert found == {("high", b"%d-0" % i) for i in range(300)}
        black_box.remove(name)
        assert black_box.read(name) is None

    def test_too_many_to_note_are_all_suspect(self) -> None:
        name, found = note_of_the_dead(20_000)
        assert found is None
        black_box.remove(name)

    def test_all_its_memory_is_there_from_the_start(self) -> None:
        black_box.remove(process.own())  # of a source that an earlier test did not close
        box = BlackBox()
        box.open()
        try:
            path = note_path(process.own())
            found = path.stat()
            assert found.st_blocks * 512 >= found.st_size > 0
        finally:
            box.close()
        assert not path.exists()

    def test_threads_that_have_no_place_in_it_make_all_suspect(self) -> None:
        black_box.remove(process.own())  # of a source that an earlier test did not close
        box = BlackBox()
        box.open()
        barrier = threading.Barrier(black_box.THREADS + 1)

        def work() -> None:
            barrier.wait()  # at the same time: else they would have the same number
            with box.exposing([Delivery(b"1-0", {}, 1)]):
                barrier.wait()

        threads = [threading.Thread(target=work) for _ in range(black_box.THREADS + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with box.exposing([Delivery(b"2-0", {}, 1)]):
            assert black_box.read(process.own()) is None
        box.close()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
    def test_a_note_that_somebody_else_wrote_is_not_believed(self) -> None:
        name, found = note_of_the_dead(1)
        assert found is not None
        path = note_path(name)
        os.chown(path, 12345, 12345)
        assert black_box.read(name) is None
        path.rename(f"{path}-moved")
        path.symlink_to(f"{path}-moved")
        assert black_box.read(name) is None
        Path(f"{path}-moved").unlink()
        black_box.remove(name)

    def test_notes_that_nobody_reads_any_more_are_removed_and_those_of_the_living_never(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, found = note_of_the_dead(1)
        dead = note_path(name)
        command = [sys.executable, "-c", EXPOSED, "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            living = note_path(child.stdout.readline().strip())
            # As that of another container is seen here: no process has this number.
            foreign = living.with_name(f"gristmill-{os.getuid()}-{10**12}-{child.pid}")
            living.rename(foreign)
            link = foreign.with_name(foreign.name + "-link")
            link.symlink_to(dead)
            try:
                _open_and_close()
                assert dead.exists()  # it is young
                for note in (dead, foreign):
                    os.utime(note, (1, 1))
                _open_and_close()
                assert black_box.read(name) == found  # old, but who says that its process died long ago?
                _open_and_close()
                assert black_box.read(name) == found
                monkeypatch.setattr(black_box, "KEPT_S", 0.0)
                wait_until(lambda: time.time() > dead.stat().st_ctime)
                _open_and_close()
                assert not dead.exists()
                assert foreign.exists()
                assert link.is_symlink()
            finally:
                child.kill()
                for note in (foreign, link):
                    note.unlink()

    def test_what_a_dead_worker_had_not_begun_goes_on_in_batches(
        self, client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
    ) -> None:
        victim = workers.start(tiny_classifier, config=NO_LEASE)
        ids = client.submit_many(queue, texts(3000))
        freeze_at_work(client, victim, queue, redis)
        name: Any = redis.hget(keys.processes(queue), "w0")
        while not len(black_box.read(name.decode()) or ()) + 1 < len(owners(redis, queue)):
            victim.send_signal(signal.SIGCONT)  # at this moment the tokenizer had all of them
            freeze_at_work(client, victim, queue, redis)
        workers.start(tiny_classifier, config=NO_LEASE)
        victim.kill()
        victim.wait()
        results = [client.result(request_id) for request_id in ids]
        assert all(result.ok for result in results)
        again = [result for result in results if result.attempts == 2]
        together = [result for result in again if result.batch and result.batch["size"] > 1]
        assert again
        assert together
        assert all(result.worker == "w1" for result in again)
        wait_until(lambda: not note_path(name.decode()).exists())


def test_the_dead_are_told_from_the_living() -> None:
    itself = process.own()
    assert itself.startswith(process.here())
    assert not process.is_dead(itself)
    assert process.is_dead(f"{itself}0")  # the number was given to a later process
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        name = f"{process.here()}{child.pid}/{started}"
        assert not process.is_dead(name)
        child.kill()
        wait_until(lambda: process.is_dead(name))  # a zombie
    assert process.is_dead(name)


@pytest.mark.parametrize("odd", ["", "x", "1", f"{10**30}/5", "-1/5", "0/0"])
def test_what_is_no_process_is_never_dead_by_mistake(odd: str) -> None:
    # Number 0 would be the whole process group.
    assert not process.is_dead(process.here() + odd)
