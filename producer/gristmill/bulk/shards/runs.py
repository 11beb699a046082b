"""Runs as RQ knows them: how far they are, and their end. Imported only where RQ is used (an extra)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis import ConnectionPool, Redis

from gristmill import urls
from gristmill.bulk.shards.plan import ShardPlan, output_id
from gristmill.console import needs_extra
from gristmill.driver import ERRORS, open_pool, translate
from gristmill.errors import ExitCode, InvalidRequestError, NotFoundError

with needs_extra("rq"):
    from rq.command import send_stop_job_command
    from rq.exceptions import InvalidJobOperation, NoSuchJobError
    from rq.job import Job as RqJob
    from rq.registry import StartedJobRegistry
    from rq.serializers import JSONSerializer

KEEP_S: Final = 30 * 24 * 3600  # what RQ knows of a run that ended
STOP_S: Final = 10.0  # for RQ's workers to obey
LIVE: Final = ("queued", "started", "scheduled", "deferred", "ready", "created")
CANCELLED: Final = ("canceled", "stopped")


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One job of a run; ``number`` is None for the merging one. ``total`` and ``rows`` count rows."""

    number: int | None
    job: str
    status: str
    rows: int = 0
    total: int = 0
    rows_per_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    worker: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run: ``state`` is finished, failed, cancelled or running; ``done_before`` rows were done at its
    submission."""

    id: str
    state: str
    out: str
    done_before: int
    shards: Sequence[ShardStatus]
    merge: ShardStatus
    result: Mapping[str, Any] | None = None

    @property
    def rows(self) -> int:
        return self.done_before + sum(shard.rows for shard in self.shards)

    @property
    def total(self) -> int:
        return self.done_before + sum(shard.total for shard in self.shards)

    @property
    def exit_code(self) -> ExitCode:
        if self.state == "finished":
            return ExitCode.ROWS_FAILED if (self.result or {}).get("errors") else ExitCode.OK
        codes = {"failed": ExitCode.FAILURE, "cancelled": ExitCode.INTERRUPTED}
        return codes.get(self.state, ExitCode.UNFINISHED)


@contextmanager
def connected(url: str) -> Iterator[Redis]:
    """Connect to the Redis that RQ keeps its jobs in; driver errors become BrokerUnavailable."""
    if urls.parse(url) is not None:
        raise InvalidRequestError("RQ works with one Redis server, not through sentinels or from a cluster")
    with Redis(connection_pool=open_pool(ConnectionPool, url)) as redis:
        try:
            yield redis
        except ERRORS as error:
            raise translate(error, url) from error
        finally:
            redis.connection_pool.disconnect()


def shard_id(run_id: str, run: str, number: int) -> str:
    return f"{run_id}-{run}-{number}"


def known_jobs(redis: Redis, run_id: str, plan: ShardPlan | None) -> list[RqJob]:
    """Return the jobs of the last submission that RQ knows, the merging one first."""
    ids = [run_id]
    found = RqJob.fetch_many(ids, connection=redis, serializer=JSONSerializer)
    if found[0] is not None:
        ids += found[0].meta.get("shards", ())
    elif plan is not None:  # the submission was cut short
        ids += (shard_id(run_id, plan.run, number) for number in range(len(plan.shards)))
    return [job for job in RqJob.fetch_many(ids, connection=redis, serializer=JSONSerializer) if job]


def run_id_of(target: str) -> str:
    """Return the run that ``target`` names: its ID, or its output."""
    return target if target.startswith("gm-bulk-") else output_id(_located_out(target))


def _located_out(target: str) -> str:
    return target if "://" in target else str(Path(target).absolute())


def _merge_job(redis: Redis, target: str) -> RqJob:
    run_id = run_id_of(target)
    try:
        return RqJob.fetch(run_id, connection=redis, serializer=JSONSerializer)
    except NoSuchJobError:
        raise NotFoundError(
            f"RQ knows no run {target!r}: it was not submitted there, its submission was cut short (submit "
            f"it again), or it ended more than {KEEP_S // 86_400} days ago"
        ) from None


def status(url: str, target: str) -> RunStatus:
    """Return what RQ knows of a run, named by its ID or its output; raises NotFoundError.

    Jobs whose worker died are put back, as any look at RQ's registry of started jobs does it.
    """
    with connected(url) as redis:
        merge = _merge_job(redis, target)
        StartedJobRegistry(merge.origin, connection=redis, serializer=JSONSerializer).get_job_ids()
        ids = [str(one) for one in merge.meta.get("shards", ())]
        found = RqJob.fetch_many(ids, connection=redis, serializer=JSONSerializer)
        shards = [_status(job, number, ids[number]) for number, job in enumerate(found)]
        merge.refresh()
        last = _status(merge, None, merge.id)
        result = merge.return_value() if last.status == "finished" else None
        return RunStatus(
            id=merge.id,
            state=_state([*shards, last]),
            out=str(merge.meta.get("out")),
            done_before=int(merge.meta.get("done_before", 0)),
            shards=shards,
            merge=last,
            result=result,
        )


def _state(jobs: Sequence[ShardStatus]) -> str:
    statuses = {job.status for job in jobs}
    if jobs[-1].status == "finished":
        return "finished"
    if statuses & {"failed", "lost"}:
        return "failed"
    return "cancelled" if statuses & {*CANCELLED} else "running"


def _status(job: RqJob | None, number: int | None, job_id: str) -> ShardStatus:
    if job is None:
        return ShardStatus(number, job_id, "lost", reason="RQ does not know this job any more")
    known = str(job.get_status(refresh=False).value)
    meta = job.meta
    if known == "failed" and meta.get("cancelled"):
        known = "canceled"
    return ShardStatus(
        number=number,
        job=job_id,
        status=known,
        rows=int(meta.get("rows", 0)),
        total=int(meta.get("total", 0)),
        rows_per_s=float(meta.get("rows_per_s", 0.0)) if known == "started" else 0.0,
        errors=meta.get("errors", {}),
        worker=job.worker_name if known == "started" else None,
        reason=_reason(job) if known == "failed" else None,
    )


def _reason(job: RqJob) -> str | None:
    """Return the last line of why a job failed, without the module of its error."""
    result = job.latest_result()
    text = "" if result is None else str(result.exc_string or "").strip()
    return text.splitlines()[-1].removeprefix("gristmill.errors.") if text else None


def cancel(url: str, target: str) -> RunStatus:
    """Cancel what waits of a run and stop what runs; parts that are done stay. Raises NotFoundError."""
    with connected(url) as redis:
        merge = _merge_job(redis, target)
        jobs = [merge]  # first, so that it does not start when its shards have ended
        ids = [str(one) for one in merge.meta.get("shards", ())]
        jobs += (job for job in RqJob.fetch_many(ids, connection=redis, serializer=JSONSerializer) if job)
        # What waits before what runs: a worker whose job is stopped takes the next one at once.
        for job in sorted(jobs, key=lambda job: job.get_status() == "started"):
            _stop(job)
        ends = time.monotonic() + STOP_S
        while (left := [job for job in jobs if job.get_status() == "started"]) and time.monotonic() < ends:
            time.sleep(0.1)
        for job in left:  # its worker does not listen, or is no more; a job that runs sees it and ends
            job.cancel()
    return status(url, target)


def _stop(job: RqJob) -> None:
    if job.get_status() == "started":
        try:
            send_stop_job_command(job.connection, job.id, serializer=JSONSerializer)
        except InvalidJobOperation:
            pass
        else:
            return
    if job.get_status() in LIVE:
        job.cancel()
