"""The plain end of a job: it succeeded, and nothing else has to happen. A whole batch of them is one step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from redis import Redis
from rq.results import Result as RqResult

from gristmill.driver import Connections
from gristmill.wire import Result
from gristmill_worker.sources.rq.holding import times
from gristmill_worker.sources.rq.names import Names
from gristmill_worker.sources.rq.payload import RqDelivery

# What RQ stores beside a result differs between its versions.
_RESULT_KEYWORDS: Final = frozenset(inspect.signature(RqResult.__init__).parameters)


class Finisher:
    """Stores results as RQ does, under one worker's name; ``client`` is for RQ's own objects."""

    def __init__(
        self, redis: Connections, client: Redis, names: Names, worker: str, result_ttl_s: int
    ) -> None:
        self._redis = redis
        self._client = client
        self._names = names
        self._worker = worker
        self._result_ttl_s = result_ttl_s

    def finish(self, plain: Sequence[tuple[RqDelivery, Result]]) -> list[int]:
        """Run rq_finish.lua and return its code for each job. Raises one of ERRORS."""
        names = self._names
        now_s = time.time()
        args: list[Any] = [
            names.job_prefix,
            names.results_prefix,
            names.execution_prefix,
            names.job_executions_prefix,
            times(now_s)[0],
        ]
        for delivery, result in plain:
            fields = self._fields(delivery, result.value, now_s)
            ttl = self._result_ttl_s if delivery.result_ttl is None else delivery.result_ttl
            score = int(now_s) + ttl if ttl > 0 else "+inf"
            args += [delivery.job_id, delivery.execution, _share_s(result), ttl, score, len(fields)]
            for name_and_value in fields.items():
                args += name_and_value
        keys = [names.held, names.started, names.finished, names.worker, names.executions]
        codes: list[int] = self._redis.run("rq_finish", keys, args)
        return codes

    def _fields(self, delivery: RqDelivery, value: Any, ended_s: float) -> dict[str, Any]:
        """Return the entry of the job's stream of results."""
        known: dict[str, Any] = {
            "worker_name": self._worker,
            "execution_id": delivery.execution,
            "execution_started_at": datetime.fromtimestamp(delivery.taken_s, tz=UTC),
            "execution_ended_at": datetime.fromtimestamp(ended_s, tz=UTC),
        }
        result = RqResult(
            job_id=delivery.job_id,
            type=RqResult.Type.SUCCESSFUL,
            connection=self._client,
            return_value=value,
            serializer=delivery.serializer,
            **{name: each for name, each in known.items() if name in _RESULT_KEYWORDS},
        )
        return dict(result.serialize())


def _share_s(result: Result) -> float:
    """Return a job's share of the time that its batch ran, in seconds."""
    size = result.batch["size"] if result.batch else 1
    return result.timing_ms.get("run", 0.0) / 1000 / int(size)
