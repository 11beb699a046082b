"""What the tests of RQ jobs share: RQ's own client, batch workers, and a module of callbacks."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import DefaultSerializer, JSONSerializer

from conftest import Workers, wait_until

SCORE = "gristmill.rq_jobs.score"
CALLBACKS = """
import os
import time
from rq import get_current_job

def succeeded(job, connection, result):
    connection.rpush("said:" + job.id, "ok " + result[0]["label"])

def failed(job, connection, kind, error, traceback):
    connection.rpush("said:" + job.id, kind.__name__ + ": " + str(error))

def broken(job, connection, result):
    raise KeyError("no such customer")

def endless(job, connection, result):
    connection.rpush("said:" + job.id, "begins")
    while True:
        time.sleep(0.01)

def crash(job, connection, *rest):
    time.sleep(0.2)
    os.abort()

def asleep(job, connection, result):
    time.sleep(3600)
"""


@dataclass
class RqFleet:
    """One RQ queue, its clients, and the batch workers that a test starts for it.

    The fixtures ``fleet`` and ``own_fleet`` have one on the shared server, and on one of the test's own.
    """

    redis: Redis
    workers: Workers
    model: Path

    def __post_init__(self) -> None:
        self.queue = Queue(self.workers.queue, connection=self.redis, serializer=JSONSerializer)
        self.pickled = Queue(self.workers.queue, connection=self.redis, serializer=DefaultSerializer)
        (self.workers.folder / "callbacks_of_rq.py").write_text(CALLBACKS)

    def start(
        self,
        *flags: str,
        config: str = "",
        rq: str = "",
        ready: bool = True,
        model: Path | None = None,
        program: Sequence[str] = ("-m", "gristmill_worker"),
    ) -> subprocess.Popen[bytes]:
        """Start one worker process; with ``ready`` return when RQ lists it. ``config`` is YAML."""
        number = len(self.workers.processes)
        path = self.workers.folder / f"rq-{number}.yaml"
        options = f"path: {self.workers.folder}" + (f", {rq}" if rq else "")
        path.write_text(f"source: rq\nrq: {{{options}}}\n{config}")
        command = ["serve", str(path), "--model", str(model or self.model), "--queue", self.queue.name]
        command += ["--redis", self.workers.url, "--name", f"w{number}", *flags]
        process = self.workers.start_command(command, program=program)
        if ready:
            record = f"rq:worker:w{number}"
            pid = str(process.pid).encode()
            wait_until(lambda: process.poll() is not None or self.redis.hget(record, "pid") == pid)
            assert process.poll() is None, self.workers.log(number).read_text()
        return process

    def enqueue(self, item: Any, **keywords: Any) -> Job:
        return self.queue.enqueue(SCORE, item, **keywords)

    def enqueue_many(self, count: int, text: str = "the miller grinds the corn") -> list[Job]:
        data = [Queue.prepare_data(SCORE, (f"{text} {i}",)) for i in range(count)]
        return self.queue.enqueue_many(data)

    def wait(self, jobs: Sequence[Job], timeout_s: float = 90.0) -> None:
        """Wait until each job has ended."""
        wait_until(lambda: {*self.statuses(jobs)} <= {"finished", "failed", "canceled", None}, timeout_s)

    def statuses(self, jobs: Sequence[Job]) -> list[str | None]:
        with self.redis.pipeline() as pipeline:
            for job in jobs:
                pipeline.hget(job.key, "status")
            return [value and value.decode() for value in pipeline.execute()]

    def held(self, worker: str | None = None) -> int:
        """Return how many jobs a worker holds, or all that live do."""
        own = f"gm:{{{self.queue.name}}}:rq"
        live: Any = self.redis.hkeys(f"{own}:processes")
        names = [worker] if worker else [name.decode() for name in live]
        return sum(int(self.redis.hlen(f"{own}:held:{name}")) for name in names)

    def notes(self) -> list[bytes]:
        """Return the keys that this project has in Redis beside RQ's own: none where no worker is."""
        return [*self.redis.scan_iter(f"gm:{{{self.queue.name}}}:rq:*")]

    def assert_each_ended_once(self, jobs: Sequence[Job]) -> None:
        """Check that each job has one result, and that nothing else is left of them."""
        assert {*self.statuses(jobs)} == {"finished"}
        with self.redis.pipeline() as pipeline:
            for job in jobs:
                pipeline.xlen(f"rq:results:{job.id}")
            assert {*pipeline.execute()} == {1}
        wait_until(self.is_clean)
        ids = {job.id for job in jobs}
        assert ids <= {*self.queue.finished_job_registry.get_job_ids()}
        records = {key.split(b":")[2] for key in self.redis.scan_iter("rq:execution:*")}
        assert not records & {job_id.encode() for job_id in ids}

    def is_clean(self) -> bool:
        """Say whether nothing is left of jobs that are being worked on."""
        held = [*self.redis.scan_iter(f"gm:{{{self.queue.name}}}:rq:held:*")]
        held += self.redis.scan_iter(f"gm:{{{self.queue.name}}}:rq:popped:*")
        started = self.redis.zcard(f"rq:wip:{self.queue.name}")
        return not held and not started and not self.queue.get_job_ids()

    def value(self, job: Job) -> Any:
        """Return what a finished job returned."""
        value = job.return_value(refresh=True)
        assert value is not None
        return value

    def reason(self, job: Job) -> str:
        """Return why a job failed."""
        result = job.latest_result()
        assert result is not None
        return str(result.exc_string)

    def said(self, job: Job) -> list[str]:
        """Return what the callbacks of a job said."""
        lines: Any = self.redis.lrange(f"said:{job.id}", 0, -1)
        return [line.decode() for line in lines]
