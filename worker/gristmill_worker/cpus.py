"""This machine's CPUs: lists of them as taskset writes them, their model and what they can compute."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

CPU_INFO: Final = Path("/proc/cpuinfo")
# What decides which kernels an engine uses; a hypervisor may hide some on the same CPU model.
FEATURES: Final = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
FEATURES_ARM: Final = ("asimd", "asimddp", "sve", "i8mm", "bf16")
_ARM_NAME: Final = ("CPU implementer", "CPU part")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs in e.g. ``0,2-3``; raise ValueError if ``text`` is no such list."""
    cpus: dict[int, None] = {}
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus |= dict.fromkeys(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"{text!r} is not a CPU list such as 0,2-3") from None
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs as :func:`parse_cpu_list` reads them, in order: ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu <= ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


@cache
def cpu_features() -> frozenset[str]:
    """Return those of FEATURES and FEATURES_ARM that this CPU has."""
    return features_in(_fields(_cpu_info()))


@cache
def cpu_model() -> str:
    """Return this CPU's model and the features that engines choose their kernels by."""
    return describe_cpu(_cpu_info())


def describe_cpu(cpuinfo: str) -> str:
    """Return the model and features of the first CPU in the text of ``/proc/cpuinfo``."""
    fields = _fields(cpuinfo)
    numbers = [fields[name] for name in ("cpu family", "model", "stepping") if name in fields]
    name = fields.get("model name") or " ".join(fields[part] for part in _ARM_NAME if part in fields)
    found = features_in(fields)
    features = [flag for flag in (*FEATURES, *FEATURES_ARM) if flag in found]
    return " ".join([name or platform.machine(), *(["/".join(numbers)] if numbers else []), *features])


def features_in(fields: dict[str, str]) -> frozenset[str]:
    """Return the features among the flags of one CPU of ``/proc/cpuinfo``."""
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return frozenset(flags) & {*FEATURES, *FEATURES_ARM}


def _cpu_info() -> str:
    try:
        return CPU_INFO.read_text("utf-8", "replace")
    except OSError:
        return f"model name: {platform.processor() or platform.machine()}"


def _fields(cpuinfo: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields
