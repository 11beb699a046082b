"""The benchmark: the real command once, quickly; what it computes; what it leaves behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import orjson
import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from conftest import wait_until
from gristmill import Result, keys
from gristmill.errors import ExitCode, InputFileError
from gristmill_worker.bench.cli import COUNT, bench, choose_cores
from gristmill_worker.bench.figures import TARGETS, explain, lost_time
from gristmill_worker.bench.latency import LOADS, count_sizes, percentiles, poisson_schedule
from gristmill_worker.bench.rig import (
    STAGES,
    BenchError,
    Flow,
    Rig,
    Worker,
    busy_s,
    check,
    score_all,
    wait_for,
)
from gristmill_worker.bench.throughput import FIFO_BATCH, FIFO_MULTIPLE, fifo_batches, read_texts, split

COMMAND = [sys.executable, "-m", "gristmill_worker", "bench"]
MARK = "BENCH_TEST_MARK"  # in the environment of all that a run starts


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes that have ``mark`` in their environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def env(mark: str) -> dict[str, str]:
    """A user's settings for other workers must not reach those of the benchmark."""
    return {**os.environ, MARK: mark, "GRISTMILL_BATCH__MAX_ITEMS": "1", "COLUMNS": "200"}


@dataclass(frozen=True)
class Run:
    """One quick run of the command that has ended well."""

    folder: Path  # of bench.json and bench.png
    stdout: str
    stderr: str
    left: list[psutil.Process]  # processes that ran on after the end


