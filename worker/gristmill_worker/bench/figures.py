"""A benchmark's figures: one record of all of them, their targets, and where the time goes."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any, Final

import numpy as np

import gristmill
from gristmill_worker.batching.cost_table import cost_key
from gristmill_worker.bench.latency import (
    Bursts,
    Idle,
    Load,
    measure_bursts,
    measure_idle,
    measure_open_loop,
)
from gristmill_worker.bench.rig import STAGES, Flow, Rig
from gristmill_worker.bench.throughput import (
    NULL_WINDOW,
    SHORT_WORDS,
    WINDOW,
    Amounts,
    Say,
    Subject,
    Throughput,
    measure_null,
    measure_throughput,
)
from gristmill_worker.settings import BatchSettings
from gristmill_worker.tune.measure import bound

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to reach."""

    key: str
    figure: str
    bound: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:,g}"


TARGETS: Final = (
    Target("end_to_end_ratio", "end to end / engine's ceiling", 0.90),
    Target("fifo_speedup", "end to end / FIFO (engine only)", 2.0),
    Target("plan_efficiency", "plan efficiency (ideal / planned cost)", 0.80),
    Target("engine_busy_share", "engine busy under backlog (wall)", 0.97),
    Target("planner_us_per_item", "planner, us per item", 10.0, at_least=False),
    Target("null_requests_per_s", "null engine, requests/s", 12_000.0),
    Target("idle_overhead_p50_ms", "idle: client's latency minus run, p50 ms", 1.5, at_least=False),
)


def measure(subject: Subject, amounts: Amounts, source: str, say: Say) -> Report:
    """Take every step, Redis and the producer on their CPU, and return the report.

    Raises BenchError, or whatever else fails: there is no report of a part.
    """
    with bound([subject.other_core]), Rig() as rig:
        about = ran_on(subject, source, rig.redis_version())
        throughput = measure_throughput(rig, subject, amounts, say)
        null = measure_null(rig, subject, amounts, say)
        idle = measure_idle(rig, subject, amounts, say)
        bursts = measure_bursts(rig, subject, amounts, say)
        loads = measure_open_loop(rig, subject, amounts, median(throughput.flow.rates), say)
    return build(about, throughput, null, idle, bursts, loads)


def ran_on(subject: Subject, source: str, redis_version: str) -> Report:
    """Return what the figures belong to."""
    manifest = subject.manifest
    key = cost_key(subject.variant, subject.threads)
    lengths = subject.lengths
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gristmill": gristmill.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "redis": redis_version,
        "cpu": key.cpu,
        "worker_core": subject.core,
        "redis_and_producer_core": subject.other_core,
        "engine": key.engine,
        "engine_version": key.engine_version,
        "form": subject.variant.form,
        "precision": key.precision,
        "threads": subject.threads,
        "model": manifest.id,
        "task": manifest.task,
        "request_options": subject.options,
        "shapes": [list(shape) for shape in subject.shapes],
        "shapes_from": "chosen for other texts of the same source" if subject.measured else "default grid",
        "costs": "measured" if subject.measured else "formula",
        "max_items": BatchSettings().max_items,
        "texts": {
            "source": source,
            "count": len(lengths),
            "distinct": len(set(subject.texts)),
            "mean_tokens": fmean(lengths),
            "p50_tokens": median(lengths),
            "p95_tokens": float(np.percentile(lengths, 95)),
            "max_tokens": max(lengths),
        },
    }


