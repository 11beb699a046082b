"""How a run is cut into shards: ranges of its parts, so that the output is what one process would write."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import orjson

from gristmill.bulk.checkpoint import changes
from gristmill.bulk.disk import write_atomically
from gristmill.bulk.files import STANDARD_STREAM, is_url
from gristmill.bulk.job import Job, Plan
from gristmill.bulk.kinds import Kind, kind_of
from gristmill.bulk.rows import BEGINNING, Place
from gristmill.bulk.shards.folder import STATE, parts_path, plan_path, plans
from gristmill.errors import InputFileError, InvalidRequestError

VERSION: Final = 1

Range = tuple[int, int]  # of part numbers: the first, and the one behind the last


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What the plan in the folder says.

    ``run`` is new with each submission, ``generation`` with each that begins afresh. ``identity`` has to be
    the same for parts to be used again. ``starts`` are the places where the parts begin, ``rows`` the number
    of all rows; ``width`` that of an embedding's floats where the output has to know it. ``shards`` are the
    parts that each shard scores.
    """

    folder: Path
    run: str
    generation: str
    job: Job
    identity: Mapping[str, Any]
    task: str
    width: int | None
    rows: int
    starts: Sequence[Place]
    shards: Sequence[Sequence[Range]]

    @classmethod
    def last(cls, folder: Path) -> Self | None:
        """Return the last submission's plan in ``folder``; None if there is none. Raises InputFileError."""
        found = plans(folder)
        return cls._read(found[-1]) if found else None

    @classmethod
    def of(cls, folder: Path, run: str) -> Self:
        """Return the plan of a job's own submission; raises InputFileError if it is not there."""
        plan = cls._read(plan_path(folder, run))
        if plan is None:
            raise InputFileError(
                f"{folder} is not there on the machine {socket.gethostname()!r}, or of another run: IN and "
                "OUT have to be on a file system that all machines with RQ workers share, under the same "
                "path; or the run has ended"
            )
        return plan

    @classmethod
    def _read(cls, path: Path) -> Self | None:
        try:
            found = orjson.loads(path.read_bytes())
            if found["version"] != VERSION:
                raise InputFileError(f"{path} is of another version of Gristmill")
            return cls(
                folder=path.parent,
                run=found["run"],
                generation=found["generation"],
                job=job_from(found["job"]),
                identity=found["identity"],
                task=found["task"],
                width=found["width"],
                rows=found["rows"],
                starts=[Place(*start) for start in found["starts"]],
                shards=[[(first, stop) for first, stop in ranges] for ranges in found["shards"]],
            )
        except FileNotFoundError:
            return None
        except (OSError, TypeError, KeyError, ValueError) as error:
            problem = f"{path} cannot be read ({error}): submit with --force to start afresh"
            raise InputFileError(problem) from error

    def write(self) -> None:
        """Make it the folder's only plan."""
        fields = {
            "version": VERSION,
            "run": self.run,
            "generation": self.generation,
            "job": job_fields(self.job),
            "identity": self.identity,
            "task": self.task,
            "width": self.width,
            "rows": self.rows,
            "starts": [[start.file, start.offset, start.lines] for start in self.starts],
            "shards": self.shards,
        }
        mine = plan_path(self.folder, self.run)
        write_atomically(mine, orjson.dumps(fields))
        for other in plans(self.folder):
            if other != mine:
                other.unlink()

    def files(self, *, force: bool = False) -> Plan:
        """Return the run's files as they are on this machine; raises InputFileError if they are others."""
        try:
            files = Plan(dataclasses.replace(self.job, force=self.job.force or force))
        except InputFileError as error:
            error.add_note(f"on the machine {socket.gethostname()!r}")
            raise
        known = {"inputs": self.identity["inputs"]}
        if points := changes(known, {"inputs": [one.identity() for one in files.inputs]}):
            raise InputFileError(
                f"{'; '.join(points)} (as the machine {socket.gethostname()!r} has it): submit with "
                "--force to start afresh"
            )
        return files

    def rows_of(self, part: int) -> int:
        """Return the number of rows of a part."""
        return min(self.job.part_rows, self.rows - part * self.job.part_rows)

    def rows_in(self, ranges: Sequence[Range]) -> int:
        return sum(self.rows_of(part) for first, stop in ranges for part in range(first, stop))

    @property
    def parts(self) -> Path:
        """The folder of the parts that are done."""
        return parts_path(self.folder, self.generation)

    def part(self, number: int) -> Path:
        """Return the folder of a part, which is there when the part is done."""
        return self.parts / f"{number:06d}"

    def missing(self, ranges: Sequence[Range] | None = None) -> list[Range]:
        """Return the parts that are not done, of ``ranges`` (None: of all)."""
        wanted = [(0, len(self.starts))] if ranges is None else ranges
        numbers = (number for first, stop in wanted for number in range(first, stop))
        try:
            done = {path.name for path in self.parts.iterdir()}  # of a file server a fresh look
        except FileNotFoundError:
            done = set()
        return ranges_of(number for number in numbers if self.part(number).name not in done)

    def states(self, ranges: Sequence[Range] | None = None) -> Iterator[dict[str, Any]]:
        """Yield what is known of each part of ``ranges`` that is done."""
        for first, stop in [(0, len(self.starts))] if ranges is None else ranges:
            for number in range(first, stop):
                try:
                    yield orjson.loads((self.part(number) / STATE).read_bytes())
                except FileNotFoundError:
                    continue


