"""``gristmill-worker doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from gristmill import console
from gristmill.errors import ExitCode

_PLACEHOLDER: Final = "none"  # settings need a queue and a model; nothing looks at these


@click.command()
@click.argument(
    "configs", nargs=-1, type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
)
@click.option("--model", type=click.Path(path_type=Path), help="Model directory.")
@click.option(
    "--redis", metavar="URL", help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL."
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(
    configs: tuple[Path, ...], model: Path | None, redis: str | None, strict: bool, as_json: bool
) -> int:
    """Look at what a worker would run on: CPUs, kernel, Redis, model; say what to mend and how.

    Settings come from flags, then GRISTMILL_* variables, then the YAML files CONFIG, as for 'run'. Without a
    model or a Redis named by any of these, it is not looked at. Nothing is changed, but for a hundred PINGs.
    Exits with 1 if there is a problem: something that does not work, or loses work. Warnings are for what is
    slower or less safe than it could be.

    \b
    Examples:
      gristmill-worker doctor configs/topics.yaml
      gristmill-worker doctor --model models/minilm --redis redis://localhost:6379/0 --strict
    """
    with console.needs_extra("worker"):
        from gristmill_worker.doctor import report
        from gristmill_worker.doctor.finding import Level, worst
        from gristmill_worker.doctor.run import examine
        from gristmill_worker.settings import load_settings
    flags: dict[str, Any] = {"model": model, "redis": redis}
    named = {
        name: bool(configs) or value is not None or bool(os.environ.get(f"GRISTMILL_{name.upper()}"))
        for name, value in flags.items()
    }
    if not configs:
        flags["queue"] = _PLACEHOLDER
        if not named["model"]:
            flags["model"] = _PLACEHOLDER
    configurations = [load_settings(config, os.environ, flags) for config in configs or (None,)]
    findings = list(examine(configurations, **named))
    if as_json:
        click.echo(report.as_json(findings))
    else:
        report.show(Console(), findings)
    failing = (Level.PROBLEM, Level.WARNING) if strict else (Level.PROBLEM,)
    return ExitCode.FAILURE if worst(findings) in failing else ExitCode.OK
