"""Score files through a queue: rows are read, scored and written as one ordered stream in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

from gristmill.bulk.checkpoint import State, Store
from gristmill.bulk.job import Job, Plan
from gristmill.bulk.kinds import Format
from gristmill.bulk.layout import Layout
from gristmill.bulk.outputs import Output, open_output
from gristmill.bulk.pace import Pace
from gristmill.bulk.rows import Row
from gristmill.bulk.source import Source
from gristmill.bulk.summary import OnProgress, Summary
from gristmill.calls import Item
from gristmill.client import Client
from gristmill.errors import InputFileError, InvalidRequestError, NoWorkerError, TooManyErrors
from gristmill.wire import Result

Stop = Callable[[], bool]
PROBE: Final = "a"  # a text to see by how long embeddings are


def served_task(client: Client, queue: str) -> str:
    """Return the task of the model that the queue's workers hold; raise NoWorkerError if there are none."""
    return served_model(client, queue)[0]


def served_model(client: Client, queue: str) -> tuple[str, list[str]]:
    """Return the task that the queue's workers have, and the digests of their models."""
    workers = client.workers(queue)
    tasks = {worker.get("task", "unknown") for worker in workers}
    if not tasks:
        raise NoWorkerError(f"no worker serves the queue {queue!r}: start one with 'gristmill-worker run'")
    if len(tasks) > 1:
        raise InputFileError(f"the workers of queue {queue!r} have several tasks: {', '.join(sorted(tasks))}")
    return tasks.pop(), sorted({worker.get("model", "unknown") for worker in workers})


def wait_for_model(client: Client, queue: str, wait_s: float) -> tuple[str, list[str]]:
    """Return what :func:`served_model` does; wait ``wait_s`` seconds for a worker."""
    ends = time.monotonic() + wait_s
    while True:
        try:
            return served_model(client, queue)
        except NoWorkerError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)


def score_file(
    client: Client,
    job: Job,
    on_progress: OnProgress | None = None,
    *,
    stop: Stop = lambda: False,
    on_earlier: Callable[[int], None] = lambda _: None,
) -> Summary:
    """Score every row of the job's inputs and write it to its output; one row out per row in, in order.

    A run that was interrupted goes on where its last checkpoint is, if the inputs and whatever shapes the
    output are the same; else InputFileError is raised, unless ``job.force`` starts afresh. Its requests have
    fresh IDs: what the earlier process had in flight runs for nobody, and is scored once more. The work is
    done at least once, and each row is written once. ``on_progress`` is
    called after each row with the summary so far, ``on_earlier`` before the first one with the number of rows
    that an earlier run left, if it left any and all is well. Once ``stop`` returns True nothing more is
    submitted; what is in flight is finished and kept, and KeyboardInterrupt raised. A row that fails carries
    an error.

    Raises InputFileError where a file cannot be used, TooManyErrors, NoWorkerError, and whatever else ends
    the run (BrokerUnavailable, …) with a note on where the rows are that were done by then.
    """
    plan = Plan(job)
    task, models = served_model(client, job.queue)
    layout = layout_of(job, task)
    width = embedding_width(client, plan, layout)
    ask_for_bytes(layout, width)
    summary = Summary()
    with ExitStack() as stack:
        store = None
        if not plan.streamed:
            identity = plan.identity(task, models)
            store = stack.enter_context(
                Store(plan.folder, identity, force=job.force, resumable=not plan.piped)
            )
        state = State() if store is None else store.state
        source = stack.enter_context(plan.source(state.place))
        check_names(source, layout, job)
        output = stack.enter_context(open_output(plan, layout, source, store, summary, width))
        summary.size_bytes = source.size_bytes
        if store is not None and store.found_rows:
            on_earlier(store.found_rows)
        try:
            if not state.ended:
                score_rows(client, job, layout, source, output, summary, on_progress, stop)
        except BaseException as error:
            with suppress(InputFileError):  # a full disk: the first error counts
                error.add_note(output.keep())
            raise
        output.finish()
    return summary


