"""Command line options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
