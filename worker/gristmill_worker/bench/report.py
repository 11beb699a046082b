"""A benchmark's report in the terminal, and the open loop as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from gristmill_worker.bench.figures import TARGETS, Report, explain
from gristmill_worker.bench.throughput import FIFO_BATCH, FIFO_MULTIPLE
from gristmill_worker.tune.report import check_png

__all__ = ["check_png", "show", "write_png"]


def show(console: Console, report: Report) -> None:
    """Print every figure with its target, and where the time goes."""
    about, rates = report["ran_on"], report["throughput"]
    texts = about["texts"]
    console.print(
        f"{about['model']} ({about['precision']}) on {about['engine']} {about['engine_version']}, "
        f"{about['threads']} thread(s); {about['cpu']}, worker on CPU {about['worker_core']}, Redis "
        f"{about['redis']} and producer on CPU {about['redis_and_producer_core']}\n"
        f"{texts['count']} texts of {texts['source']}: mean {texts['mean_tokens']:.1f}, p95 "
        f"{texts['p95_tokens']:.0f} tokens; {len(about['shapes'])} shapes ({about['shapes_from']}), costs: "
        f"{about['costs']}; request options: {about['request_options'] or 'none'}",
        highlight=False,
    )
    if about["worker_core"] == about["redis_and_producer_core"]:
        console.print("Worker, Redis and producer share one CPU: end to end is slower than with two.")
    for table in (_rates_table(rates), _cpu_table(report), _loads_table(report), _bursts_table(report)):
        console.print(table)
    console.print(_targets_table(report))
    for target in TARGETS:
        if not target.met(report[target.key]):
            console.print(f"{target.figure}: {explain(report, target.key)}", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _rates_table(rates: Report) -> Table:
    table = _table(
        "texts/s: medians of the rounds; FIFO's batches run once, a part of them in each round",
        "",
        "texts/s",
        "rounds",
    )
    rows = {
        "engine": "engine only: windows planned and assembled in advance, in this process",
        "end_to_end": "end to end: through Redis, with the stream client",
        "fifo": f"FIFO, engine only: {FIFO_BATCH} a batch, padded to multiples of {FIFO_MULTIPLE}",
    }
    for key, name in rows.items():
        found = rates["rounds"][key]
        table.add_row(name, f"{rates[f'{key}_requests_per_s']:,.1f}", ", ".join(f"{r:,.1f}" for r in found))
    return table


def _cpu_table(report: Report) -> Table:
    table = _table("CPU us per request", "", "model", "null engine")
    null = report["null"]
    for part, value in report["cpu_us_per_request"].items():
        table.add_row(part.replace("_", " "), f"{value:,.1f}", f"{null['cpu_us_per_request'][part]:,.1f}")
    rows = {
        "others_us_per_request": "other processes on the worker's CPU",
        "wall_us_per_request": "wall clock",
    }
    for key, name in rows.items():
        table.add_row(name, *(f"{part[key]:,.1f}" for part in (report["throughput"], null)))
    return table


def _loads_table(report: Report) -> Table:
    title = "open loop, Poisson arrivals: ms from the intended send time to the result"
    table = _table(
        title, "load", "offered/s", "done/s", "p50", "p95", "p99", "sent late p99", "batch", "requests"
    )
    for load in report["open_loop"]:
        latency = load["latency"]
        table.add_row(
            f"{load['load']:.0%}",
            f"{load['offered_per_s']:,.1f}",
            f"{load['done_per_s']:,.1f}",
            *(f"{latency[name]:,.1f}" for name in ("p50", "p95", "p99")),
            f"{load['late']['p99']:,.1f}",
            f"{load['mean_batch']:.1f}",
            f"{load['requests']}",
        )
    return table


def _bursts_table(report: Report) -> Table:
    table = Table("64 requests as", "bursts", "windows: size x count", "batches: size x count")
    table.title, table.title_justify = "bursts on two idle workers, null engine", "left"
    for kind, found in report["bursts"].items():
        sizes = (found["window_sizes"], found["batch_sizes"])
        table.add_row(
            kind, str(found["bursts"]), *("  ".join(f"{s}x{n}" for s, n in h.items()) for h in sizes)
        )
    return table


def _targets_table(report: Report) -> Table:
    table = _table("summary", "figure", "value", "target", "reached")
    for target in TARGETS:
        value = report[target.key]
        table.add_row(target.figure, f"{value:,.3f}", str(target), "yes" if target.met(value) else "no")
    idle = report["idle"]
    others = {
        "engine's CPU time / wall, end to end": report["engine_cpu_share"],
        "token efficiency, end to end (real / padded)": report["token_efficiency"],
        "token efficiency, planned windows": report["token_efficiency_planned"],
        "idle: overhead, p99 ms": idle["overhead"]["p99"],
        "idle: encode, p50 ms (in the overhead)": idle["encode"]["p50"],
        "idle: client's latency, p50 ms": idle["total"]["p50"],
    }
    for name, value in others.items():
        table.add_row(name, f"{value:,.3f}", "", "")
    return table


def write_png(report: Report, path: Path) -> None:
    """Draw latency percentiles over the offered load into a PNG; needs matplotlib."""
    check_png()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    about, loads = report["ran_on"], report["open_loop"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    offered = [load["offered_per_s"] for load in loads]
    for name in ("p50", "p95", "p99"):
        axes.plot(offered, [load["latency"][name] for load in loads], marker="o", label=name)
    capacity = report["throughput"]["end_to_end_requests_per_s"]
    axes.axvline(capacity, linestyle="--", color="grey", label="capacity under backlog")
    axes.set_xlabel("offered requests/s, Poisson arrivals")
    axes.set_ylabel("ms from the intended send time to the result")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.set_title(f"{about['model']}: {about['engine']} {about['precision']}, one core", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