def ranges_of(numbers: Iterable[int]) -> list[Range]:
    """Return rising numbers as ranges."""
    found: list[Range] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def split(missing: Sequence[Range], shards: int) -> list[list[Range]]:
    """Share parts out to at most ``shards`` shards, each with neighbours, as evenly as can be."""
    numbers = [number for first, stop in missing for number in range(first, stop)]
    count = min(shards, len(numbers))
    edges = [len(numbers) * i // count for i in range(count + 1)] if count else []
    return [ranges_of(numbers[start:end]) for start, end in pairwise(edges)]


def find_starts(files: Plan) -> tuple[list[Place], int]:
    """Read all inputs once; return where each part begins, and the number of rows."""
    starts, rows, end = [BEGINNING], 0, BEGINNING
    with files.source() as source:
        for row in source:
            if rows and rows % files.job.part_rows == 0:
                starts.append(end)
            rows += 1
            end = row.end
    return starts, rows


def located(job: Job) -> Job:
    """Return ``job`` with absolute paths and its globs expanded, as its jobs run in other folders.

    Raises InputFileError for what they could not reach.
    """
    sources = [job.source] if isinstance(job.source, str | Path) else job.source
    if STANDARD_STREAM in (str(job.out), *map(str, sources)):
        raise InputFileError("jobs on other machines cannot reach '-': name files that all of them share")
    here = dataclasses.replace(
        job, source=[_absolute(source) for source in sources], out=_absolute(job.out), preview=0
    )
    files = Plan(here)
    return dataclasses.replace(
        here, source=[one.name for one in files.inputs], rejects=files.rejects.absolute()
    )


def _absolute(name: str | Path) -> str:
    return str(name) if is_url(str(name)) else os.path.abspath(name)  # noqa: PTH100 - links stay links


def shards_folder(out: str, work: Path | None) -> Path:
    """Return where a run with the output ``out`` keeps what its jobs share."""
    if work is not None:
        return work.absolute()
    if is_url(out):
        raise InvalidRequestError("with a URL as OUT, --work has to name a folder that all machines share")
    return Path(out.rstrip("/") + ".shards")


def output_id(out: str) -> str:
    """Return the ID of the run that writes ``out``: the same for each submission."""
    return f"gm-bulk-{hashlib.sha256(out.encode()).hexdigest()[:12]}"


def job_fields(job: Job) -> dict[str, Any]:
    """Return ``job`` as JSON values."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    for name, value in fields.items():
        if isinstance(value, Kind):
            fields[name] = value.extension
        elif isinstance(value, Path):
            fields[name] = str(value)
    return fields


def job_from(fields: Mapping[str, Any]) -> Job:
    """Return the job that JSON values describe; raises InvalidRequestError."""
    values = dict(fields)
    for name in ("in_kind", "out_kind"):
        if isinstance(values.get(name), str):
            values[name] = kind_of(f".{values[name].removeprefix('.')}")
    if values.get("rejects") is not None:
        values["rejects"] = Path(values["rejects"])
    try:
        return Job(**values)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(Job))
        raise InvalidRequestError(f"{error}; there are: {known}") from error
