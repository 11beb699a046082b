"""The jobs that RQ knows by name.

Clients enqueue :func:`score`: ``Queue("sentiment", …).enqueue("gristmill.rq_jobs.score", "text")``.
``gristmill-worker rq`` runs such jobs in batches and never calls it; it reads the calls with
:func:`read_call`. A plain RQ worker that takes one calls it.

The others are for plain RQ workers: the shards of a run (``gristmill bulk submit``), and its submission.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill.calls import check_seconds, make_body
from gristmill.client import Client
from gristmill.errors import GristmillError, InvalidRequestError

SCORE: Final = "gristmill.rq_jobs.score"
TIMEOUT_S: Final = 180.0  # where neither RQ nor the job has one


class RefusedJobError(GristmillError):
    """A job that 'gristmill-worker rq' does not run, however often it is tried; it fails without retries."""


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """What one job asks for: the body of a request, and within how many seconds after it was enqueued."""

    body: dict[str, Any]
    deadline_s: float | None = None


def score(
    item: Any,
    pair: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> Any:
    """Score one item; the job's return value is what ``Client.score`` returns.

    ``item`` is a text, ``[text, pair]``, or the body as a mapping; ``options`` go to the model's task;
    ``deadline_s`` seconds after it was enqueued the job is not run any more.

    This body runs only where a plain ``rq worker`` takes the job. It then passes the item on to the Gristmill
    queue of the same name at ``GRISTMILL_REDIS``, which ``gristmill-worker run`` serves, and waits.
    """
    call = read_call((item, pair), {"options": options, "deadline_s": deadline_s})
    url = os.environ.get("GRISTMILL_REDIS")
    queue, timeout_s = _current_job()
    if not url or not queue:
        raise GristmillError(
            f"{SCORE} was taken by a plain RQ worker, which has no model. Serve this queue with "
            "'gristmill-worker rq' alone; or set GRISTMILL_REDIS for the RQ worker, and it passes its jobs "
            "on to a 'gristmill-worker run' of the queue's name"
        )
    if call.deadline_s is not None:
        timeout_s = min(timeout_s, call.deadline_s)
    with Client(url) as client:
        return client.score(queue, call.body, timeout_s, deadline_s=timeout_s)


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScoreCall:
    """Return what a call of :func:`score` asks for, or raise InvalidRequestError."""
    try:
        item, pair, options, deadline_s = _bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error).replace("_bind()", "score()")
        raise InvalidRequestError(f"the arguments do not fit {SCORE}: {reason}") from error
    if isinstance(item, list):  # JSON has no tuples
        item = tuple(item)
    body = make_body(item, options)
    if pair is not None:
        if body.get("pair") is not None:
            raise InvalidRequestError(f"{SCORE} got two pairs: give it in the item or as an argument")
        body["pair"] = pair
    if deadline_s is not None:
        check_seconds("deadline_s", deadline_s)
    return ScoreCall(body, deadline_s)


def _bind(
    item: Any, pair: Any = None, *, options: Any = None, deadline_s: Any = None
) -> tuple[Any, Any, Any, Any]:
    return item, pair, options, deadline_s


def _current_job() -> tuple[str | None, float]:
    """Return the queue of the job that this process runs, and how long it may take in seconds."""
    from rq import get_current_job  # noqa: PLC0415 - only RQ's own processes get here

    job = get_current_job()
    if job is None:
        return None, TIMEOUT_S
    return job.origin, float(job.timeout) if job.timeout and job.timeout > 0 else TIMEOUT_S


def score_shard(folder: str, run: str, shard: int) -> dict[str, Any]:
    """Score one shard of a run that 'gristmill bulk submit' enqueued; see :mod:`gristmill.bulk.shards.plan`.

    A plain ``rq worker`` runs it. Killed and run again it goes on after the last part that is done.
    """
    from gristmill.bulk.shards.job import ShardJob  # noqa: PLC0415 - the other jobs here need less

    return ShardJob(folder, run).score(shard)


def merge_shards(folder: str, run: str) -> dict[str, Any]:
    """Make the output of the parts of all shards."""
    from gristmill.bulk.shards.job import ShardJob  # noqa: PLC0415 - as above

    return ShardJob(folder, run).merge()


def submit_bulk(source: str | Sequence[str], out: str, queue: str, shards: int, **options: Any) -> str:
    """Submit a run as 'gristmill bulk submit' does, and return its ID: a job for ``rq cron``.

    ``{date}`` in ``source`` and ``out`` is today's (2026-11-30). ``options`` are fields of
    :class:`gristmill.bulk.Job` (``text_column``, …) and ``rq_queue``, ``retries``, ``intervals``, ``work``.
    """
    from gristmill.bulk.shards.job import submit_today  # noqa: PLC0415 - as above

    return submit_today(source, out, queue, shards, **options)


def gristmill_url() -> str:
    """Return the URL of the Redis with Gristmill's queues, where a plain ``rq worker`` runs our jobs."""
    url = os.environ.get("GRISTMILL_REDIS")
    if not url:
        raise GristmillError(
            "set GRISTMILL_REDIS for the RQ worker: the URL of the Redis with the queue to score by"
        )
    return url
