"""``auto``: which engine, form and precision run a model on this CPU, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from gristmill.errors import InputFileError
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.base import ENGINES, Floats
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.verdict import load_verdict, verdicts_elsewhere

MeasuredSpeed = Callable[[Variant], float | None]  # relative to each other; None: not measured on this CPU

AUTO: Final = "auto"
NULL: Final = "null"
REFERENCE_ENGINE: Final = "onnxruntime"
SPARSE: Final = 0.5  # share of zeros from which they are no accident of rounding, and pay
NATIVE_BF16: Final = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for; the rest is ``auto``. ``precision`` is that of floats."""

    engine: str = AUTO
    form: str = AUTO
    precision: Literal["auto", "fp32", "bf16"] = "auto"


ANY: Final = Wanted()


@dataclass(frozen=True, slots=True)
class Choice:
    """The variants to try, the best first, why it is, and what was passed over for what reason."""

    ranked: tuple[Variant, ...]
    reason: str
    rejected: dict[str, str]  # variant -> reason

    @property
    def variant(self) -> Variant:
        """The best one."""
        return self.ranked[0]


def choose(
    model_dir: Path,
    manifest: Manifest,
    wanted: Wanted,
    *,
    measured: MeasuredSpeed = lambda _: None,
    refused: Mapping[str, str] = MappingProxyType({}),
    features: frozenset[str] | None = None,
) -> Choice:
    """Choose among the installed engines, the model's forms and what this CPU computes natively.

    A variant that failed its check on this CPU, or whose form was quantized or pruned and never passed one,
    is taken only if both engine and form were asked for and there is no other. Of what ``tune`` measured on
    this CPU the fastest goes first; what was not measured is ranked by what is known of such CPUs.
    ``refused`` are variants that do not load, and why. Raises :class:`InputFileError` where nothing is left.
    """
    features = cpu_features() if features is None else features
    rejected = dict(manifest.damaged) if wanted.form == AUTO else {}
    left: list[Variant] = []
    doubted: list[Variant] = []
    for variant in variants(model_dir, manifest, wanted):
        name = str(variant)
        if (obstacle := refused.get(name) or obstacle_to(variant, features)) is not None:
            rejected[name] = obstacle
        elif (doubt := doubt_about(variant, manifest)) is not None:
            rejected[name] = doubt
            doubted.append(variant)
        else:
            left.append(variant)
    if not left and AUTO not in (wanted.engine, wanted.form):
        left = doubted
        rejected = {name: reason for name, reason in rejected.items() if name not in set(map(str, doubted))}
    if not left:
        raise InputFileError(_nothing_left(manifest, wanted, rejected))
    ranked, reason = _rank(left, measured, features)
    return Choice(tuple(ranked), reason if len(left) > 1 else "the only one", rejected)


def variants(model_dir: Path, manifest: Manifest, wanted: Wanted) -> Iterator[Variant]:
    """Yield every variant that was asked for and whose form is made for its engine."""
    if wanted.engine not in (AUTO, *ENGINES):
        raise InputFileError(f"engine {wanted.engine!r} is unknown: use auto, {', '.join(ENGINES)}")
    engines = [name for name in ENGINES if name != NULL] if wanted.engine == AUTO else [wanted.engine]
    forms = manifest.usable_forms if wanted.form == AUTO else (wanted.form,)
    exactly = AUTO not in (wanted.engine, wanted.form)
    for engine, form in product(engines, forms):
        selected = manifest.select(form)
        if selected.engines and engine not in selected.engines and not exactly:
            continue
        if wanted.precision != AUTO:
            floats: tuple[Floats, ...] = (wanted.precision,)
        else:
            floats = ("bf16", "fp32") if engine == "openvino" else ("fp32",)
        for each in floats:
            yield Variant(model_dir, engine, form, selected, each)


def obstacle_to(variant: Variant, features: frozenset[str]) -> str | None:
    """Return why ``variant`` cannot run on a CPU with these features; None if it can."""
    engine = variant.engine
    if engine == NULL:
        return None
    if engine == deepsparse.NAME and (reason := deepsparse.obstacle()) is not None:
        return reason
    if find_spec(engine) is None:
        return f"{engine} is not installed: pip install 'gristmill[{ENGINES[engine]}]'"
    if variant.manifest.engines and engine not in variant.manifest.engines:
        return f"form {variant.form!r} was made for {', '.join(variant.manifest.engines)}"
    if variant.floats == "bf16":
        return _obstacle_to_bf16(engine, features)
    return None