def build(
    about: Report,
    throughput: Throughput,
    null: Flow,
    idle: Idle,
    bursts: Mapping[str, Bursts],
    loads: Sequence[Load],
) -> Report:
    """Return the whole report. Rates are medians of the rounds (FIFO: of all texts); no figure is rounded."""
    flow, planned = throughput.flow, throughput.planned
    ceiling, end_to_end = median(throughput.ceiling), median(flow.rates)
    fifo = about["texts"]["count"] / throughput.fifo_s
    return {
        "end_to_end_ratio": end_to_end / ceiling,
        "fifo_speedup": end_to_end / fifo,
        "plan_efficiency": planned.efficiency,
        "engine_busy_share": flow.busy_share(),
        "engine_cpu_share": flow.counts["run_cpu_us"] / 1e6 / flow.seconds,
        "token_efficiency": flow.counts["tokens"] / flow.counts["padded_tokens"],
        "token_efficiency_planned": planned.token_efficiency,
        "planner_us_per_item": planned.us_per_item,
        "null_requests_per_s": median(null.rates),
        "idle_overhead_p50_ms": idle.overhead.p50,
        "cpu_us_per_request": flow.cpu_us_per_request(),
        "throughput": {
            "engine_requests_per_s": ceiling,
            "end_to_end_requests_per_s": end_to_end,
            "fifo_requests_per_s": fifo,
            "rounds": {"engine": throughput.ceiling, "end_to_end": flow.rates, "fifo": throughput.fifo},
            "wall_us_per_request": flow.seconds * 1e6 / flow.requests,
            "others_us_per_request": flow.others_us_per_request(),
            "requests_per_batch": flow.counts["requests"] / flow.counts["batches"],
            "window": WINDOW,
        },
        "null": {
            "rounds": null.rates,
            "cpu_us_per_request": null.cpu_us_per_request(),
            "wall_us_per_request": null.seconds * 1e6 / null.requests,
            "others_us_per_request": null.others_us_per_request(),
            "words": SHORT_WORDS,
            "window": NULL_WINDOW,
        },
        "idle": asdict(idle),
        "bursts": {kind: _histograms(found) for kind, found in bursts.items()},
        "open_loop": [asdict(load) for load in loads],
        "ran_on": about,
    }


def _histograms(found: Bursts) -> Report:
    named = {str(size): count for size, count in found.batch_sizes.items()}
    windows = {str(size): count for size, count in found.window_sizes.items()}
    return {"bursts": found.bursts, "batch_sizes": named, "window_sizes": windows}


def lost_time(report: Report) -> dict[str, float]:
    """Return what a request takes longer end to end than in the engine alone, in us of the worker's CPU.

    The parts add up to the whole difference (of the means of all rounds); a negative part was saved.
    """
    cpu, throughput = report["cpu_us_per_request"], report["throughput"]
    alone = fmean(1e6 / rate for rate in throughput["rounds"]["engine"])
    parts = {"engine, slower than alone": cpu["run"] - alone}
    parts |= {stage: cpu[stage] for stage in STAGES if stage != "run"}
    parts["rest of the worker"] = cpu["worker_other"]
    worker = sum(cpu[stage] for stage in STAGES) + cpu["worker_other"]
    parts["other processes on its CPU"] = throughput["others_us_per_request"]
    parts["its CPU idle"] = throughput["wall_us_per_request"] - worker - throughput["others_us_per_request"]
    return parts


def explain(report: Report, key: str) -> str:
    """Say in one line where the rest is of a figure that missed its target."""
    about, null, idle = report["ran_on"], report["null"], report["idle"]
    formula = "" if about["costs"] == "measured" else "; no costs were measured on this CPU: run 'tune' first"
    match key:
        case "end_to_end_ratio" | "engine_busy_share":
            return "us per request: " + _listed(lost_time(report))
        case "plan_efficiency":
            tokens = report["token_efficiency_planned"]
            return f"{1 - tokens:.0%} of the tokens are padding, the rest is smaller batches" + formula
        case "fifo_speedup":
            rates = report["throughput"]
            plan = rates["engine_requests_per_s"] / rates["fifo_requests_per_s"]
            return f"{plan:.2f} in the engine, times {report['end_to_end_ratio']:.2f} end to end" + formula
        case "null_requests_per_s":
            wall, others = null["wall_us_per_request"], null["others_us_per_request"]
            used = {**null["cpu_us_per_request"], "other processes on the worker's CPU": others}
            return f"of {wall:.1f} us per request, CPU us: {_listed(used)}"
        case "idle_overhead_p50_ms":
            rest = idle["overhead"]["p50"] - idle["encode"]["p50"]
            return f"ms: encode {idle['encode']['p50']:.2f}, client, Redis and hand-offs {rest:.2f}"
        case _:
            return ""


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
