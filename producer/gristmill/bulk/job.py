"""What to score and how, and what that means for the files that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gristmill.bulk import checkpoint
from gristmill.bulk.files import (
    STANDARD_STREAM,
    filesystem,
    find_inputs,
    is_url,
    remote_errors,
    same_file,
)
from gristmill.bulk.kinds import Format, Kind, kind_of
from gristmill.bulk.rows import BEGINNING, Place
from gristmill.bulk.source import Source
from gristmill.errors import InputFileError
from gristmill.keys import DEFAULT

PART_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Job:
    """What to score and how.

    ``source`` is a file, a glob, a URL, "-" (standard input), or several of the first three; ``out`` a file,
    a URL or "-" (standard output). ``in_kind`` and ``out_kind`` are needed where names do not tell the
    format; standard input has by default the output's.

    ``top_k`` is the number of labels that a row gets (0: all; unused for embeddings); ``window`` the most
    rows in flight (None: as many as keep the workers busy). ``columns`` are the input's columns to pass on
    (None: all) and ``results`` the results to add, without ``prefix`` (None: those of the task).

    The output is made of parts of ``part_rows`` rows. With ``parts`` it stays a folder of them. Rows that
    failed are also written to ``rejects`` (None: beside the output, where any failed); more than
    ``max_errors`` of them end the run. ``preview`` is the number of scored rows to keep for showing.
    """

    source: str | Path | Sequence[str | Path]
    out: str | Path
    queue: str
    text_column: str
    pair_column: str | None = None
    top_k: int = 1
    truncate: bool = True
    priority: str = DEFAULT
    window: int | None = None
    prefix: str = "gm_"
    delimiter: str | None = None
    force: bool = False
    preview: int = 0
    wait: float = 30.0
    in_kind: Kind | None = None
    out_kind: Kind | None = None
    columns: Sequence[str] | None = None
    results: Sequence[str] | None = None
    rejects: Path | None = None
    max_errors: int | None = None
    part_rows: int = PART_ROWS
    parts: bool = False

    def check(self) -> None:
        """Raise InputFileError for whatever can be known to be wrong without taking the input."""
        Plan(self)


class Plan:
    """A job's files: ``inputs`` and their columns (None: each row has its own), the output's ``kind``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.out = str(job.out)
        self.streamed = self.out == STANDARD_STREAM
        named = job.out_kind or (None if self.streamed else kind_of(self.out.rstrip("/")))
        sources = [job.source] if isinstance(job.source, str | Path) else job.source
        names = [str(source) for source in sources]
        self.inputs = find_inputs(names, job.in_kind or (named if names == [STANDARD_STREAM] else None))
        self.kind = named or self.inputs[0].kind
        self.piped = self.inputs[0].piped
        self._check_output()
        # A CSV file has one header for all rows, wherever they come from.
        self.same_columns = self.kind.format is not Format.JSONL
        if self.piped and self.same_columns and self.inputs[0].kind.format is Format.JSONL:
            raise InputFileError(
                "JSON Lines from standard input can only become JSON Lines, as the columns are not known "
                "before the end: save it as a file first"
            )
        if self.kind.format is Format.PARQUET and len({one.kind.format for one in self.inputs}) > 1:
            raise InputFileError("inputs of several formats cannot become one Parquet file: score them apart")
        if not self.piped:
            self.source().check()

    def source(self, start: Place = BEGINNING, limit: int | None = None) -> Source:
        """Return the rows of all inputs from ``start`` on, at most ``limit``."""
        texts = [name for name in (self.job.text_column, self.job.pair_column) if name is not None]
        return Source(
            self.inputs,
            start,
            delimiter=self.job.delimiter,
            same_columns=self.same_columns,
            texts=texts,
            passed=self.job.columns,
            arrow=self.kind.format is Format.PARQUET,
            limit=limit,
        )

    @property
    def folder(self) -> Path:
        """Where the run keeps its parts and checkpoints: beside the output; for a URL in this folder."""
        path = Path(self.out.rstrip("/").rpartition("/")[2]) if is_url(self.out) else Path(self.out)
        return path.with_name(path.name + ".parts")

    @property
    def rejects(self) -> Path:
        if self.job.rejects is not None:
            return self.job.rejects
        return self.folder.with_name(self.folder.name.removesuffix(".parts") + ".rejects.jsonl")

    def identity(self, task: str, models: Sequence[str]) -> dict[str, Any]:
        """Return what has to be the same for a run to be resumed."""
        job = self.job
        return {
            "replace": job.force,  # consent, not identity
            "inputs": [one.identity() for one in self.inputs],
            "output format": self.kind.extension,
            "text column": job.text_column,
            "pair column": job.pair_column,
            "top_k": job.top_k,
            "truncate": job.truncate,
            "prefix": job.prefix,
            "delimiter": job.delimiter,
            "columns": None if job.columns is None else list(job.columns),
            "results": None if job.results is None else list(job.results),
            "part_rows": job.part_rows,
            "parts": job.parts,
            "task": task,
            "model": ", ".join(sorted(models)),
        }

    def _check_output(self) -> None:
        if self.streamed:
            if self.kind.format is Format.PARQUET:
                raise InputFileError("Parquet cannot be written to standard output: name a file")
            return
        if is_url(self.out):
            if self.job.parts:
                raise InputFileError("a folder of parts can only be written to a local path")
            if not self._may_replace() and exists(self.out):
                raise InputFileError(f"{self.out} exists already: use --force to replace it")
            return
        path = Path(self.out)
        check_output(
            [one.name for one in self.inputs], path, force=self._may_replace(), folder=self.job.parts
        )
        if not self._may_replace() and self.rejects.exists():
            raise InputFileError(f"{self.rejects} exists already: use --force to replace it")

    def _may_replace(self) -> bool:
        """Say whether what has the output's name may be replaced: asked for, now or when the run began."""
        if self.job.force:
            return True
        known = checkpoint.read_job(self.folder)
        return known is not None and (
            bool(known.get("replace")) or bool(checkpoint.read_state(self.folder).inode)
        )


def exists(url: str) -> bool:
    fs, path = filesystem(url)
    with remote_errors(url):
        return bool(fs.exists(path))


def check_output(sources: Sequence[str], out: Path, *, force: bool, folder: bool = False) -> None:
    """Raise InputFileError if ``out`` cannot or must not be written."""
    if not out.parent.is_dir():
        raise InputFileError(f"{out}: the folder {out.parent} does not exist")
    if not out.exists():
        return
    if not folder and not out.is_file():
        raise InputFileError(f"{out} is not a file")
    if folder and not out.is_dir():
        raise InputFileError(f"{out} is not a folder")
    if any(same_file(source, out) for source in sources):
        raise InputFileError(f"{out} is the input file: choose another name for the output")
    if not force:
        raise InputFileError(f"{out} exists already: use --force to replace it")
