"""Every key that the batch worker uses: RQ's own, as RQ's classes name them, and this project's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rq import Queue, SimpleWorker
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY


@dataclass(frozen=True, slots=True)
class Names:
    """Keys for one queue and one worker of it; prefixes end where the ID begins."""

    # RQ's
    queue: str
    started: str
    finished: str
    failed: str
    scheduled: str
    suspended: str
    workers: str
    queue_workers: str
    job_prefix: str
    results_prefix: str
    execution_prefix: str
    job_executions_prefix: str
    # this project's
    own: str
    processes: str
    alive_prefix: str
    # of the worker
    worker: str = ""
    executions: str = ""
    popped: str = ""
    held: str = ""
    alive: str = ""

    def of_worker(self, name: str) -> Self:
        """Return the keys for another worker of the queue."""
        record = f"{SimpleWorker.redis_worker_namespace_prefix}{name}"
        return replace(
            self,
            worker=record,
            executions=f"{record}:executions",
            popped=f"{self.own}:popped:{name}",
            held=f"{self.own}:held:{name}",
            alive=f"{self.alive_prefix}{name}",
        )

    @classmethod
    def of(cls, queue: Queue, worker: str) -> Self:
        redis = queue.connection
        own = f"gm:{{{queue.name}}}:rq"
        names = cls(
            queue=queue.key,
            started=StartedJobRegistry(queue=queue).key,
            finished=FinishedJobRegistry(queue=queue).key,
            failed=FailedJobRegistry(queue=queue).key,
            scheduled=ScheduledJobRegistry(queue=queue).key,
            suspended=WORKERS_SUSPENDED,
            workers=REDIS_WORKER_KEYS,
            queue_workers=WORKERS_BY_QUEUE_KEY % queue.name,
            job_prefix=as_text(Job.key_for("")),  # bytes in RQ 2.0
            results_prefix=Result.get_key(""),
            execution_prefix=Execution("", "", redis).key.removesuffix(":"),
            job_executions_prefix=ExecutionRegistry("", redis).key,
            own=own,
            processes=f"{own}:processes",
            alive_prefix=f"{own}:alive:",
        )
        return names.of_worker(worker)
