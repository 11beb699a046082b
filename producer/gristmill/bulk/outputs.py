"""Where the rows of a run go: to parts with checkpoints, or straight to standard output."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, Self

from gristmill.bulk.checkpoint import OLD, State, Store
from gristmill.bulk.disk import GrowingFile, disk_errors, put_name, sync_folder
from gristmill.bulk.encoders import CsvEncoder, Encoder, JsonlEncoder, to_json, valid
from gristmill.bulk.files import filesystem, is_url, remote_errors
from gristmill.bulk.job import Plan
from gristmill.bulk.kinds import Format
from gristmill.bulk.layout import Layout, error_of
from gristmill.bulk.parts import Parts
from gristmill.bulk.rows import Row
from gristmill.bulk.source import Source
from gristmill.bulk.summary import Summary
from gristmill.bulk.text_parts import COPY_BYTES, StreamOut, TextParts, remove_leftovers
from gristmill.wire import Result

SAVE_EVERY_S: Final = 10.0  # what a kill may cost, besides what is in flight


class Output(Protocol):
    """Takes the scored rows in order; a context manager."""

    def add(self, row: Row, cells: dict[str, Any], result: Result) -> None: ...
    def finish(self) -> None: ...
    def keep(self) -> str: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class StoredOutput:
    """Parts and checkpoints in a folder beside the output, which becomes the output at the end."""

    def __init__(self, plan: Plan, store: Store, parts: Parts, summary: Summary) -> None:
        self._plan = plan
        self._store = store
        self._parts = parts
        self._summary = summary
        self._state = state = store.state
        self._filled = state.filled
        self._place = state.place
        self._whole = True  # what was written so far are whole rows
        self._saved_at = time.monotonic()
        self._undo = ExitStack()
        remove_leftovers(store.rows, plan.kind, state.parts)
        if not state.ended:
            with ExitStack() as undo:
                self._rejects = GrowingFile(store.rejects, state.rejects)
                undo.callback(self._rejects.close)
                parts.open(state.parts, state.mark)
                undo.callback(parts.close)
                self._undo = undo.pop_all()
        summary.rows = summary.resumed = state.rows
        summary.tokens = summary.resumed_tokens = state.tokens
        summary.truncated, summary.errors = state.truncated, Counter(state.errors)
        summary.before_s = state.seconds

    def add(self, row: Row, cells: dict[str, Any], result: Result) -> None:
        """Write a row; every now and then make a checkpoint."""
        self._whole = False
        self._parts.add(row, cells)
        if not result.ok:
            self._rejects.write(reject(self._plan.inputs[row.end.file].name, row, result))
        self._place = row.end
        self._filled += 1
        self._summary.add(result)
        if self._filled == self._plan.job.part_rows:
            self._seal()
        elif time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save(self._state.parts, self._filled, self._parts.save())
        self._whole = True

    def _seal(self, *, ended: bool = False) -> None:
        sealed = self._state.parts
        self._parts.seal()
        self._save(sealed + 1, 0, 0, ended=ended)
        self._filled = 0
        self._parts.forget()
        if not ended:
            self._parts.open(sealed + 1, 0)

    def _save(self, parts: int, filled: int, mark: int, *, ended: bool = False) -> None:
        summary = self._summary
        self._state = State(
            parts=parts,
            filled=filled,
            mark=mark,
            rejects=self._rejects.sync(),
            place=self._place,
            rows=summary.rows,
            tokens=summary.tokens,
            truncated=summary.truncated,
            errors=dict(summary.errors),
            seconds=summary.total_s,
            ended=ended,
        )
        self._store.save(self._state)
        self._saved_at = time.monotonic()

    def keep(self) -> str:
        """Make a checkpoint of all that was written, and return a note on where it is."""
        if self._whole and self._filled and not self._state.ended:
            self._save(self._state.parts, self._filled, self._parts.save())
        if not self._state.begun:
            return "nothing was scored"  # and nothing is kept
        rows, folder = self._state.rows, self._store.folder
        if self._plan.piped:
            return f"{rows:,} scored rows are in {folder}; standard input cannot be resumed"
        return f"{rows:,} scored rows are kept in {folder}"

    def finish(self) -> None:
        """Make the output of the parts and give it its name. Done again after a crash, it does the same."""
        if not self._state.ended:
            if self._filled or not self._state.parts:
                self._seal(ended=True)
            else:
                self._save(self._state.parts, 0, 0, ended=True)
                self._parts.close()
                self._parts.forget()
        self._undo.close()
        self._publish()
        self._store.remove()

    def _publish(self) -> None:
        plan, store, out = self._plan, self._store, Path(self._plan.out)
        if not is_url(plan.out) and out.exists() and out.stat().st_ino == self._state.inode:
            return  # a crash came between the renaming and the tidying up
        whole = store.rows if plan.job.parts else store.whole
        if not plan.job.parts:
            self._parts.join(self._state.parts, whole)
        with disk_errors(plan.out):
            self._publish_rejects()
            self._store.save(State(**{**_fields(self._state), "inode": whole.stat().st_ino}))
            if is_url(plan.out):
                upload(whole, plan.out)
                return
            if plan.job.parts and out.exists():  # a folder cannot be replaced in one step
                out.rename(store.folder / OLD)
            put_name(whole, out)

    def _publish_rejects(self) -> None:
        source, target = self._store.rejects, self._plan.rejects
        if self._state.rejects and source.exists():
            if source.stat().st_dev == target.absolute().parent.stat().st_dev:
                put_name(source, target)
            else:
                shutil.copyfile(source, target)
                sync_folder(target.absolute().parent)
        elif not self._state.rejects and self._plan.job.force:
            target.unlink(missing_ok=True)  # of an earlier run: it would be taken for this one's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class StreamedOutput:
    """Rows go straight to standard output."""

    def __init__(self, plan: Plan, out: StreamOut, summary: Summary) -> None:
        self._plan = plan
        self._out = out
        self._summary = summary
        self._rejects = None if plan.job.rejects is None else GrowingFile(plan.job.rejects, 0)

    def add(self, row: Row, cells: dict[str, Any], result: Result) -> None:
        self._out.add(row, cells)
        if not result.ok and self._rejects is not None:
            self._rejects.write(reject(self._plan.inputs[row.end.file].name, row, result))
        self._summary.add(result)

    def keep(self) -> str:
        return f"{self._summary.rows:,} scored rows were written to standard output, which cannot be resumed"

    def finish(self) -> None:
        self._out.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rejects is not None:
            self._rejects.close()


def reject(name: str, row: Row, result: Result) -> bytes:
    """Return the line of a failed row in the rejects file."""
    code, message = error_of(result)
    values = None if row.values is None else {key: valid(value) for key, value in row.values.items()}
    record = {"file": name, "line": row.line, "code": code, "message": message, "row": values}
    return to_json(record) + b"\n"


def make_encoder(plan: Plan, layout: Layout, columns: Sequence[str] | None) -> Encoder:
    """Return what turns rows into text; ``columns`` are the input's that all rows share."""
    passed = plan.job.columns
    if plan.kind.has_header:
        delimiter = (
            plan.job.delimiter if plan.job.delimiter and plan.kind.delimiter == "," else plan.kind.delimiter
        )
        return CsvEncoder(columns or () if passed is None else passed, layout.columns, delimiter)
    return JsonlEncoder(passed, layout.columns, layout.line_column)


