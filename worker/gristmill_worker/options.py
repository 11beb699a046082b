"""Command line options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from gristmill_worker.cpus import parse_cpu_list

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_NAMES = ("auto", "openvino", "onnxruntime", "deepsparse", "null")


def cpu_list(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Read an option that is a CPU list."""
    try:
        return None if value is None else parse_cpu_list(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def count_or_auto(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> int | Literal["auto"] | None:
    """Read an option that is a number from 1 up, or the word ``auto``."""
    if value is None:
        return None
    if value == "auto":
        return "auto"
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither 'auto' nor a number from 1 up")
    return int(value)


def workers_options(command: Command) -> Command:
    """Add ``--workers`` and ``--cores-per-worker``, see :func:`gristmill_worker.topology.plan.plan`."""
    for option in (
        click.option(
            "--cores-per-worker",
            callback=count_or_auto,
            metavar="N|auto",
            help="Physical cores, and threads, of each; never across a NUMA node.  [default: auto, 1]",
        ),
        click.option(
            "--workers",
            callback=count_or_auto,
            metavar="N|auto",
            help="Worker processes.  [default: auto, what the cores and the CPU limit allow]",
        ),
    ):
        command = option(command)
    return command


def variant_options(command: Command) -> Command:
    """Add ``--engine``, ``--form`` and ``--precision``; None where they are not given."""
    for option in (
        click.option(
            "--precision",
            type=click.Choice(["auto", "fp32", "bf16"]),
            help="Of what is computed in floats.  [default: auto]",
        ),
        click.option("--form", help="Form of the model, see 'model show'.  [default: auto]"),
        click.option("--engine", help=f"{', '.join(ENGINE_NAMES)}.  [default: auto, what suits this CPU]"),
    ):
        command = option(command)
    return command
