"""The command line ``gristmill-worker``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

import gristmill
from gristmill import console
from gristmill_worker.bench.cli import bench
from gristmill_worker.doctor.cli import doctor
from gristmill_worker.models.cli import model
from gristmill_worker.options import Command, cpu_list, variant_options, workers_options
from gristmill_worker.topology.cli import topology
from gristmill_worker.tune.cli import tune

if TYPE_CHECKING:
    from gristmill_worker.settings import Settings

_CONFIG: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.group(epilog=console.EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gristmill.__version__, prog_name="gristmill-worker")
def cli() -> None:
    """Serve a queue with a model on this machine's CPUs; make model directories."""


def _worker_options(command: Command) -> Command:
    """Add the settings that have a flag, for one worker process or for many."""
    for option in reversed(
        (
            click.option("--queue", help="Queue to serve."),
            click.option("--model", type=click.Path(path_type=Path), help="Model directory."),
            click.option(
                "--redis",
                metavar="URL",
                help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL.",
            ),
            click.option("--name", help="Worker name, unique among all workers of the queue."),
            variant_options,
            click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine."),
            click.option("--cores", callback=cpu_list, metavar="LIST", help="CPUs to run on, e.g. 0,2-3."),
            click.option(
                "--memory-policy",
                type=click.Choice(["preferred", "bind", "none"]),
                help="Of memory on the NUMA node of the cores.  [default: preferred]",
            ),
            click.option(
                "--lease-s", type=console.Finite(min=1), help="Silence after which others take over."
            ),
            click.option("--metrics", metavar="[HOST:]PORT", help="Serve /metrics, /healthz, /readyz there."),
            click.option("--log-level", help="debug, info, warning or error."),
        )
    ):
        command = option(command)
    return command


def _machine_options(command: Command) -> Command:
    """Add the settings of a whole machine that have a flag."""
    spares = click.option(
        "--spares", type=click.IntRange(0, 16), help="Warm processes in reserve.  [default: 0]"
    )
    return workers_options(spares(command))


source_option = click.option(
    "--source", type=click.Choice(["streams", "rq"]), help="What the queue is.  [default: streams]"
)


@cli.command()
@click.argument("configs", nargs=-1, type=_CONFIG)
@source_option
@_worker_options
@_machine_options
@click.option("--max-loaded", type=click.IntRange(min=1), help="Models with 'lazy', at a time.")
def run(configs: tuple[Path, ...], max_loaded: int | None, **flags: Any) -> int:
    """Serve queues with this machine: a worker process for each core, watched and replaced.

    Every CONFIG is a YAML file for one queue and model; several of them share the cores. Settings come from
    flags, then GRISTMILL_* variables, then the file, then defaults.

    SIGTERM or Ctrl-C once: finish what was taken, then stop. Twice: stop at once; what was taken runs again
    elsewhere. SIGHUP, or a changed file or model: each worker is replaced by a new one that is warm already.
    SIGTTIN, SIGTTOU: one worker more, or less.

    \b
    Example:
      gristmill-worker run configs/topics.yaml --workers 2
    """
    return _supervise(configs, flags, max_loaded)


def _supervise(configs: tuple[Path, ...], flags: Mapping[str, Any], max_loaded: int | None = None) -> int:
    with console.needs_extra("worker"):
        from gristmill_worker.settings import load_settings
        from gristmill_worker.supervisor.supervisor import Supervisor
        from gristmill_worker.telemetry import configure_logging

    def load() -> list[Settings]:
        return [load_settings(config, os.environ, flags) for config in configs or (None,)]

    configure_logging(load()[0].log_level)
    return Supervisor(configs, load, max_loaded=max_loaded).run()


@cli.command()
@click.argument("config", required=False, type=_CONFIG)
@source_option
@_worker_options
def serve(config: Path | None, **flags: Any) -> int:
    """Serve one queue with one model in this very process: what 'run' starts for each core set.

    For one-core containers, or a supervisor of your own. Settings and signals are as for 'run'.

    \b
    Example:
      gristmill-worker serve configs/topics.yaml --cores 0
    """
    with console.needs_extra("worker"):
        from gristmill_worker.service import serve as serve_queue
        from gristmill_worker.settings import load_settings
    return serve_queue(load_settings(config, os.environ, flags))


@cli.command()
@click.argument("config", required=False, type=_CONFIG)
@_worker_options
@_machine_options
@click.option(
    "--allow-pickle",
    is_flag=True,
    default=None,
    help="Read pickled jobs too: whoever can enqueue runs code here.",
)
@click.option(
    "--with-scheduler", is_flag=True, default=None, help="Bring back scheduled jobs, as 'rq worker' does."
)
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    help="Folder that the jobs' callbacks are imported from.  [default: .]",
)
def rq(
    config: Path | None,
    *,
    allow_pickle: bool | None,
    with_scheduler: bool | None,
    path: Path | None,
    **flags: Any,
) -> int:
    """Serve a queue of RQ jobs of gristmill.rq_jobs.score: 'run' with 'source: rq'.

    Jobs come from plain RQ clients, and end as RQ's own workers would end them. Settings, signals and exit
    codes are those of 'run', which also serves several queues, of RQ jobs and others; 'serve' is one process.

    \b
    Example:
      gristmill-worker rq --queue sentiment --model models/topics --workers 2
    """
    options = {"allow_pickle": allow_pickle, "with_scheduler": with_scheduler, "path": path}
    return _supervise((config,) if config else (), {**flags, "source": "rq", "rq": options})


cli.add_command(model)
cli.add_command(tune)
cli.add_command(bench)
cli.add_command(topology)
cli.add_command(doctor)


def main() -> NoReturn:
    """Entry point of ``gristmill-worker``."""
    console.run(cli)