def upload(path: Path, url: str) -> None:
    """Copy a finished file to ``url``; object stores show it when it is whole."""
    fs, target = filesystem(url)
    with remote_errors(url), path.open("rb") as file, fs.open(target, "wb") as remote:
        shutil.copyfileobj(file, remote, COPY_BYTES)


def _fields(state: State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in State.__slots__}


def open_parts(plan: Plan, layout: Layout, source: Source, folder: Path, width: int | None) -> Parts:
    """Return what writes parts into ``folder``; ``width`` is the number of floats of an embedding."""
    if plan.kind.format is Format.PARQUET:
        from gristmill.bulk.parquet import ParquetParts  # noqa: PLC0415 - an extra

        return ParquetParts(folder, source.fields(), layout, width)
    return TextParts(folder, plan.kind, make_encoder(plan, layout, source.columns))


def open_output(
    plan: Plan, layout: Layout, source: Source, store: Store | None, summary: Summary, width: int | None
) -> Output:
    """Return where the run's rows go; ``width`` as for :func:`open_parts`."""
    if store is None:
        encoder = make_encoder(plan, layout, source.columns)
        return StreamedOutput(plan, StreamOut(sys.stdout.buffer, plan.kind, encoder), summary)
    return StoredOutput(plan, store, open_parts(plan, layout, source, store.rows, width), summary)
