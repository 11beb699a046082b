"""``model quantize``: adds a quantized form to a model directory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines.base import EngineError, Floats
from gristmill_worker.engines.choice import REFERENCE_ENGINE, obstacle_to
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.answers import Answers
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.labelled import column_texts
from gristmill_worker.models.manifest import Form, Manifest, ModelRefusedError
from gristmill_worker.models.quantize.compare import Comparison, Reference
from gristmill_worker.models.quantize.job import Job, Options, Say
from gristmill_worker.models.quantize.kinds import find_kind
from gristmill_worker.models.quantize.store import add_form, check_free, describe, working_folder
from gristmill_worker.tasks.base import Encoded, Task

PRECISION: Final = "int8"
FEWEST_TEXTS: Final = 16
CALIBRATION_TEXTS: Final = 256
_HELD_OUT: Final = 128  # texts at most to measure on
_TRIAL: Final = 64  # and to choose by
_FLOATS: Final[tuple[Floats, ...]] = ("fp32", "bf16")
_MAX_ROWS: Final = 20_000  # of a file of texts
_SEED: Final = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What to make. ``texts`` None: paragraphs of Python's documentation; ``name`` None: like the kind."""

    model: Path
    kind: str
    name: str | None = None
    texts: Path | None = None
    text_column: str = "text"
    calibration_texts: int = CALIBRATION_TEXTS
    threads: int | None = None  # None: all CPUs that this process may use
    force: bool = False
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True)
class Report:
    """What was made and what was measured of it."""

    name: str
    form: Form
    manifest: Manifest  # with the new form
    reference_bytes: int
    form_bytes: int
    comparisons: tuple[Comparison, ...]  # by what floats are computed in
    notes: tuple[str, ...]


def quantize(request: Request, say: Say = lambda _: None) -> Report:
    """Make the form, try it beside the reference, and add it to the directory as the last step.

    Whatever happens before leaves the directory as it was. Raises :class:`InputFileError` for texts and
    directories that cannot be used, :class:`ModelRefusedError` for models that cannot be quantized.
    """
    make = find_kind(request.kind)
    name = request.name or request.kind
    whole = manifests.load(request.model)
    _check(whole)
    check_free(whole, name, force=request.force)
    reference = whole.select(whole.precision)
    threads = request.threads or len(os.sched_getaffinity(0))
    with working_folder(request.model) as folder:
        answers = Answers(request.model, reference)
        calibration, trial, held_out = _samples(request, answers.task)
        job = Job(request.model, answers, calibration, trial, request.options, threads, folder, say)
        made = make(job)
        form, comparisons, refusals = _compare(job, name, describe(made, name, PRECISION, folder), held_out)
        sizes = _size(request.model, reference.file, reference), _size(folder, form.file, form)
        manifest = add_form(request.model, reference, name, form, folder, force=request.force)
    return Report(name, form, manifest, *sizes, tuple(comparisons), (*made.notes, *refusals))


def _check(manifest: Manifest) -> None:
    if manifest.task == "tensors":
        raise ModelRefusedError(
            f"{manifest.name} takes tensors: a form is made and judged with texts, which it cannot be given"
        )
    if manifest.precision != "fp32":
        raise ModelRefusedError(
            f"{manifest.name} is {manifest.precision} already: import the fp32 model and quantize that"
        )


def _samples(request: Request, task: Task) -> tuple[Sequence[Encoded], Sequence[Encoded], Sequence[Encoded]]:
    """Return texts to calibrate with, to choose by and to measure on; all different, in random order."""
    rows: Iterable[str | None] = (
        documentation()
        if request.texts is None
        else column_texts(request.texts, request.text_column, _MAX_ROWS)
    )
    texts = list(dict.fromkeys(row for row in rows if row is not None))
    random.Random(_SEED).shuffle(texts)  # noqa: S311 - a sample
    wanted = request.calibration_texts + _TRIAL + _HELD_OUT
    found = task.encode([{"text": text} for text in texts[: 2 * wanted]])
    items = [item for item in found if isinstance(item, Encoded)][:wanted]
    if len(items) < FEWEST_TEXTS:
        raise InputFileError(
            f"{request.texts} has {len(items)} different texts in the column {request.text_column!r}: "
            f"at least {FEWEST_TEXTS} are needed, some hundred are better"
        )
    held, trial = min(_HELD_OUT, len(items) // 3), min(_TRIAL, len(items) // 6)
    calibration = items[held + trial :][: request.calibration_texts]
    return calibration, items[held : held + trial], items[:held]


def _compare(
    job: Job, name: str, form: Form, held_out: Sequence[Encoded]
) -> tuple[Form, list[Comparison], list[str]]:
    """Try the form in each engine that it was made for, with each way to compute floats that is native.

    Return the form without the engines that cannot run it, and a sentence about each of those.
    """
    job.say("running the reference")
    original = Variant(job.model_dir, REFERENCE_ENGINE, job.manifest.precision, job.manifest)
    reference = Reference(original, job.answers, held_out, job.threads)
    selected = job.manifest.model_copy(update={"forms": {name: form}}).select(name)
    found, obstacles = [], []
    refusals: dict[str, str] = {}
    for engine, floats in product(form.engines, _FLOATS):
        variant = Variant(job.folder, engine, name, selected, floats)
        if (obstacle := obstacle_to(variant, cpu_features())) is not None:
            obstacles.append(obstacle)
        elif engine not in refusals:
            job.say(f"comparing {variant}")
            try:
                found.append(reference.compare(variant))
            except (ModelRefusedError, EngineError) as error:
                refusals[engine] = str(error)
    found = [each for each in found if each.variant.engine not in refusals]
    if not found and refusals:
        raise ModelRefusedError(f"no engine runs the form: {next(iter(refusals.values()))}")
    if not found:
        raise InputFileError(f"the form cannot be tried here: {obstacles[0]}")
    engines = tuple(engine for engine in form.engines if engine not in refusals)
    notes = [f"The form is not for {engine}: {refusal}" for engine, refusal in refusals.items()]
    return form.model_copy(update={"engines": engines}), found, notes


def _size(folder: Path, file: str, holder: Manifest | Form) -> int:
    """Return the bytes of a graph with its weights: of the files that are called like it."""
    stem = Path(file).stem
    return sum((folder / name).stat().st_size for name in holder.files if Path(name).stem.startswith(stem))