@pytest.fixture(scope="module")
def run(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, mark = tmp_path_factory.mktemp("bench"), uuid.uuid4().hex
    outputs = ["--json", str(folder / "bench.json"), "--png", str(folder / "bench.png")]
    done = subprocess.run(
        [*COMMAND, str(tiny_classifier), "--quick", *outputs],
        env=env(mark),
        capture_output=True,
        text=True,
        check=False,
    )
    left = list(marked(mark))
    assert done.returncode == 0, done.stderr
    return Run(folder, done.stdout, done.stderr, left)


@pytest.fixture(scope="module")
def report(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((run.folder / "bench.json").read_bytes())
    return found


class TestTheCommand:
    def test_figures_are_there_and_plausible(self, report: dict[str, Any]) -> None:
        assert 0 < report["end_to_end_ratio"] <= 1.5
        assert 0 < report["plan_efficiency"] <= 1
        assert 0 < report["token_efficiency"] <= 1
        assert report["fifo_speedup"] > 0
        assert report["null_requests_per_s"] > 0
        assert report["idle_overhead_p50_ms"] > 0
        assert report["engine_busy_share"] > 0
        assert 0 < report["engine_cpu_share"] <= 1.1
        assert 0 < report["planner_us_per_item"] < 10_000

    def test_every_stage_has_its_cpu_time(self, report: dict[str, Any]) -> None:
        for cpu in (report["cpu_us_per_request"], report["null"]["cpu_us_per_request"]):
            assert set(cpu) == {*STAGES, "worker_other", "redis", "producer"}
            assert all(cpu[stage] > 0 for stage in (*STAGES, "producer"))

    def test_the_lost_time_adds_up(self, report: dict[str, Any]) -> None:
        throughput = report["throughput"]
        alone = 1e6 / throughput["rounds"]["engine"][0]
        assert sum(lost_time(report).values()) == pytest.approx(throughput["wall_us_per_request"] - alone)

    def test_each_load_has_its_latencies(self, report: dict[str, Any]) -> None:
        assert [load["load"] for load in report["open_loop"]] == list(LOADS)
        for load in report["open_loop"]:
            assert 0 < load["latency"]["p50"] <= load["latency"]["p95"] <= load["latency"]["p99"]
            assert load["requests"] > 0
            assert load["mean_batch"] >= 1

    def test_no_request_of_a_burst_is_missing(self, report: dict[str, Any]) -> None:
        assert len(report["bursts"]) == 2
        for found in report["bursts"].values():
            for sizes in (found["batch_sizes"], found["window_sizes"]):
                assert sum(int(size) * count for size, count in sizes.items()) == found["bursts"] * 64
            assert sum(found["window_sizes"].values()) <= sum(found["batch_sizes"].values())

    def test_it_says_what_it_ran_on(self, report: dict[str, Any]) -> None:
        about = report["ran_on"]
        assert about["engine"] == "openvino"
        assert about["precision"] in {"fp32", "bf16"}
        assert about["worker_core"] in os.sched_getaffinity(0)
        assert about["costs"] == "formula"
        assert about["texts"]["count"] == COUNT
        assert about["texts"]["mean_tokens"] <= about["texts"]["max_tokens"]
        assert all(about[name] for name in ("cpu", "model", "engine_version", "redis", "date", "shapes"))

    def test_the_environment_of_other_workers_is_left_out(self, report: dict[str, Any]) -> None:
        assert report["throughput"]["requests_per_batch"] > 1

    def test_the_terminal_shows_targets_and_the_rest(self, run: Run, report: dict[str, Any]) -> None:
        shown = " ".join(run.stdout.split())
        for target in TARGETS:
            assert target.figure in shown
            missed = not target.met(report[target.key])
            assert (f"{target.figure}: {explain(report, target.key)}" in shown) is missed
        assert "round 1 of 1" in run.stderr

    def test_a_picture_is_drawn(self, run: Run) -> None:
        assert (run.folder / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_nothing_is_left_running(self, run: Run) -> None:
        assert not run.left


def test_ctrl_c_ends_all_that_was_started(tiny_classifier: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [*COMMAND, str(tiny_classifier), "--quick", "--json", str(tmp_path / "bench.json")]
    process = subprocess.Popen(command, env=env(mark), stderr=subprocess.DEVNULL)
    wait_until(lambda: any("serve" in worker.cmdline() for worker in marked(mark)))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == ExitCode.INTERRUPTED
    wait_until(lambda: not list(marked(mark)))
    assert not (tmp_path / "bench.json").exists()


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "gristmill.json" in done.stderr


class TestPercentiles:
    def test_of_one_value(self) -> None:
        found = percentiles([3.0])
        assert (found.p50, found.p95, found.p99) == (3.0, 3.0, 3.0)

    def test_are_interpolated(self) -> None:
        values = list(map(float, range(101)))
        random.Random(1).shuffle(values)
        found = percentiles(values)
        assert (found.p50, found.p95, found.p99) == pytest.approx((50.0, 95.0, 99.0))
        assert percentiles([1.0, 2.0]).p50 == 1.5


class TestFifo:
    @given(st.lists(st.integers(1, 61), min_size=1, max_size=200))
    def test_batches_hold_every_text_once_in_order(self, lengths: list[int]) -> None:
        batches = fifo_batches(lengths, 61)
        assert [item for batch in batches for item in batch.items] == list(range(len(lengths)))
        assert all(len(batch.items) == FIFO_BATCH for batch in batches[:-1])

    @given(st.lists(st.integers(1, 61), min_size=1, max_size=200))
    def test_batches_are_padded_to_the_longest(self, lengths: list[int]) -> None:
        for batch in fifo_batches(lengths, 61):
            rows, sequence = batch.shape
            longest = max(lengths[item] for item in batch.items)
            assert rows == len(batch.items)
            assert longest <= sequence < longest + FIFO_MULTIPLE
            assert sequence % FIFO_MULTIPLE == 0 or sequence == 61


class TestPoisson:
    def test_arrivals_ascend_and_repeat_with_the_seed(self) -> None:
        found = poisson_schedule(100, 5, seed=3)
        assert found == sorted(found)
        assert all(0 < at < 5 for at in found)
        assert found == poisson_schedule(100, 5, seed=3)
        assert found != poisson_schedule(100, 5, seed=4)

    def test_gaps_are_exponential(self) -> None:
        found = poisson_schedule(100, 500, seed=5)
        gaps = [after - before for before, after in pairwise(found)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(0.01, rel=0.02)
        assert deviation == pytest.approx(mean, rel=0.05)


class TestBusyShare:
    def test_is_the_engine_s_part_of_the_middle(self) -> None:
        # A slow start and a slow end around batches of 0.08 s, one every 0.1 s.
        batches = [(0.0, 0.01), *((1 + i / 10, 0.08) for i in range(8)), (9.0, 0.01)]
        assert Flow(batches=[batches, batches]).busy_share() == pytest.approx(0.8)

    def test_of_too_few_batches_is_an_error(self) -> None:
        with pytest.raises(BenchError, match="--count"):
            Flow(batches=[[(0.0, 1.0)]]).busy_share()


def test_a_cpu_is_busy_with_all_but_idle_and_waiting() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    stat = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu1 1 1 1 1 1 1 1 1 1 1\ncpu10 1 2 4 100 200 8 16 32 7 0\nintr 5\n"
    assert busy_s(stat, 10) == pytest.approx(63 * tick)
    with pytest.raises(BenchError, match="CPU 2"):
        busy_s(stat, 2)


def test_bursts_are_counted_by_batch_and_by_window() -> None:
    def results(worker: str, encode: float, size: int) -> list[Result]:
        timing = {"encode": encode, "run": 1.0}
        return [Result("x", "ok", worker=worker, timing_ms=timing, batch={"size": size}) for _ in range(size)]

    first = [*results("a", 0.5, 4), *results("a", 0.5, 2), *results("b", 0.5, 2)]
    found = count_sizes([first, results("a", 0.7, 4)])
    assert found.bursts == 2
    assert found.batch_sizes == {2: 2, 4: 2}
    assert found.window_sizes == {2: 1, 4: 1, 6: 1}


@contextmanager
def dying(rig: Rig, model: Path) -> Iterator[Worker]:
    """A worker that answers nothing, is killed after half a second, and left within a few more."""
    with rig.worker("dies", min(os.sched_getaffinity(0)), model=model, engine="null") as worker:
        with Redis.from_url(rig.redis.url) as redis:
            redis.xadd(keys.requests("dies"), {"body": "{}"})  # the worker logs that it has no ID
            wait_until(lambda: redis.exists(keys.dead("dies")))
        pid = int(rig.client.workers("dies")[0]["pid"])
        os.kill(pid, signal.SIGSTOP)
        Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        started = time.monotonic()
        try:
            yield worker
        finally:
            assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("how", ["streamed", "asked"])
def test_a_worker_that_dies_ends_the_run_with_the_end_of_its_log(tiny_classifier: Path, how: str) -> None:
    def run() -> None:
        with Rig() as rig, dying(rig, tiny_classifier) as worker:
            if how == "streamed":
                score_all(rig, worker, ["the mill"] * 10, Flow(), options={}, window=10)
            else:
                wait_for(rig.client, rig.client.submit("dies", "the mill"), worker)

    with pytest.raises(BenchError, match="exit code") as caught:
        run()
    assert "entry_dead_lettered" in caught.value.__notes__[-1]


def test_threads_that_would_share_a_cpu_are_refused(tiny_classifier: Path) -> None:
    with pytest.raises(InputFileError, match="--threads 2"):
        CliRunner().invoke(bench, [str(tiny_classifier), "--threads", "2"], catch_exceptions=False)


def test_a_failed_request_ends_the_run() -> None:
    with pytest.raises(BenchError, match="engine_error"):
        check(Result("x", "error", error=("engine_error", "it broke")))


class TestTexts:
    def test_every_second_text_is_measured_and_repeated(self) -> None:
        measured, sample = split(["a", "b", "c", "d"], 5)
        assert measured == ["a", "c", "a", "c", "a"]
        assert sample == ["b", "d"]
        assert split(["a"], 2) == (["a", "a"], ["a"])

    def test_come_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "texts.csv"
        path.write_text("id,text\n1,the mill\n2, \n3,the wheel\n")
        assert read_texts(path, "text") == ["the mill", "the wheel"]
        with pytest.raises(InputFileError, match="body"):
            read_texts(path, "body")

    def test_are_documentation_without_a_file(self) -> None:
        assert len(read_texts(None, None)) > 500


class TestCores:
    def test_are_two_where_there_are_two(self) -> None:
        usable = os.sched_getaffinity(0)
        core, other = choose_cores(None, None)
        assert core in usable
        assert (core != other) is (len(usable) > 1)
        assert choose_cores(other, core) == (other, core)

    def test_have_to_be_usable(self) -> None:
        with pytest.raises(InputFileError, match="4095"):
            choose_cores(4095, None)


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_what_cannot_work_is_said_before_measuring(
    command: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    for wrong, code, message in (
        (("--json", str(tmp_path / "none" / "a.json")), ExitCode.BAD_INPUT, "cannot be written"),
        (("--png", str(tmp_path / "none" / "a.png")), ExitCode.BAD_INPUT, "cannot be written"),
        (("--engine", "abacus"), ExitCode.BAD_INPUT, "engine 'abacus' is unknown"),
        (("--seconds" if command == "tune" else "--seconds-per-load", "inf"), ExitCode.USAGE, "finite"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "gristmill_worker", command, str(tiny_classifier), *wrong],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
