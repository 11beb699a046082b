"""What the jobs of a run do inside an RQ worker: progress, cancelling, which failures are final."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gristmill.bulk.shards.merge import Merged, merge
from gristmill.bulk.shards.plan import ShardPlan
from gristmill.bulk.shards.run import score_shard
from gristmill.bulk.shards.runs import CANCELLED
from gristmill.bulk.shards.submit import How, submit_described
from gristmill.bulk.summary import Summary
from gristmill.client import Client
from gristmill.console import needs_extra
from gristmill.driver import ERRORS
from gristmill.errors import InputFileError, TooManyErrors
from gristmill.rq_jobs import RefusedJobError, gristmill_url

with needs_extra("rq"):
    from rq import get_current_job
    from rq.exceptions import InvalidJobOperation
    from rq.job import Job as RqJob
    from rq.serializers import JSONSerializer

SAY_EVERY_S: Final = 1.0
HOW: Final = ("rq_queue", "retries", "intervals", "work")


class ShardJob:
    """The job that this process runs, of the run in ``folder``."""

    def __init__(self, folder: str, run: str) -> None:
        job = get_current_job()
        if job is None:
            raise RefusedJobError("this is a job for an RQ worker: 'gristmill bulk submit' enqueues it")
        self._job = job
        self._folder = Path(folder)
        self._run = run
        self._said_at = 0.0
        self._most: int | None = None

    def score(self, shard: int) -> dict[str, Any]:
        """Score a shard; returns its counts."""
        with self._final(), Client(gristmill_url()) as client:
            plan = ShardPlan.of(self._folder, self._run)
            self._most = plan.job.max_errors
            summary = score_shard(client, plan, shard, self._progress, self._still_ours)
            self._say(summary)
            return {"rows": summary.rows, "errors": dict(summary.errors), "seconds": summary.total_s}

    def merge(self) -> Merged:
        """Make the output. Once it has its name the job succeeds, however often it runs."""
        with self._final():
            try:
                return merge(ShardPlan.of(self._folder, self._run), self._published)
            except InputFileError:
                self._job.refresh()
                if (merged := self._job.meta.get("published")) is None:
                    raise
                return dict(merged)

    def _published(self, merged: Merged) -> None:
        self._job.meta["published"] = merged
        self._job.save_meta()

    @contextmanager
    def _final(self) -> Iterator[None]:
        """Keep RQ from trying again what cannot succeed.

        Other failures it tries again: another machine may have what this one lacks.
        """
        try:
            yield
        except (TooManyErrors, RefusedJobError):
            self._job.retries_left = 0
            raise

    def _still_ours(self) -> None:
        """End a job that was given up: somebody submitted the run again."""
        try:
            ShardPlan.of(self._folder, self._run)
        except InputFileError as error:
            raise RefusedJobError(str(error)) from error

    def _progress(self, summary: Summary) -> None:
        now = time.monotonic()
        if now - self._said_at < SAY_EVERY_S:
            return
        self._said_at = now
        with suppress(*ERRORS):  # progress is no reason to fail: the scoring itself waits for Redis
            self._say(summary)
            self._check_cancelled()
            if self._most is not None and summary.errors:
                self._check_errors(self._most)

    def _check_cancelled(self) -> None:
        try:
            status = self._job.get_status(refresh=True)
        except InvalidJobOperation:  # there is no such job any more
            raise RefusedJobError("the run was submitted again") from None
        if status in CANCELLED:
            self._job.meta["cancelled"] = True
            self._job.save_meta()
            raise RefusedJobError("the run was cancelled")

    def _say(self, summary: Summary) -> None:
        self._job.meta |= {
            "rows": summary.rows,
            "rows_per_s": round(summary.rows_per_second(), 1),
            "errors": dict(summary.errors),
        }
        self._job.save_meta()

    def _check_errors(self, most: int) -> None:
        """Compare the errors of all shards with what the whole run may have."""
        redis = self._job.connection
        run = RqJob.fetch_many([self._job.meta["of"]], connection=redis, serializer=JSONSerializer)[0]
        ids = [] if run is None else run.meta.get("shards", ())
        jobs = RqJob.fetch_many(ids, connection=redis, serializer=JSONSerializer)
        failed = sum(sum(job.meta.get("errors", {}).values()) for job in jobs if job is not None)
        if failed > most:
            raise TooManyErrors(f"{failed:,} rows of all shards failed, more than --max-errors {most}")


def submit_today(source: str | Sequence[str], out: str, queue: str, shards: int, **options: Any) -> str:
    """See :func:`gristmill.rq_jobs.submit_bulk`."""
    today = datetime.now(UTC).astimezone().date().isoformat()
    sources = [source] if isinstance(source, str) else source
    how = {name: options.pop(name) for name in HOW if name in options}
    if how.get("work") is not None:
        how["work"] = Path(how["work"])
    fields = {
        "source": [one.replace("{date}", today) for one in sources],
        "out": out.replace("{date}", today),
        "queue": queue,
    }
    return submit_described(gristmill_url(), How(shards, **how), **fields, **options).id
