"""From what RQ stored of a job to a delivery, or to the reason why this worker does not run it."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import orjson

from gristmill import wire
from gristmill.rq_jobs import SCORE, RefusedJobError, ScoreCall, read_call
from gristmill_worker.sources.base import Delivery

# What a job's record is asked for, in this order. A job without data is none.
FIELDS: Final = (
    "data",
    "enqueued_at",
    "timeout",
    "result_ttl",
    "success_callback_name",
    "repeats_left",
    "webhooks",
    "rate_limit_key",
)
_PICKLE_MARK: Final = b"\x80"
_MOST: Final = 2**53
_NO_LIMIT: Final = 2**62  # bytes; the loop applies the worker's
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class Json:
    """RQ's JSON serializer, which also takes numpy arrays."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return orjson.dumps(value, option=_OPTIONS)

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)


class Pickle:
    """RQ's pickle serializer, for jobs that came pickled and are allowed; numpy arrays become lists."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        with suppress(TypeError):  # of what a callback put in the job's meta
            value = orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def loads(data: bytes) -> Any:
        return pickle.loads(data)  # noqa: S301 - only with --allow-pickle


@dataclass(slots=True)
class RqDelivery(Delivery):
    """One execution of one RQ job. ``exact``: its success takes more than the usual bookkeeping."""

    job_id: str = ""
    execution: str = ""
    taken_s: float = 0.0  # Unix time
    result_ttl: int | None = None  # seconds; -1: for ever, None: the worker's
    exact: bool = False
    serializer: type[Json | Pickle] = Json

    @property
    def entry(self) -> str:
        """What it is listed as in RQ's registry of started jobs."""
        return f"{self.job_id}:{self.execution}"


def read(
    job_id: str,
    execution: str,
    deliveries: int,
    values: Sequence[bytes | None],
    *,
    taken_s: float,
    allow_pickle: bool,
) -> tuple[RqDelivery, Exception | None]:
    """Return a job's delivery, and why it fails if it is not to run; ``values`` are its FIELDS."""
    data, enqueued_at, timeout, result_ttl, callback, repeats_left, webhooks, rate_limit = values
    enqueued_s = _unix_s(enqueued_at) or taken_s
    ttl = _number(result_ttl)
    delivery = RqDelivery(
        entry_id=b"%d-%s" % (int(enqueued_s * 1000), execution.encode()),
        fields={},
        deliveries=deliveries,
        job_id=job_id,
        execution=execution,
        taken_s=taken_s,
        result_ttl=None if ttl is None else int(ttl),
        exact=bool(callback or webhooks or rate_limit or (_number(repeats_left) or 0) > 0 or ttl == 0),
    )
    try:
        call = _call(delivery, _unpack(data or b""), allow_pickle=allow_pickle)
        fields = {b"id": job_id.encode(), b"body": wire.encode_body(call.body, _NO_LIMIT)}
    except Exception as error:  # noqa: BLE001 - what was pickled can raise anything, also later
        return delivery, error
    limits: list[float] = []
    if call.deadline_s is not None:
        limits.append(enqueued_s + min(call.deadline_s, wire.MAX_TTL_S))
    run_s = _number(timeout)
    if run_s is not None and 0 < run_s <= wire.MAX_TTL_S:
        limits.append(taken_s + run_s)
    if limits:
        fields[b"deadline"] = b"%d" % (min(limits) * 1000)
    delivery.fields = fields
    return delivery, None


def _unpack(data: bytes) -> bytes:
    try:
        return zlib.decompress(data)
    except zlib.error:  # of an old RQ
        return data


def _call(delivery: RqDelivery, data: bytes, *, allow_pickle: bool) -> ScoreCall:
    if data.startswith(_PICKLE_MARK):
        if not allow_pickle:
            raise RefusedJobError(
                "the job's data is a pickle, which may run any code, so it was not read: enqueue with "
                "Queue(…, serializer=JSONSerializer) from rq.serializers, or start the worker with "
                "--allow-pickle (rq.allow_pickle) if all who can write to this Redis are trusted"
            )
        delivery.serializer = Pickle
    try:
        loaded = _loads(delivery.serializer, data)
    except Exception as error:  # a pickle can raise anything
        what = "a pickle that can be read here" if delivery.serializer is Pickle else "JSON"
        raise RefusedJobError(
            f"the job's data is not {what} ({error}): enqueue with Queue(…, serializer=JSONSerializer) "
            "from rq.serializers"
        ) from error
    if not isinstance(loaded, list | tuple) or len(loaded) != 4:
        raise RefusedJobError(
            "the job's data is not a call as RQ stores it: function, instance, args, kwargs"
        )
    function, instance, args, kwargs = loaded
    if function != SCORE or instance is not None:
        raise RefusedJobError(
            f"this queue is served by 'gristmill-worker rq', which runs {SCORE} only; the job calls "
            f"{str(function)[:200]!r}. Enqueue it on a queue that a plain RQ worker serves"
        )
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise RefusedJobError("the job's arguments are not a list and a mapping")
    return read_call(args, kwargs)


def _loads(serializer: type[Json | Pickle], data: bytes) -> Any:
    if serializer is Pickle:
        return Pickle.loads(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # Python's own takes more: NaN, lone surrogates
        return json.loads(data)


def _unix_s(text: bytes | None) -> float | None:
    try:
        return datetime.fromisoformat(text.decode()).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def _number(text: bytes | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and abs(number) <= _MOST else None
