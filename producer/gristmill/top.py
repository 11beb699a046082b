"""``gristmill top``: queues and workers, live in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

import click
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, age, plain, redis_option
from gristmill.errors import BrokerUnavailable
from gristmill.watch import QueueLook, Watch, WorkerLook

EVERY_S: Final = 1.0
FRAME_ROWS: Final = 9  # of both tables, beside their contents
WIDE: Final = 130  # columns from which all is shown of a worker
ERROR_CHARS: Final = 200
PIPE_COLUMNS: Final = 180  # where no terminal says how wide it is


@click.command()
@click.option("--once", is_flag=True, help="Print once and end; rates are then since each worker's start.")
@click.option("--json", "as_json", is_flag=True, help="Print once, as JSON.")
@redis_option
def top(once: bool, as_json: bool, redis: str) -> None:
    """Show what waits and who works on it, anew each second; q or Ctrl-C ends it.

    busy is the share of time that a worker's engine runs, tokens the share of what it computes that is not
    padding, beat the time since the worker was last heard of. A narrow terminal shows less of the workers. Of
    more than 100 queues the fullest are looked at each second, the others in turn.
    """
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        if as_json:
            click.echo(orjson.dumps(_records(Watch(client).look(None)), option=orjson.OPT_INDENT_2))
        elif once or not sys.stdout.isatty():
            width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
            terminal = Console(width=width)
            terminal.print(_tables(Watch(client).look(None), terminal.width))
        else:
            with suppress(KeyboardInterrupt):  # the other way to end it
                _show(Watch(client), Console())


def _show(watch: Watch, terminal: Console) -> None:
    looks: list[QueueLook] = []
    with _keys() as ended, Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            try:
                looks, trouble = watch.look(), ""
            except BrokerUnavailable as error:
                trouble = str(error)
            head = Text(f"gristmill  {time.strftime('%H:%M:%S')}  {len(looks)} queues  q ends", style="dim")
            if trouble:
                head = Text(plain(trouble, ERROR_CHARS), style="bold red")
            rows = max(terminal.height - FRAME_ROWS, 2)
            live.update(Group(head, _tables(looks, terminal.width, rows)), refresh=True)
            if ended(EVERY_S):
                return


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits and says whether q was pressed; afterwards the terminal is as before."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def ended(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return bool(ready) and os.read(descriptor, 1) in (b"q", b"Q", b"")

    try:
        tty.setcbreak(descriptor)
        yield ended
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _tables(looks: Sequence[QueueLook], width: int, rows: int | None = None) -> Group:
    """Return both tables, with ``rows`` rows together at the most."""
    workers = [(look.name, worker) for look in looks for worker in look.workers]
    if rows is None:
        rows = len(looks) + len(workers)
    queue_rows = min(len(looks), max(rows - len(workers), rows // 2))
    return Group(_queues(looks, queue_rows), _workers(workers, max(rows - queue_rows, 0), width >= WIDE))


def _table(names: Sequence[str], numbers: Sequence[str], last: Sequence[str], more: int) -> Table:
    """Return a table whose names are cut where there is no room for all; numbers never are."""
    columns = [Column(name, no_wrap=True, min_width=4) for name in names]
    columns += [Column(name, justify="right", no_wrap=True, min_width=_width(name)) for name in numbers]
    columns += [Column(name, no_wrap=True) for name in last]
    caption = f"and {more:,} more" if more > 0 else None
    return Table(*columns, box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=0)


def _width(name: str) -> int:
    return 9 if name == "memory" else max(len(name), 6)


def _queues(looks: Sequence[QueueLook], rows: int) -> Table:
    numbers = ("waiting", "pending", "dead", "oldest", "requests/s", "workers")
    table = _table(["queue"], numbers, ["state"], len(looks) - rows)
    for look in looks[:rows]:
        depth = look.depth
        if depth is None:
            table.add_row(look.name, *[""] * len(numbers), Text(plain(look.error), "red"))
            continue
        held = [f"{count:,}" for count in (depth.waiting, depth.pending, depth.dead)]
        work = [age(depth.oldest_s), f"{look.requests_s:,.1f}", str(len(look.workers))]
        state = "paused" if depth.paused else "" if look.workers else "no worker"
        table.add_row(look.name, *held, *work, Text(state, "yellow"))
    return table


def _workers(workers: Sequence[tuple[str, WorkerLook]], rows: int, wide: bool) -> Table:
    numbers = ("busy", "requests/s", "tokens", "memory", "beat")
    more, most = (("host", "pid", "model"), 64) if wide else ((), 13)
    table = _table(["worker", "queue", *more, "engine"], numbers, (), len(workers) - rows)
    for queue, worker in workers[:rows]:
        about = [worker.host, str(worker.pid), worker.model] if wide else []
        table.add_row(
            *(Text(plain(text, most)) for text in (worker.name, queue, *about, worker.engine)),
            f"{worker.busy:.0%}",
            f"{worker.requests_s:,.1f}",
            "" if worker.efficiency is None else f"{worker.efficiency:.0%}",
            f"{worker.rss_bytes / 2**20:,.0f} MiB",
            age(worker.age_s),
        )
    return table


def _records(looks: Sequence[QueueLook]) -> list[dict[str, Any]]:
    return [asdict(look) | {"requests_s": look.requests_s} for look in looks]
