"""The self-test: every shape that an engine was loaded for answers as the reference does.

A runtime may be right at all shapes but one (openvino's int8 attention was wrong at exactly 32 tokens, with
any batch, where a mean over texts still looked right), so each shape is tried by itself and judged by its
worst row. Each runs with padding too: an engine that ignores the attention mask is right without.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from gristmill_worker.models.records import SELF_TEST, RunKey, load_record, save_record
from gristmill_worker.models.verdict import load_verdict, verdicts_elsewhere
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.tasks.text import CHARS_PER_TOKEN
from gristmill_worker.telemetry import logger

_SHORTEST: Final = 8  # tokens: of fewer, right forms in int8 were as far off as cosine .92, of eight .993
ROWS: Final = 4  # different ones in a batch; the other rows repeat them
_SEED: Final = 5

Probes = Mapping[
    int, tuple[Encoded, Answer]
]  # by length in tokens: an item, and the reference's answer to it


class SelfTestKey(RunKey):
    """What the shapes ran with."""

    threads: int


class SelfTestRecord(BaseModel):
    """The shapes of a variant that agreed with the reference when a worker loaded them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: SelfTestKey
    shapes: tuple[tuple[int, int], ...]  # (batch, sequence)
    shared_shapes: tuple[tuple[int, int], ...] = ()  # of one compilation for all of them
    not_in_one: tuple[tuple[int, int], ...] = ()  # for which one compilation for all of them failed


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
    own, (known_own, known_shared) = own_shapes(engine), _known_shapes(variant, threads)
    known = (known_own & own) | (known_shared - own)
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
    _store(engine, variant, threads, shapes)


def agrees_in_one(variant: Variant, shapes: Collection[Shape], threads: int) -> bool | None:
    """Say whether one compilation for all ``shapes`` answers as the reference does; None if nobody knows."""
    if set(_record(variant, threads).not_in_one).issuperset(shapes):
        return False
    _, known = _known_shapes(variant, threads)
    return True if known.issuperset(shapes) else None


def note_not_in_one(variant: Variant, shapes: Collection[Shape], threads: int) -> None:
    """Store that one compilation for all ``shapes`` fails, or answers otherwise than the reference."""
    _save(variant, _record(variant, threads).model_copy(update={"not_in_one": tuple(sorted(shapes))}))


def own_shapes(engine: Engine) -> frozenset[Shape]:
    """Return the shapes that are not run by a compilation for all shapes, whose kernels are others."""
    return frozenset(getattr(engine, "fixed", engine.shapes))


def self_test(
    engine: Engine, variant: Variant, reference: Variant, shapes: Sequence[Shape], threads: int
) -> dict[Shape, float]:
    """Return how far the worst row of each shape is from the reference; see :meth:`Answers.difference`.

    ``engine`` is ``variant`` loaded for ``shapes``. The reference is loaded once, runs every probe by itself,
    and is released.
    """
    answers = Answers(variant.model_dir, reference.manifest)
    items = probe_items(answers, {sequence for _, sequence in shapes})
    probes = answer_probes(answers, reference, items, threads)
    return shape_differences(engine, answers, shapes, probes)


def probe_items(answers: Answers, lengths: Iterable[int]) -> dict[int, Encoded]:
    """Return a different item for each length and a short one for it: English text, or random tensors."""
    lengths = sorted({length for whole in lengths for length in (whole, _short(whole))})
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

    ``probes`` are of the shapes' lengths, see :func:`probe_items`.
    """
    differences = {}
    for shape in shapes:
        worst = 0.0
        for rows in _batches(shape, probes):
            try:
                found = answers.run(engine, [item for item, _ in rows], shape)
            except EngineError:
                worst = float("inf")
            else:
                worst = max(worst, *answers.differences(found, [answer for _, answer in rows]))
        differences[shape] = worst
    return differences


def _batches(shape: Shape, probes: Probes) -> list[list[tuple[Encoded, Answer]]]:
    """Return what to run: the probe that fills the sequence, its short one, the next shorter ones.

    They are the rows of one batch, over and over; where a batch has one row, the first two follow each other.
    """
    batch, sequence = shape
    shorter = sorted((length for length in probes if length < sequence), reverse=True)
    lengths = list(dict.fromkeys([sequence, _short(sequence), *shorter]))
    if batch == 1:
        return [[probes[length]] for length in lengths[:2]]
    return [[probes[length] for length in islice(cycle(lengths[:ROWS]), batch)]]


def _short(length: int) -> int:
    """Return a length with so much padding behind it that no quantization is as far off."""
    return max(1, min(length - 1, max(_SHORTEST, length // 4)))


def _known_shapes(variant: Variant, threads: int) -> tuple[set[Shape], set[Shape]]:
    """Return the shapes that agreed before in compilations of their own, and in one for all shapes.

    There are no such shapes if a check failed since.
    """
    verdict = load_verdict(variant.model_dir, variant.run_key())
    if verdict is not None and not verdict.passed:
        return set(), set()
    record = _record(variant, threads)
    own, shared = set(record.shapes), set(record.shared_shapes)
    if verdict is not None and verdict.threads == threads:
        own.update(verdict.shapes)
        shared.update(verdict.shared_shapes)
    return own, shared


def _limits_at_start(variant: Variant, reference: Variant) -> Limits:
    """Return the limits of a check that was passed, here or elsewhere, else those of its kind."""
    limits = LIMITS[kind_of(variant, reference.form)]
    key = variant.run_key()
    here = load_verdict(variant.model_dir, key)
    for verdict in [*([here] if here else []), *verdicts_elsewhere(variant.model_dir, key)]:
        if verdict.passed and verdict.limits:
            return limits.changed(verdict.limits)
    return limits


def _key(variant: Variant, threads: int) -> SelfTestKey:
    return SelfTestKey(threads=threads, **variant.run_key().model_dump())


def _record(variant: Variant, threads: int) -> SelfTestRecord:
    """Return what is stored, or a record of nothing."""
    key = _key(variant, threads)
    record = load_record(variant.model_dir / key.file_name(SELF_TEST), SelfTestRecord)
    return record if record is not None and record.key == key else SelfTestRecord(key=key, shapes=())


def _store(engine: Engine, variant: Variant, threads: int, shapes: Sequence[Shape]) -> None:
    before, own = _record(variant, threads), own_shapes(engine)
    changed = {
        "shapes": tuple(sorted({*before.shapes, *own.intersection(shapes)})),
        "shared_shapes": tuple(sorted({*before.shared_shapes, *(set(shapes) - own)})),
    }
    _save(variant, before.model_copy(update=changed))


def _save(variant: Variant, record: SelfTestRecord) -> None:
    try:
        save_record(variant.model_dir / record.key.file_name(SELF_TEST), record)
    except InputFileError:
        logger().debug("self_test_not_stored", model=str(variant.model_dir))  # then every start tests
