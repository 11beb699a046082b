"""What a run did so far."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill.bulk.layout import error_of
from gristmill.wire import Result


class Latencies:
    """A histogram of durations in bounded memory: buckets 2 % wide, so percentiles are within 1 %."""

    _WIDTH: Final = math.log(1.02)
    _LEAST_MS: Final = 1e-3

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, ms: float) -> None:
        self._buckets[math.floor(math.log(max(ms, self._LEAST_MS)) / self._WIDTH)] += 1

    def percentile(self, percent: float) -> float | None:
        """Return the duration in ms that ``percent`` % of all do not exceed; None if there are none."""
        left = percent / 100 * self._buckets.total()
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 0:
                return math.exp((bucket + 0.5) * self._WIDTH)
        return None


@dataclass(slots=True)
class Summary:
    """What a run did so far, with what it had done before it was resumed.

    ``resumed`` are the rows of ``rows`` that earlier sessions scored, ``seconds`` this session's time and
    ``before_s`` that of the earlier ones. A row's latency is its time in the queue, in encoding and in the
    engine. ``position`` and ``size_bytes`` are of the input; None where its size is unknown.
    """

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    before_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    position: int = 0
    size_bytes: int | None = None
    errors: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)
    preview: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """The number of rows that carry an error."""
        return self.errors.total()

    @property
    def total_s(self) -> float:
        return self.before_s + self.seconds

    def add(self, result: Result) -> None:
        self.rows += 1
        self.seconds = time.monotonic() - self.started
        self.tokens += result.tokens or 0
        self.truncated += result.truncated
        if not result.ok:
            self.errors[error_of(result)[0]] += 1
        if result.timing_ms:
            self.latencies.add(sum(result.timing_ms.values()))

    def rows_per_second(self) -> float:
        return self._per_second(self.rows - self.resumed)

    def tokens_per_second(self) -> float:
        return self._per_second(self.tokens - self.resumed_tokens)

    def _per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0


OnProgress = Callable[[Summary], None]
