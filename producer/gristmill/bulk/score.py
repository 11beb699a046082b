"""Score a file through a queue: rows are read, scored and written as one ordered stream in bounded memory."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gristmill.bulk.readers import STANDARD_INPUT, Format, Reader, Row, file_format, open_reader
from gristmill.bulk.writers import Writer, check_output
from gristmill.calls import Item
from gristmill.client import Client
from gristmill.errors import InputFileError, InvalidRequestError, NoWorkerError
from gristmill.keys import DEFAULT
from gristmill.wire import Result


@dataclass(frozen=True, slots=True)
class Job:
    """What to score and how. ``source`` may be "-" (standard input, in the format of ``out``).

    ``top_k`` is the number of labels that a row gets (0: all; unused for embeddings); ``window`` the most
    rows in flight; ``preview`` the number of scored rows to keep for showing.
    """

    source: Path
    out: Path
    queue: str
    text_column: str
    pair_column: str | None = None
    top_k: int = 1
    truncate: bool = True
    priority: str = DEFAULT
    window: int = 1024
    prefix: str = "gm_"
    delimiter: str = ","
    force: bool = False
    preview: int = 0
    wait: float = 30.0

    @property
    def piped(self) -> bool:
        return str(self.source) == "-"

    def check(self) -> None:
        """Raise InputFileError for whatever can be known to be wrong without taking the input."""
        check_output(self.source, self.out, force=self.force)
        if file_format(self.out) and not self.piped:
            self.open().close()

    def open(self) -> Reader:
        """Open the input and check its columns; raises InputFileError."""
        path = STANDARD_INPUT if self.piped else self.source
        kind = file_format(self.out if self.piped else path)
        # A CSV file has one header for all rows, wherever they come from. (What is piped has its format.)
        same_columns = file_format(self.out) is Format.CSV
        reader = open_reader(path, kind, delimiter=self.delimiter, same_columns=same_columns)
        for column in (self.text_column, self.pair_column):
            if column is not None and reader.columns is not None and column not in reader.columns:
                reader.close()
                listed = ", ".join(map(repr, reader.columns)) or "none"
                raise InputFileError(f"{self.source} has no column {column!r}; its columns are: {listed}")
        return reader


class Layout:
    """Which result columns a task has, and what stands in them."""

    def __init__(self, task: str, job: Job) -> None:
        names: dict[str, tuple[str, ...]] = {
            "text-classification": ("label", "score") if job.top_k == 1 else ("label", "score", "scores"),
            "embeddings": ("embedding",),
        }
        if task not in names:
            raise InputFileError(
                f"queue {job.queue!r} serves the task {task!r}; files are scored for {' or '.join(names)}"
            )
        self.prefix = job.prefix
        self.columns = [job.prefix + name for name in (*names[task], "error")]
        self.line_column = job.prefix + "line"  # where a row that could not be read is named
        self.names = {*self.columns, self.line_column}
        self.options: dict[str, Any] = {"truncate": job.truncate}
        if task == "text-classification":
            self.options["top_k"] = job.top_k or None

    def cells(self, result: Result) -> dict[str, Any]:
        """Return the result columns of one row, those left out are empty."""
        if not result.ok:
            code, message = result.error or (result.status, "no message")
            values: dict[str, Any] = {"error": f"{code}: {message}"}
        elif "top_k" in self.options:
            values = {**result.value[0], "scores": result.value, "error": ""}
        else:
            values = {"embedding": result.value, "error": ""}
        cells = {self.prefix + name: value for name, value in values.items()}
        return {name: cells[name] for name in self.columns if name in cells}


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
    """What a run did so far. A row's latency is its time in the queue, in encoding and in the engine."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    position: int = 0  # bytes of the input behind the rows that are done
    size_bytes: int | None = None
    errors: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)
    preview: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """The number of rows that carry an error."""
        return self.errors.total()

    def add(self, row: Row, result: Result) -> None:
        self.rows += 1
        self.seconds = time.monotonic() - self.started
        self.position = row.position
        self.tokens += result.tokens or 0
        self.truncated += result.truncated
        if not result.ok:
            self.errors[result.error[0] if result.error else result.status] += 1
        if result.timing_ms:
            self.latencies.add(sum(result.timing_ms.values()))

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0


OnProgress = Callable[[Summary], None]


def served_task(client: Client, queue: str) -> str:
    """Return the task of the model that the queue's workers hold; raise NoWorkerError if there are none."""
    tasks = {worker.get("task", "unknown") for worker in client.workers(queue)}
    if not tasks:
        raise NoWorkerError(f"no worker serves the queue {queue!r}: start one with 'gristmill-worker run'")
    if len(tasks) > 1:
        raise InputFileError(f"the workers of queue {queue!r} have several tasks: {', '.join(sorted(tasks))}")
    return tasks.pop()


def score_file(client: Client, job: Job, on_progress: OnProgress | None = None) -> Summary:
    """Score every row of ``job.source`` and write it to ``job.out``; one row out per row in, in order.

    ``on_progress`` is called after each row with the summary so far. A row that fails carries an error.
    Raises InputFileError where a file cannot be used, NoWorkerError, and whatever else ends the run
    (BrokerUnavailable, KeyboardInterrupt, …) with a note on where the rows are that were done by then.
    """
    job.check()
    with job.open() as reader:
        layout = Layout(served_task(client, job.queue), job)
        with Writer(
            job.out,
            file_format(job.out),
            reader.columns,
            layout.columns,
            line_column=layout.line_column,
            delimiter=job.delimiter,
        ) as writer:
            summary = Summary(size_bytes=reader.size_bytes)
            try:
                for row, result in _results(client, job, layout, reader):
                    cells = layout.cells(result)
                    writer.write(row, cells)
                    summary.add(row, result)
                    if summary.rows <= job.preview:
                        summary.preview.append({**(row.values or {}), **cells})
                    if on_progress is not None:
                        on_progress(summary)
                writer.commit()
            except BaseException as error:
                error.add_note(f"{summary.rows:,} scored rows are in {writer.part}")
                raise
    return summary


def _results(client: Client, job: Job, layout: Layout, reader: Reader) -> Iterator[tuple[Row, Result]]:
    rows: deque[Row] = deque()  # read and not yielded yet: at most ``job.window``

    def items() -> Iterator[Item]:
        for row in reader:
            if reader.columns is None and (taken := (row.values or {}).keys() & layout.names):
                listed = ", ".join(map(repr, sorted(taken)))
                problem = f"line {row.line} has {listed}, which is also a result's name: use --prefix"
                row = Row(None, row.line, row.position, InvalidRequestError(problem))  # noqa: PLW2901
            rows.append(row)
            yield _item(row, job)

    def on_silence(seconds: float) -> None:
        if seconds > job.wait:
            served_task(client, job.queue)  # raises where all workers have gone

    for _, result in client.stream(
        job.queue,
        items(),
        ordered=True,
        window=job.window,
        options=layout.options,
        priority=job.priority,
        on_silence=on_silence,
    ):
        yield rows.popleft(), result


def _item(row: Row, job: Job) -> Item:
    """Return what is to be scored; a row without a text becomes an error in its place."""
    try:
        text = row.text(job.text_column)
        return text if job.pair_column is None else (text, row.text(job.pair_column))
    except InvalidRequestError as error:
        return error
