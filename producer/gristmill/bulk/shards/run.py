"""Score the parts of one shard; :mod:`gristmill.bulk.shards.plan` says why it may run twice."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import orjson

from gristmill.bulk.checkpoint import REJECTS, changes
from gristmill.bulk.disk import GrowingFile, disk_errors, sync, sync_folder
from gristmill.bulk.job import Plan
from gristmill.bulk.outputs import open_parts, reject
from gristmill.bulk.parts import Parts, part_name
from gristmill.bulk.rows import Row
from gristmill.bulk.score import ask_for_bytes, check_names, layout_of, score_rows, wait_for_model
from gristmill.bulk.shards.folder import STATE, TRIES
from gristmill.bulk.shards.plan import ShardPlan
from gristmill.bulk.summary import OnProgress, Summary
from gristmill.client import Client
from gristmill.errors import InputFileError
from gristmill.folders import scratch
from gristmill.wire import Result

UNIT: Final = "unit"


def score_shard(
    client: Client,
    plan: ShardPlan,
    number: int,
    on_progress: OnProgress,
    on_part: Callable[[], None] = lambda: None,
) -> Summary:
    """Score the parts of shard ``number`` that are not done; return what the shard did, now and before.

    ``on_progress`` is called after each row, ``on_part`` after each part. Raises what
    :func:`~gristmill.bulk.score.score_file` raises; parts that are done by then stay done.
    """
    ranges = plan.shards[number]
    files = plan.files()
    task, models = wait_for_model(client, plan.job.queue, plan.job.wait)
    if points := changes(plan.identity, files.identity(task, models)):
        raise InputFileError(
            f"since the submission, {'; '.join(points)}: submit with --force to start afresh"
        )
    layout = layout_of(plan.job, task)
    ask_for_bytes(layout, plan.width)
    summary = Summary()
    for state in plan.states(ranges):
        summary.rows += state["rows"]
        summary.tokens += state["tokens"]
        summary.truncated += state["truncated"]
        summary.errors.update(state["errors"])
        summary.before_s += state["seconds"]
    summary.resumed, summary.resumed_tokens = summary.rows, summary.tokens
    with _try_folder(plan, number) as folder:
        for first, stop in plan.missing(ranges):
            with files.source(plan.starts[first], plan.rows_in([(first, stop)])) as source:
                check_names(source, layout, plan.job)
                parts = open_parts(files, layout, source, folder, plan.width)
                with PartsOutput(plan, files, folder, parts, (first, stop), summary, on_part) as output:
                    score_rows(
                        client, plan.job, layout, source, output, summary, on_progress, stop=lambda: False
                    )
                    output.finish()
    return summary


@contextmanager
def _try_folder(plan: ShardPlan, number: int) -> Iterator[Path]:
    """Make a folder that no other process writes to."""
    tries = plan.folder / TRIES
    with ExitStack() as stack:
        with disk_errors(tries):
            for made in (tries, plan.parts):
                made.mkdir(exist_ok=True)
            folder = stack.enter_context(scratch(tries, f"{number:04d}-"))
        yield folder


class PartsOutput:
    """Writes the rows of neighbouring parts, and gives each part its name when it is whole."""

    def __init__(
        self,
        plan: ShardPlan,
        files: Plan,
        folder: Path,
        parts: Parts,
        numbers: tuple[int, int],
        summary: Summary,
        on_part: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._files = files
        self._folder = folder
        self._parts = parts
        self._number, self._stop = numbers
        self._summary = summary
        self._on_part = on_part
        self._open()

    def _open(self) -> None:
        self._part = Summary()
        self._rejects = GrowingFile(self._folder / REJECTS, 0)
        try:
            self._parts.open(self._number, 0)
        except BaseException:
            self._rejects.close()
            raise

    def add(self, row: Row, cells: dict[str, Any], result: Result) -> None:
        self._parts.add(row, cells)
        if not result.ok:
            self._rejects.write(reject(self._files.inputs[row.end.file].name, row, result))
        self._part.add(result)
        self._summary.add(result)
        if self._part.rows == self._plan.rows_of(self._number):
            self._publish()

    def _publish(self) -> None:
        self._parts.seal()
        rejects = self._rejects.sync()
        self._rejects.close()
        name = part_name(self._number, self._files.kind)
        unit, final, part = self._folder / UNIT, self._plan.part(self._number), self._part
        state = {
            "rows": part.rows,
            "tokens": part.tokens,
            "truncated": part.truncated,
            "errors": dict(part.errors),
            "seconds": time.monotonic() - part.started,
            "rejects": rejects,
        }
        with disk_errors(final):
            unit.mkdir()
            (self._folder / name).rename(unit / name)
            (self._folder / REJECTS).rename(unit / REJECTS)
            with (unit / STATE).open("wb") as file:
                file.write(orjson.dumps(state))
                sync(file)
            sync_folder(unit)
            try:
                unit.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                shutil.rmtree(unit)  # the same job ran elsewhere too, and was first
            sync_folder(final.parent)
        self._parts.forget()
        self._on_part()
        self._number += 1
        if self._number < self._stop:
            self._open()

    def finish(self) -> None:
        """See that all parts are done."""
        if self._number < self._stop and not self._plan.rows:
            self._publish()  # an empty input has one empty part
        if self._number < self._stop:
            raise InputFileError("the inputs have fewer rows than at the submission: were they changed?")

    def keep(self) -> str:
        return f"the parts that were done are kept in {self._plan.folder}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(InputFileError):
            self._rejects.close()
        self._parts.close()