def layout_of(job: Job, task: str) -> Layout:
    """Return the result columns that ``job`` gets from a model of ``task``."""
    return Layout(
        task, queue=job.queue, prefix=job.prefix, top_k=job.top_k, truncate=job.truncate, chosen=job.results
    )


def embedding_width(client: Client, plan: Plan, layout: Layout) -> int | None:
    """Return the number of floats of an embedding where the output has to know it, else None."""
    if plan.kind.format is Format.PARQUET and "embedding" in layout.names:
        return len(client.score(plan.job.queue, PROBE, plan.job.wait or 1.0))
    return None


def ask_for_bytes(layout: Layout, width: int | None) -> None:
    """Have embeddings of a known width sent as the bytes that a column of floats is made of."""
    if width is not None:
        layout.options["encoding"] = "base64"


def score_rows(
    client: Client,
    job: Job,
    layout: Layout,
    source: Source,
    output: Output,
    summary: Summary,
    on_progress: OnProgress | None,
    stop: Stop,
) -> None:
    """Score the rows of ``source`` into ``output``, in order; see :func:`score_file`."""
    for row, result in _results(client, job, layout, source, stop):
        cells = layout.cells(result)
        summary.position = source.position
        output.add(row, cells, result)
        if summary.rows - summary.resumed <= job.preview:
            summary.preview.append({**(row.values or {}), **cells})
        if on_progress is not None:
            on_progress(summary)
        if not result.ok and job.max_errors is not None and summary.failed > job.max_errors:
            raise TooManyErrors(
                f"{summary.failed:,} rows failed, more than --max-errors {job.max_errors}; "
                f"the last one: {cells.get(job.prefix + 'error') or result.error}"
            )


def _results(
    client: Client, job: Job, layout: Layout, source: Source, stop: Stop
) -> Iterator[tuple[Row, Result]]:
    rows: deque[Row] = deque()  # read and not yielded yet: at most a window
    pace = Pace(lambda: client.workers(job.queue), job.window)
    stopped = False

    def items() -> Iterator[Item]:
        nonlocal stopped
        for row in source:
            if stop():
                stopped = True
                return
            pace.took(row.size)
            rows.append(_checked(row, layout, job))
            yield _item(rows[-1], job)

    def on_silence(seconds: float) -> None:
        if seconds > job.wait:
            served_task(client, job.queue)  # raises where all workers have gone

    for _, result in client.stream(
        job.queue,
        items(),
        ordered=True,
        window=pace.window,
        options=layout.options,
        priority=job.priority,
        on_silence=on_silence,
    ):
        row = rows.popleft()
        pace.gave(row.size)
        pace.update()
        yield row, result
    if stopped:
        raise KeyboardInterrupt


def check_names(source: Source, layout: Layout, job: Job) -> None:
    """Raise InputFileError where a column that is passed on has a result's name."""
    passed = source.columns if job.columns is None else job.columns
    if taken := {*(passed or ())} & layout.taken:
        listed = ", ".join(map(repr, sorted(taken)))
        raise InputFileError(
            f"the input has a column {listed}, which is also a result's: choose another --prefix"
        )


def _checked(row: Row, layout: Layout, job: Job) -> Row:
    """Return ``row``; in its place one with an error if it is JSON with keys of its own, one a result's."""
    if row.raw is None or job.columns is not None or row.values is None:
        return row
    if not (taken := row.values.keys() & layout.taken):
        return row
    listed = ", ".join(map(repr, sorted(taken)))
    problem = f"line {row.line} has {listed}, which is also a result's name: use --prefix"
    return replace(row, values=None, error=InvalidRequestError(problem), raw=None)


def _item(row: Row, job: Job) -> Item:
    """Return what is to be scored; a row without a text becomes an error in its place."""
    try:
        text = row.text(job.text_column)
        return text if job.pair_column is None else (text, row.text(job.pair_column))
    except InvalidRequestError as error:
        return error
