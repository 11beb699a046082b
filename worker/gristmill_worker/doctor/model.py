"""Checks of a model directory: its files, what would run it here and how well, its memory, its licences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import measured_speed
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.choice import NULL, choose, doubt_about, obstacle_to, variants
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.settings import Settings
from gristmill_worker.topology.facts import Facts

# Instructions that multiply int8 several times as fast as fp32; without one of them int8 may be the slower.
FAST_INT8: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
# Fitted to what workers used of models of 90 and 440 MB: the interpreter with its libraries, and the weights
# beside what the engine makes of them.
_BASE_MB: Final = 150
_COPIES: Final = {"openvino": 2.0}
_OTHER_COPIES: Final = 1.4


def check_model(
    settings: Settings, facts: Facts, features: frozenset[str], *, workers: int = 1, threads: int = 1
) -> Iterator[Finding]:
    """Yield what every check of the model finds, for so many workers; damaged files end them."""
    try:
        manifest = manifests.load(settings.model)
    except InputFileError as error:
        yield Finding("model files", Level.PROBLEM, str(error), "see the message")
        return
    yield from check_files(manifest)
    try:
        choice = choose(
            settings.model,
            manifest,
            settings.wanted,
            measured=partial(measured_speed, threads=threads),
            features=features,
        )
    except InputFileError as error:
        fix = "ask for less: engine, form and precision may be 'auto'"
        yield Finding("engine", Level.PROBLEM, str(error), fix)
        return
    variant = choice.variant
    yield Finding("engine", Level.OK, f"{variant}: {choice.reason}")
    yield from check_trust(settings, manifest, features)
    yield check_precision(variant, features)
    yield check_measured(variant, threads)
    yield check_memory(variant, settings, facts, workers)
    yield from check_licences(variant)


def check_files(manifest: Manifest) -> Iterator[Finding]:
    """Say which forms are whole."""
    yield Finding(
        "model files", Level.OK, f"{manifest.id}: {', '.join(manifest.usable_forms)} as they were made"
    )
    for name, damage in manifest.damaged.items():
        fix = f"restore the file, or 'gristmill-worker model quantize … --name {name} --force'"
        yield Finding("model files", Level.PROBLEM, f"form {name}: {damage}", fix)


def check_trust(settings: Settings, manifest: Manifest, features: frozenset[str]) -> Iterator[Finding]:
    """Name what could run here, and is not trusted to answer as the model does."""
    for variant in variants(settings.model, manifest, settings.wanted):
        if obstacle_to(variant, features) is None and (doubt := doubt_about(variant, manifest)) is not None:
            fix = f"gristmill-worker model check {settings.model}, if it would be of use"
            yield Finding("not trusted", Level.NOTE, f"{variant}: {doubt}", fix)


def check_precision(variant: Variant, features: frozenset[str]) -> Finding:
    """Compare the precision that would run with what the CPU computes fast."""
    name, precision = "precision", variant.precision
    if variant.engine == NULL:
        return Finding(name, Level.NOTE, "nothing is computed (engine null)")
    if variant.manifest.precision.startswith("int8"):
        if not features & FAST_INT8:
            fix = "form: fp32, or a CPU with VNNI or AMX: 'gristmill-worker tune' compares them"
            found = f"{precision}, and the CPU has no instructions for int8: fp32 may be faster"
            return Finding(name, Level.WARNING, found, fix)
        return Finding(name, Level.OK, f"{precision}, with {', '.join(sorted(features & FAST_INT8))}")
    if features & FAST_INT8:
        fix = "gristmill-worker model quantize … and model check …: int8 is faster here, if it passes"
        found = f"{precision}; the CPU computes int8 as well ({', '.join(sorted(features & FAST_INT8))})"
        return Finding(name, Level.NOTE, found, fix)
    return Finding(name, Level.OK, precision)


def check_measured(variant: Variant, threads: int) -> Finding:
    """Say whether this CPU's costs are known."""
    speed = measured_speed(variant, threads)
    if speed is None:
        fix = f"gristmill-worker tune {variant.model_dir} --cores N, once for each kind of CPU"
        return Finding("costs", Level.NOTE, "not measured on this CPU: shapes go by a formula", fix)
    return Finding("costs", Level.OK, f"measured on this CPU with {threads} thread(s)")


def check_memory(variant: Variant, settings: Settings, facts: Facts, workers: int) -> Finding:
    """Compare what so many workers would need with what there is."""
    weights_mb = sum((variant.model_dir / name).stat().st_size for name in variant.manifest.files) / 2**20
    compiled_mb = settings.engine_memory_mb if variant.engine == "openvino" else 0
    worker_mb = _BASE_MB + weights_mb * _COPIES.get(variant.engine, _OTHER_COPIES) + compiled_mb
    bounds = [bound for bound in (facts.limits.memory_bytes, facts.memory_bytes) if bound]
    found = f"a worker needs some {worker_mb:,.0f} MiB"
    if not bounds:
        return Finding("memory", Level.NOTE, found)
    room_mb = min(bounds) / 2**20
    found += f" of {room_mb:,.0f}"
    if worker_mb > room_mb:
        fix = "a smaller engine_memory_mb, a quantized form, or more memory"
        return Finding("memory", Level.WARNING, found, fix)
    if worker_mb * workers > room_mb:
        fix = f"{int(room_mb / worker_mb)} workers with more cores each, or a smaller engine_memory_mb"
        return Finding("memory", Level.WARNING, f"{found}: too much for {workers} workers", fix)
    return Finding("memory", Level.OK, found)


def check_licences(variant: Variant) -> Iterator[Finding]:
    """Name the licences of the engine and of the model."""
    if variant.engine == deepsparse.NAME:
        fix = "use openvino or onnxruntime in production"
        found = f"deepsparse {deepsparse.VERSION}: for evaluation only, and without fixes since June 2025"
        yield Finding("engine licence", Level.WARNING, found, fix)
    elif variant.engine != NULL:
        yield Finding("engine licence", Level.OK, f"{variant.engine}: {_licence(variant.engine)}")
    yield Finding("model licence", Level.NOTE, f"{variant.manifest.licence} ({variant.manifest.source})")


def _licence(package: str) -> str:
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return "unknown"
    fields = [name for name in ("License-Expression", "License") if name in about]
    return about[fields[0]].splitlines()[0] if fields and about[fields[0]] else "unknown"
