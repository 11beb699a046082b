"""Where the kernel takes memory from: two system calls that Python has no names for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

# As in <linux/mempolicy.h>; see https://docs.kernel.org/admin-guide/mm/numa_memory_policy.html.
_MODES: Final[Mapping[str, int]] = MappingProxyType({"preferred": 1, "bind": 2})
# As in <asm/unistd.h> of each machine: set_mempolicy, migrate_pages.
_CALLS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"x86_64": (238, 256), "aarch64": (237, 238), "riscv64": (237, 238)}
)
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def set_policy(policy: Literal["preferred", "bind"], node: int) -> None:
    """Have this thread, and those that it starts, take memory from ``node``. Raises OSError."""
    mask = _mask((node,))
    _call(_numbers()[0], ctypes.c_long(_MODES[policy]), ctypes.byref(mask), _size(mask))


def move_to(node: int, nodes: Collection[int]) -> None:
    """Move what this process alone has on other ``nodes`` to ``node``. Raises OSError."""
    others = [other for other in nodes if other != node]
    if others:
        before, after = _mask(others, like=node), _mask((node,), like=max(others))
        _call(_numbers()[1], ctypes.c_long(0), _size(before), ctypes.byref(before), ctypes.byref(after))


def _numbers() -> tuple[int, int]:
    try:
        return _CALLS[platform.machine()]
    except KeyError:
        raise OSError(0, f"memory policies are not known for {platform.machine()}") from None


def _mask(nodes: Collection[int], like: int = 0) -> Any:
    """Return a bit for each node, in as many words as ``like`` needs too."""
    mask = (ctypes.c_ulong * (max(*nodes, like) // _BITS + 1))()
    for node in nodes:
        mask[node // _BITS] |= 1 << (node % _BITS)
    return mask


def _size(mask: Any) -> ctypes.c_ulong:
    return ctypes.c_ulong(len(mask) * _BITS + 1)  # the kernel takes one off


def _call(number: int, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
