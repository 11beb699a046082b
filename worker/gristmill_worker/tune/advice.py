"""What measured costs recommend: shapes, window and threads, for throughput and for a latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from gristmill_worker.batching.shapes import (
    WINDOW,
    choose_shapes,
    expected_cost,
    ideal_cost,
    window_costs,
)
from gristmill_worker.engines.base import Shape
from gristmill_worker.tune.measure import ThreadRow

IDLE: Final = 0.05  # share of texts taken to find the worker idle: it keeps some small shapes for them
WINDOWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COUNTS: Final = (4, 8, 12, 16, 24, 32)
NEAR: Final = 0.01  # share of the cost that fewer shapes or a smaller window may give away
CLEARLY: Final = 0.02  # share by which threads have to win to be recommended


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How to run the model. Times are predicted from the measured costs of the engine alone."""

    goal: str
    shapes: tuple[Shape, ...]
    max_items: int
    threads: int  # of one worker; it needs as many cores
    workers: int  # that the given cores hold
    texts_per_s: float  # of all workers under backlog, if they do not slow each other down
    window_p95_ms: float  # 95th percentile of the run of one window
    efficiency: float  # cost without any padding / planned cost
    max_wait_ms: float | None = None  # None: the default
    note: str = ""


class Advisor:
    """Judges sets of shapes by the planned cost, in seconds, of a sample of ``lengths``."""

    def __init__(
        self, lengths: Sequence[int], costs: Mapping[Shape, float], max_length: int, max_shapes: int
    ) -> None:
        self._lengths = lengths
        self._costs = costs
        self._max_length = max_length
        self._max_shapes = max_shapes
        self._ideal_s = ideal_cost(lengths, costs)

    def choose(self, window: int, count: int) -> list[Shape]:
        """Return the best shapes, at most ``count``."""
        return choose_shapes(
            self._lengths,
            list(self._costs),
            self._costs,
            max_length=self._max_length,
            max_count=count,
            window=window,
            idle=IDLE,
        )

    def by_count(self, window: int = WINDOW) -> dict[int, list[Shape]]:
        """Return the best sets of some numbers of shapes, the largest last."""
        counts = [*(count for count in COUNTS if count < self._max_shapes), self._max_shapes]
        return {len(chosen): chosen for chosen in (self.choose(window, count) for count in counts)}

    def fewest(self, by_count: Mapping[int, Sequence[Shape]], window: int = WINDOW) -> Sequence[Shape]:
        """Return the smallest of the sets that is nearly as good as the largest."""
        costs = [
            expected_cost(self._lengths, shapes, self._costs, window, IDLE) for shapes in by_count.values()
        ]
        enough = next(at for at, cost in enumerate(costs) if cost <= min(costs) * (1 + NEAR))
        return list(by_count.values())[enough]

    def efficiency(self, shapes: Sequence[Shape], window: int = WINDOW) -> float:
        """Return the cost of the texts without any padding as a share of their planned cost."""
        return self._ideal_s * self.texts_per_s(shapes, window)

    def texts_per_s(self, shapes: Sequence[Shape], window: int) -> float:
        """Return the texts that one worker runs in a second under backlog."""
        return 1.0 / expected_cost(self._lengths, shapes, self._costs, window)

    def window_p95_s(self, shapes: Sequence[Shape], window: int) -> float:
        """Return the 95th percentile of the seconds that one window runs."""
        return float(np.percentile(window_costs(self._lengths, shapes, self._costs, window), 95))

    def for_throughput(
        self, shapes: Sequence[Shape], threads: int, cores: int, rows: Sequence[ThreadRow]
    ) -> Recommendation:
        """Recommend the smallest window, and the threads, that run the most texts on ``cores``.

        ``threads`` are those of the measured costs; ``rows`` compare one with all.
        """
        rates = {window: self.texts_per_s(shapes, window) for window in WINDOWS}
        window = next(w for w, rate in rates.items() if rate >= max(rates.values()) * (1 - NEAR))
        best, note = threads, ""
        gain = _wide_gain(rows)
        if gain is not None and (better := cores if gain > 1 + CLEARLY else 1) != threads:
            best = better
            note = f"costs were measured with --threads {threads}: tune again with --threads {better}"
        return self._recommend("throughput", shapes, window, best, cores, note=note)

    def for_latency(
        self, latency_ms: float, threads: int, cores: int, rows: Sequence[ThreadRow]
    ) -> Recommendation:
        """Recommend the largest window for which 95 % of texts are answered within ``latency_ms``.

        A text waits for the window that runs when it comes, and then for its own: two windows at worst.
        Where that cannot be kept with ``threads``, all ``cores`` share one engine, as much faster as ``rows``
        say.
        """
        goal = f"latency of {latency_ms:g} ms"
        speedups = [(threads, 1.0)]
        if rows and threads == 1:
            speedups.append((cores, median(row.single_s / row.wide_s for row in rows)))
        for used, speedup in speedups:
            for window in reversed(WINDOWS):
                # Cheap first: no set of shapes is faster than all candidates together.
                if 2000 * self.window_p95_s(list(self._costs), window) / speedup > latency_ms:
                    continue
                shapes = self.fewest(self.by_count(window), window)
                if 2000 * self.window_p95_s(shapes, window) / speedup <= latency_ms:
                    note = "" if used == threads else f"tune again with --threads {used} to be sure"
                    return self._recommend(goal, shapes, window, used, cores, speedup, note)
        shapes = self.fewest(self.by_count(1), 1)
        note = f"NOT REACHED: 95 % of texts take up to {2000 * self.window_p95_s(shapes, 1):.0f} ms"
        return self._recommend(goal, shapes, 1, threads, cores, note=note)

    def _recommend(
        self,
        goal: str,
        shapes: Sequence[Shape],
        window: int,
        threads: int,
        cores: int,
        speedup: float = 1.0,
        note: str = "",
    ) -> Recommendation:
        workers = max(1, cores // threads)
        return Recommendation(
            goal=goal,
            shapes=tuple(shapes),
            max_items=window,
            threads=threads,
            workers=workers,
            texts_per_s=self.texts_per_s(shapes, window) * workers * speedup,
            window_p95_ms=self.window_p95_s(shapes, window) * 1000 / speedup,
            efficiency=self.efficiency(shapes, window),
            max_wait_ms=None if goal == "throughput" else 0.0,
            note=note,
        )


def _wide_gain(rows: Sequence[ThreadRow]) -> float | None:
    """Return the throughput of one engine on all cores over that of one on each, by the texts of ``rows``."""
    if not rows:
        return None
    return sum(1 / row.singles_per_s for row in rows) / sum(1 / row.wide_per_s for row in rows)
