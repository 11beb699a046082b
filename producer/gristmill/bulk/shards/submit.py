"""Enqueue a run as RQ jobs. Imported only where RQ is used (an extra)."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from redis import Redis

from gristmill.bulk.checkpoint import changes
from gristmill.bulk.job import Job, Plan
from gristmill.bulk.score import check_names, embedding_width, layout_of, wait_for_model
from gristmill.bulk.shards.folder import TRIES, clear, locked
from gristmill.bulk.shards.plan import (
    ShardPlan,
    find_starts,
    job_from,
    located,
    output_id,
    shards_folder,
    split,
)
from gristmill.bulk.shards.runs import KEEP_S, LIVE, RunStatus, connected, known_jobs, shard_id, status
from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, needs_extra
from gristmill.errors import InputFileError

with needs_extra("rq"):
    from rq import Queue, Retry
    from rq.job import Job as RqJob
    from rq.serializers import JSONSerializer

SHARD: Final = "gristmill.rq_jobs.score_shard"
MERGE: Final = "gristmill.rq_jobs.merge_shards"
RQ_QUEUE: Final = "gristmill-bulk"


@dataclass(frozen=True, slots=True)
class How:
    """How a run is to be enqueued.

    ``shards`` is the most jobs beside the merging one; a job that fails is tried ``retries`` times more,
    after ``intervals`` seconds, which where they are not 0 need an RQ worker with a scheduler. ``work`` is
    the folder that the jobs share (None: OUT.shards).
    """

    shards: int
    rq_queue: str = RQ_QUEUE
    retries: int = 5
    intervals: Sequence[int] = (0,)
    work: Path | None = None


def submit(url: str, job: Job, how: How) -> RunStatus:
    """Enqueue the jobs of a run; parts that an earlier submission of the same run has done are not repeated.

    Reads all inputs once to find where shards begin. Raises InputFileError if files cannot be used or if the
    run is still under way, NoWorkerError, BrokerUnavailable, InvalidRequestError.
    """
    job = located(job)
    run_id, folder = output_id(str(job.out)), shards_folder(str(job.out), how.work)
    with connected(url) as redis, locked(folder):
        plan = _last_plan(folder, force=job.force)
        jobs = known_jobs(redis, run_id, plan)
        # A merging job that waits for shards that have failed waits for ever.
        live = [one for one in jobs if one.get_status() in LIVE and not _waits_for_shards(one, run_id)]
        if live and any(one.id == run_id for one in jobs):  # else a submission was cut short
            raise InputFileError(
                f"{job.out} is being scored by {len(live)} jobs that are queued or run: see 'gristmill bulk "
                f"status {run_id}', or 'gristmill bulk cancel {run_id}' first"
            )
        plan = _plan(url, job, how, folder, plan)
        for one in jobs:
            one.delete()
        _enqueue(redis, run_id, plan, how)
    return status(url, run_id)


def _last_plan(folder: Path, *, force: bool) -> ShardPlan | None:
    try:
        return ShardPlan.last(folder)
    except InputFileError:
        if force:
            return None
        raise


def _waits_for_shards(job: RqJob, run_id: str) -> bool:
    return job.id == run_id and job.get_status() == "deferred"


def _plan(url: str, job: Job, how: How, folder: Path, known: ShardPlan | None) -> ShardPlan:
    files = Plan(job)
    with Client(url, retry_s=QUICK_RETRY_S) as client:
        task, models = wait_for_model(client, job.queue, job.wait)
        layout = layout_of(job, task)
        width = embedding_width(client, files, layout)
    with files.source() as source:
        check_names(source, layout, job)
    identity = files.identity(task, models)
    run = generation = secrets.token_hex(4)
    if known is None or job.force:
        clear(folder)
        starts, rows = find_starts(files)
    elif points := changes(known.identity, identity):
        raise InputFileError(
            f"{folder} holds an unfinished run of another job: {'; '.join(points)}. Give what was given then "
            "to go on with it, or --force to start afresh"
        )
    else:
        starts, rows, generation = [*known.starts], known.rows, known.generation
        shutil.rmtree(folder / TRIES, ignore_errors=True)  # of jobs that were killed
    plan = ShardPlan(folder, run, generation, job, identity, task, width, rows, starts, shards=())
    plan = replace(plan, shards=split(plan.missing(), how.shards))
    plan.write()
    return plan


def _enqueue(redis: Redis, run_id: str, plan: ShardPlan, how: How) -> None:
    queue = Queue(how.rq_queue, connection=redis, serializer=JSONSerializer)
    keywords: dict[str, Any] = {
        "job_timeout": -1,  # what hangs is ended by batch_timeout_s
        "result_ttl": KEEP_S,
        "failure_ttl": KEEP_S,
        "retry": Retry(how.retries, [*how.intervals]) if how.retries else None,
    }
    shared = {"folder": str(plan.folder), "run": plan.run}
    shards = [
        queue.enqueue(
            SHARD,
            kwargs={**shared, "shard": number},
            job_id=shard_id(run_id, plan.run, number),
            description=f"shard {number + 1} of {len(plan.shards)} of {plan.job.out}",
            meta={"of": run_id, "rows": 0, "total": plan.rows_in(ranges)},
            **keywords,
        )
        for number, ranges in enumerate(plan.shards)
    ]
    queue.enqueue(
        MERGE,
        kwargs=shared,
        job_id=run_id,
        description=f"merge of {plan.job.out}",
        depends_on=shards or None,
        meta={
            "out": str(plan.job.out),
            "shards": [shard.id for shard in shards],
            "done_before": plan.rows - sum(map(plan.rows_in, plan.shards)),
        },
        **keywords,
    )


def submit_described(url: str, how: How, **fields: Any) -> RunStatus:
    """Submit a run of a :class:`~gristmill.bulk.job.Job` whose fields are JSON values."""
    return submit(url, job_from(fields), how)