def _obstacle_to_bf16(engine: str, features: frozenset[str]) -> str | None:
    if engine != "openvino":
        return f"{engine} computes floats in fp32 only"
    if not features & NATIVE_BF16:
        return "bf16 needs a CPU with AVX512_BF16 or AMX: without, it is far slower than fp32"
    return None


def doubt_about(variant: Variant, manifest: Manifest) -> str | None:
    """Return why ``variant`` is not trusted to answer as the reference does; None if it is.

    The imported form is, for texts: the worker tries every shape that was not checked when it loads. For raw
    tensors only onnxruntime is: others round inputs of any size, and openvino answers a lookup beyond the end
    of a table with zeros instead of an error.
    """
    key = variant.run_key()
    verdict = load_verdict(variant.model_dir, key)
    if verdict is not None:
        return None if verdict.passed else f"it failed its check: {'; '.join(verdict.problems)}"
    is_reference = variant.form == manifest.precision
    if is_reference and (manifest.task != "tensors" or variant.engine in (REFERENCE_ENGINE, NULL)):
        return None
    if any(found.passed for found in verdicts_elsewhere(variant.model_dir, key)):
        return None
    return "it was never checked: 'gristmill-worker model check' does"


def _rank(
    left: Sequence[Variant], measured: MeasuredSpeed, features: frozenset[str]
) -> tuple[list[Variant], str]:
    """Return the fastest first, and why it is: the fastest measured one stands for all that were measured."""
    timed = [(speed, variant) for variant in left if (speed := measured(variant)) is not None]
    timed.sort(key=lambda pair: pair[0], reverse=True)
    fastest = timed[0][1] if timed else None
    untimed = [variant for variant in left if not any(variant is other for _, other in timed)]
    contenders = sorted(
        [*([fastest] if fastest else []), *untimed],
        key=lambda variant: assumed_speed(variant, features),
        reverse=True,
    )
    if contenders[0] is fastest:
        reason = f"the fastest of {len(timed)} that were measured on this CPU"
    else:
        reason = "expected to be the fastest on this CPU: 'gristmill-worker tune' measures"
    return [*contenders, *(variant for _, variant in timed[1:])], reason


def assumed_speed(variant: Variant, features: frozenset[str]) -> float:
    """Return the expected speed as a multiple of onnxruntime in fp32, from measurements of such CPUs."""
    integers = variant.manifest.precision != "fp32"
    if variant.engine == "openvino":
        if "amx_int8" in features and integers:
            return 4.6 if variant.floats == "bf16" else 3.0
        if variant.floats == "bf16":
            return 4.5 if "amx_bf16" in features else 2.0
        return 1.1 if not integers else _int8_speed(features)
    if variant.engine == "deepsparse":  # the only one that gains from zeros
        dense = _int8_speed(features) if integers else 1.0
        sparsity = variant.manifest.sparsity
        return dense * (0.9 if sparsity < SPARSE else 1.0 + 1.2 * sparsity)
    return 1.0 if not integers else 0.7 * _int8_speed(features)


def _int8_speed(features: frozenset[str]) -> float:
    if features & {"avx512_vnni", "avx_vnni"}:
        return 2.8
    return 1.4 if "avx512f" in features else 0.7


def _nothing_left(manifest: Manifest, wanted: Wanted, rejected: dict[str, str]) -> str:
    asked = ", ".join(
        f"{name} {value}"
        for name, value in (("engine", wanted.engine), ("form", wanted.form), ("precision", wanted.precision))
        if value != AUTO
    )
    reasons = dict.fromkeys(rejected.values())
    if len(reasons) == 1:
        return f"{manifest.name} cannot be run with {asked or 'what is installed'}: {next(iter(reasons))}"
    listed = "; ".join(f"{variant}: {reason}" for variant, reason in rejected.items())
    return f"{manifest.name} cannot be run with {asked or 'what is installed'}: {listed or 'no such variant'}"
