"""Make the output of all shards' parts, as ``gristmill score`` makes it of its own."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from gristmill.bulk.checkpoint import REJECTS, State, Store
from gristmill.bulk.disk import disk_errors, sync, sync_folder, write_atomically
from gristmill.bulk.job import Plan
from gristmill.bulk.outputs import open_output
from gristmill.bulk.parts import part_name
from gristmill.bulk.score import layout_of
from gristmill.bulk.shards.folder import MERGE, MERGING, clear, locked
from gristmill.bulk.shards.plan import ShardPlan
from gristmill.bulk.summary import Summary
from gristmill.errors import InputFileError, TooManyErrors

Merged = dict[str, Any]
MOST_LISTED: Final = 5
PATIENCE_S: Final = 60.0


def merge(
    plan: ShardPlan, on_published: Callable[[Merged], None], *, patience_s: float = PATIENCE_S
) -> Merged:
    """Publish the output and remove the run's folder; return what the run did.

    Killed at any moment and run again it goes on; ``on_published`` is called when the output has its name,
    before anything is removed. Parts that cannot be seen are looked for during ``patience_s``, as file
    servers may show late what other machines made. Raises InputFileError and TooManyErrors.
    """
    with locked(plan.folder):
        merged = _begun(plan.folder)
        # Only where the output was published and the store removed is there the one without the other.
        if merged is None or (plan.folder / MERGE).exists():
            total = _total(plan, patience_s)
            rejects = str(plan.job.rejects) if total.rejects else None
            files = plan.files(force=merged is not None)
            merged = {"rows": total.rows, "errors": total.errors, "out": files.out, "rejects": rejects}
            _publish(plan, files, total, merged)
        on_published(merged)
        clear(plan.folder)
    return merged


def _begun(folder: Path) -> Merged | None:
    try:
        found: Merged = orjson.loads((folder / MERGING).read_bytes())
    except FileNotFoundError:
        return None
    return found


def _total(plan: ShardPlan, patience_s: float) -> State:
    ends = time.monotonic() + patience_s
    while (missing := plan.missing()) and time.monotonic() < ends:
        time.sleep(0.5)
    if missing:
        listed = ", ".join(f"{first} to {stop - 1}" for first, stop in missing[:MOST_LISTED])
        raise InputFileError(f"{plan.folder} lacks the parts {listed}: submit again to have them scored")
    errors: Counter[str] = Counter()
    rows = tokens = truncated = rejects = 0
    seconds = 0.0
    for state in plan.states():
        errors.update(state["errors"])
        rows += state["rows"]
        tokens += state["tokens"]
        truncated += state["truncated"]
        rejects += state["rejects"]
        seconds += state["seconds"]
    most = plan.job.max_errors
    if most is not None and errors.total() > most:
        raise TooManyErrors(f"{errors.total():,} rows failed, more than --max-errors {most}")
    return State(
        parts=len(plan.starts),
        rejects=rejects,
        rows=rows,
        tokens=tokens,
        truncated=truncated,
        errors=dict(errors),
        seconds=seconds,
        ended=True,
    )


def _publish(plan: ShardPlan, files: Plan, total: State, merged: Merged) -> None:
    layout = layout_of(plan.job, plan.task)
    with Store(plan.folder / MERGE, plan.identity, force=False, resumable=True) as store:
        if not store.state.ended:
            _gather(plan, files, store)
            store.save(total)
        write_atomically(plan.folder / MERGING, orjson.dumps(merged))
        with (
            files.source() as source,
            open_output(files, layout, source, store, Summary(), plan.width) as output,
        ):
            output.finish()


def _gather(plan: ShardPlan, files: Plan, store: Store) -> None:
    """Give the store all parts under its own names; the shards' stay until the output is published."""
    with disk_errors(store.folder):
        with store.rejects.open("wb") as rejects:
            for number in range(len(plan.starts)):
                name = part_name(number, files.kind)
                _link(plan.part(number) / name, store.rows / name)
                with (plan.part(number) / REJECTS).open("rb") as file:
                    shutil.copyfileobj(file, rejects)
            sync(rejects)
        sync_folder(store.rows)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        with source.open("rb") as file, target.open("wb") as copy:
            shutil.copyfileobj(file, copy)
            sync(copy)
