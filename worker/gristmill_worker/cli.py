"""The command line ``gristmill-worker``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import click

import gristmill
from gristmill import console
from gristmill_worker.bench.cli import bench
from gristmill_worker.models.cli import model
from gristmill_worker.options import cpu_list, variant_options
from gristmill_worker.tune.cli import tune


@click.group(epilog=console.EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gristmill.__version__, prog_name="gristmill-worker")
def cli() -> None:
    """Serve a queue with a model on this machine's CPUs; make model directories."""


@cli.command()
@click.argument(
    "config", required=False, type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
)
@click.option("--queue", help="Queue to serve.")
@click.option("--model", type=click.Path(path_type=Path), help="Model directory.")
@click.option(
    "--redis", metavar="URL", help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL."
)
@click.option("--name", help="Worker name, unique among all workers of the queue.")
@variant_options
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine.")
@click.option("--cores", callback=cpu_list, metavar="LIST", help="CPUs to run on, e.g. 0,2-3.")
@click.option("--lease-s", type=console.Finite(min=1), help="Silence after which others take over.")
@click.option("--log-level", help="debug, info, warning or error.")
def run(config: Path | None, **flags: Any) -> int:
    """Serve one queue with one model in this process.

    Settings come from flags, then GRISTMILL_* variables, then the YAML file CONFIG, then defaults. SIGTERM or
    Ctrl-C once: finish what was taken, then stop. Twice: stop at once; another worker takes over after the
    lease.

    \b
    Example:
      gristmill-worker run configs/topics.yaml --redis redis://localhost:6379/0
    """
    with console.needs_extra("worker"):
        from gristmill_worker.service import serve
        from gristmill_worker.settings import load_settings
    return serve(load_settings(config, os.environ, flags))


cli.add_command(model)
cli.add_command(tune)
cli.add_command(bench)


def main() -> NoReturn:
    """Entry point of ``gristmill-worker``."""
    console.run(cli)
