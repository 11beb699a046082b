"""Keeps this process to its core set: its CPUs, and memory of their node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from gristmill.errors import InputFileError
from gristmill_worker.telemetry import logger
from gristmill_worker.topology import memory
from gristmill_worker.topology.facts import NODES
from gristmill_worker.topology.kernel import read_list
from gristmill_worker.topology.plan import CoreSet

MemoryPolicy = Literal["preferred", "bind", "none"]


def bind(core_set: CoreSet, policy: MemoryPolicy = "preferred") -> None:
    """Run all threads of this process on the core set's CPUs, and take memory from its node.

    ``preferred`` takes memory elsewhere once the node is full, ``bind`` never. Threads that are started later
    inherit both; those that run already get the CPUs alone, which is why this comes before engines. What this
    process has taken elsewhere is moved, as far as no other process shares it.
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
        memory.set_policy(policy, core_set.node)
        memory.move_to(core_set.node, with_memory)
    except OSError as error:
        _warn(policy, core_set.node, error.strerror)


def _warn(policy: str, node: int | None, reason: str | None) -> None:
    logger().warning(
        "memory_policy_not_set",
        policy=policy,
        node=node,
        reason=reason,
        advice="memory_policy: none silences this; containers need the capability SYS_NICE for it",
    )
