"""Keeps this process to its core set: its CPUs, and memory of their node."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from gristmill.errors import InputFileError
from gristmill_worker.telemetry import logger
from gristmill_worker.topology.facts import NODES
from gristmill_worker.topology.kernel import read_list
from gristmill_worker.topology.plan import CoreSet

MemoryPolicy = Literal["preferred", "bind", "none"]

# As in <linux/mempolicy.h>; see https://docs.kernel.org/admin-guide/mm/numa_memory_policy.html.
_MODES: Final[Mapping[str, int]] = MappingProxyType({"preferred": 1, "bind": 2})
_SET_MEMPOLICY: Final[Mapping[str, int]] = MappingProxyType({"x86_64": 238, "aarch64": 237, "riscv64": 237})
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind(core_set: CoreSet, policy: MemoryPolicy = "preferred") -> None:
    """Run all threads of this process on the core set's CPUs, and take memory from its node.

    ``preferred`` takes memory elsewhere once the node is full, ``bind`` never. Threads that are started later
    inherit both; of those that run already only the CPUs change, which is why this comes before engines.
    A kernel that refuses the memory policy (containers often do) is a warning in the log: memory is then
    taken where the thread runs, as far as it goes. Raises InputFileError for CPUs that cannot be used.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), core_set.cpus)
    except (OSError, ValueError, OverflowError) as error:
        allowed = sorted(os.sched_getaffinity(0))
        raise InputFileError(
            f"cores: {list(core_set.cpus)} cannot be used ({error}); this process may use {allowed}"
        ) from error
    if policy == "none":
        return
    if core_set.node is None:
        if policy == "bind":
            _warn(policy, None, "the cores belong to no single NUMA node")
        return
    with_memory = read_list(Path("/") / NODES / "has_memory") or ()
    if policy == "preferred" and len(with_memory) < 2:
        return  # as it is anyway: a container that refuses it would warn for nothing
    try:
        set_memory_policy(policy, core_set.node)
    except OSError as error:
        _warn(policy, core_set.node, error.strerror)


def set_memory_policy(policy: Literal["preferred", "bind"], node: int) -> None:
    """Have this thread, and those that it starts, take memory from ``node``. Raises OSError."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(0, f"memory policies are not known for {platform.machine()}")
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    library = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one off the number of bits.
    result = library.syscall(
        ctypes.c_long(number),
        ctypes.c_long(_MODES[policy]),
        ctypes.byref(mask),
        ctypes.c_ulong(words * _BITS + 1),
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _warn(policy: str, node: int | None, reason: str | None) -> None:
    logger().warning(
        "memory_policy_not_set",
        policy=policy,
        node=node,
        reason=reason,
        advice="memory_policy: none silences this; containers need the capability SYS_NICE for it",
    )
