"""The self-test: every shape that an engine was loaded for answers as the reference does.

A runtime may be right at all shapes but one (openvino's int8 attention was wrong at exactly 32 tokens, with
any batch, where a mean over texts still looked right), so each shape is tried by itself and judged by its
worst row.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Engine, EngineError, Shape
from gristmill_worker.engines.choice import NULL, REFERENCE_ENGINE
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.answers import Answer, Answers, cut, random_item
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.limits import LIMITS, Limits, kind_of
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.models.records import RunKey, load_record, save_record
from gristmill_worker.models.verdict import load_verdict, verdicts_elsewhere
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.tasks.text import CHARS_PER_TOKEN
from gristmill_worker.telemetry import logger

ROWS: Final = 4  # different ones in a batch; the other rows repeat them
_SEED: Final = 5
_PREFIX: Final = "selftest"

Probes = Mapping[
    int, tuple[Encoded, Answer]
]  # by length in tokens: an item, and the reference's answer to it


class SelfTestRecord(BaseModel):
    """The shapes of a variant that agreed with the reference when a worker loaded them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: RunKey
    shapes: tuple[tuple[int, int], ...]  # (batch, sequence)


def reference_of(model_dir: Path, manifest: Manifest) -> Variant:
    """Return what all others are compared with: the imported form in fp32 on onnxruntime."""
    name = manifest.precision
    return Variant(model_dir, REFERENCE_ENGINE, name, manifest.select(name))


def is_reference(variant: Variant, reference: Variant) -> bool:
    """Say whether ``variant`` is what others are compared with."""
    return (variant.engine, variant.form) == (reference.engine, reference.form)


def ensure_agreement(engine: Engine, variant: Variant, manifest: Manifest, threads: int) -> None:
    """Self-test a worker's shapes, unless a passed check or an earlier start did on this CPU.

    ``manifest`` is of all forms. What agreed is stored beside the model where that can be written. Raises
    :class:`ModelRefusedError` if an answer is wrong: none is better than a wrong one.
    """
    reference = reference_of(variant.model_dir, manifest)
    if variant.engine == NULL or is_reference(variant, reference):
        return
    known = _known_shapes(variant)
    shapes = [shape for shape in engine.shapes if shape not in known]
    if not shapes:
        return
    started = time.perf_counter()
    differences = self_test(engine, variant, reference, shapes, threads)
    limits = _limits_at_start(variant, reference)
    task, limit = manifest.task, limits.agreement(manifest.task)
    worst = max(differences, key=lambda shape: differences[shape])
    if differences[worst] > limit:
        wrong = sum(difference > limit for difference in differences.values())
        raise ModelRefusedError(
            f"{variant} answers wrongly in {wrong} of {len(shapes)} shapes, worst in {worst[0]}x{worst[1]} "
            f"(batch x tokens): {limits.describe(task, differences[worst], limit)}. Choose another engine or "
            "form, or see what 'gristmill-worker model check' says of this one."
        )
    logger().info(
        "self_test",
        variant=str(variant),
        shapes=len(shapes),
        seconds=round(time.perf_counter() - started, 2),
        **limits.figure(task, "worst", differences[worst]),
    )
    _store(variant, shapes)


def self_test(
    engine: Engine, variant: Variant, reference: Variant, shapes: Sequence[Shape], threads: int
) -> dict[Shape, float]:
    """Return how far the worst row of each shape is from the reference; see :meth:`Answers.difference`.

    ``engine`` is ``variant`` loaded for ``shapes``. The reference is loaded once, runs one item of each
    sequence length by itself, and is released.
    """
    answers = Answers(variant.model_dir, reference.manifest)
    items = probe_items(answers, {sequence for _, sequence in shapes})
    probes = answer_probes(answers, reference, items, threads)
    return shape_differences(engine, answers, shapes, probes)


def probe_items(answers: Answers, lengths: Iterable[int]) -> dict[int, Encoded]:
    """Return a different item of each of ``lengths``: English text, or random tensors."""
    lengths = sorted(lengths)
    if answers.manifest.task == "tensors":
        generator = np.random.default_rng(_SEED)
        return {length: random_item(answers.manifest, length, generator) for length in lengths}
    long_texts = _long_texts([length * CHARS_PER_TOKEN for length in lengths])
    return {
        length: cut(item, length)
        for length, item in zip(lengths, answers.encode(list(long_texts)), strict=True)
    }


def _long_texts(sizes: Sequence[int]) -> Iterator[str]:
    """Yield texts of so many characters or more."""
    paragraphs = list(documentation())
    random.Random(_SEED).shuffle(paragraphs)  # noqa: S311 - a sample
    source = cycle(paragraphs)
    for size in sizes:
        text = next(source)
        while len(text) < size:
            text = f"{text} {next(source)}"
        yield text


def answer_probes(
    answers: Answers, reference: Variant, items: Mapping[int, Encoded], threads: int
) -> dict[int, tuple[Encoded, Answer]]:
    """Return ``items`` with the reference's answer to each, run alone and without padding.

    Raises :class:`ModelRefusedError` if one is not finite: nothing could be compared with that.
    """
    probes = {}
    with closing(reference.load([(1, length) for length in items], threads)) as engine:
        for length, item in items.items():
            (answer,) = answers.run(engine, [item], (1, length))
            if not all(np.isfinite(array).all() for array in answer):
                raise ModelRefusedError(
                    f"the reference of {reference.model_dir} answers NaN or infinity to {length} tokens"
                )
            probes[length] = item, answer
    return probes


def shape_differences(
    engine: Engine, answers: Answers, shapes: Iterable[Shape], probes: Probes
) -> dict[Shape, float]:
    """Return the worst row's difference from the reference by shape; infinity where the engine fails.

    A batch holds the probe that fills its sequence and the next shorter ones, over and over.
    """
    differences = {}
    for shape in shapes:
        batch, sequence = shape
        fitting = sorted((length for length in probes if length <= sequence), reverse=True)
        rows = [probes[length] for length in islice(cycle(fitting[:ROWS]), batch)]
        try:
            found = answers.run(engine, [item for item, _ in rows], shape)
        except EngineError:
            differences[shape] = float("inf")
        else:
            differences[shape] = max(answers.differences(found, [answer for _, answer in rows]))
    return differences


def _known_shapes(variant: Variant) -> set[Shape]:
    """Return the shapes that agreed before, on this CPU with this version of the engine."""
    key = variant.run_key()
    verdict, record = load_verdict(variant.model_dir, key), _load(variant, key)
    known = set(verdict.shapes) if verdict is not None and verdict.passed else set()
    return known | (set(record.shapes) if record is not None else set())


def _limits_at_start(variant: Variant, reference: Variant) -> Limits:
    """Return the limits of a check that was passed, here or elsewhere, else those of its kind."""
    limits = LIMITS[kind_of(variant, reference.form)]
    key = variant.run_key()
    here = load_verdict(variant.model_dir, key)
    for verdict in [*([here] if here else []), *verdicts_elsewhere(variant.model_dir, key)]:
        if verdict.passed and verdict.limits:
            return limits.changed(verdict.limits)
    return limits


def _load(variant: Variant, key: RunKey) -> SelfTestRecord | None:
    record = load_record(variant.model_dir / key.file_name(_PREFIX), SelfTestRecord)
    return record if record is not None and record.key == key else None


def _store(variant: Variant, shapes: Sequence[Shape]) -> None:
    key = variant.run_key()
    before = _load(variant, key)
    both = {*shapes, *(before.shapes if before is not None else ())}
    try:
        save_record(
            variant.model_dir / key.file_name(_PREFIX), SelfTestRecord(key=key, shapes=tuple(sorted(both)))
        )
    except InputFileError:
        logger().debug("self_test_not_stored", model=str(variant.model_dir))  # then every start tests
