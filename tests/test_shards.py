"""Runs of RQ jobs: what plain RQ workers make of the shards is what ``gristmill score`` writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis
from rq import Queue
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from bulk_rows import Cut, write_input
from conftest import wait_until
from gristmill import Client
from gristmill.bulk import Job, score_file
from gristmill.bulk.shards.merge import merge
from gristmill.bulk.shards.plan import ShardPlan, output_id, ranges_of, split
from gristmill.bulk.shards.run import score_shard
from gristmill.bulk.shards.submit import How, submit
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import ExitCode, InputFileError

GRISTMILL = (sys.executable, "-m", "gristmill.cli")
PART_ROWS = 100
KEYWORDS: dict[str, Any] = {"queue": "labels", "text_column": "text", "part_rows": PART_ROWS}


@pytest.fixture(scope="module")
def url(tiny_classifier: Path) -> Iterator[str]:
    """A server with one worker on the queue "labels" that answers the same bytes each time."""
    with PrivateRedis() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_ENGINE", "null")
        with PrivateWorkers(tiny_classifier, "labels", redis, threads=1):
            yield redis.url


@dataclass
class Fleet:
    """Plain RQ workers of one queue, and the command that submits to it."""

    url: str
    folder: Path
    queue: str
    redis: Redis
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GRISTMILL, "bulk", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, "GRISTMILL_REDIS": self.url},
        )

    def submit(self, *words: object, shards: int = 3, ok: bool = True) -> subprocess.CompletedProcess[str]:
        options = ["--queue", "labels", "--text-column", "text", "--part-rows", PART_ROWS]
        done = self.run("submit", *words, *options, "--shards", shards, "--rq-queue", self.queue)
        assert not ok or done.returncode == 0, done.stderr
        return done

    def status(self, out: object, wait_s: float = 0) -> tuple[int, dict[str, Any]]:
        done = self.run("status", out, "--json", "--wait", wait_s)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def ended(self, out: object) -> tuple[int, dict[str, Any]]:
        """Wait until a run has ended."""
        code, found = self.status(out, wait_s=90)
        logs = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("rq-*.log"))
        assert code != ExitCode.UNFINISHED, f"{found}\n{logs}"
        return code, found

    def start(self, *flags: str, queue: str = "", module: str = "worker") -> subprocess.Popen[bytes]:
        """Start a plain ``rq worker``."""
        words = [sys.executable, "-m", "rq.cli", module, "--url", self.url, *flags]
        words += [queue or self.queue] if module == "worker" else []
        with (self.folder / f"rq-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "GRISTMILL_REDIS": self.url},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[bytes]:
        return self.start("--serializer", "rq.serializers.JSONSerializer")

    def abandon(self) -> None:
        """Let the time pass after which RQ takes the jobs of dead workers for abandoned."""
        key = f"rq:wip:{self.queue}"
        names: Any = self.redis.zrange(key, 0, -1)
        self.redis.zadd(key, dict.fromkeys(names, 1), xx=True)

    def close(self) -> None:
        for process in self.processes:
            for child in _children(process):
                child.kill()
            process.kill()
            process.wait()


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def fleet(url: str, tmp_path: Path, queue: str) -> Iterator[Fleet]:
    with Redis.from_url(url) as redis:
        made = Fleet(url, tmp_path, queue, redis)
        yield made
        made.close()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as made:
        made.resume("labels")
        yield made
        made.resume("labels")


def parts_done(out: Path) -> int:
    return len([*Path(f"{out}.shards").glob("parts-*/*")])


def pause_in_the_middle(client: Client, fleet: Fleet, out: Path, parts: int = 4) -> int:
    """Wait until some parts are done, and let nothing more be scored; returns the number of parts."""
    wait_until(lambda: parts_done(out) >= parts)
    client.pause("labels")
    return parts_done(out)


def files_of(out: Path) -> dict[str, bytes]:
    found = [out, out.with_name(out.name + ".rejects.jsonl")]
    return {path.name: path.read_bytes() for path in found if path.exists()}


def expected(client: Client, source: str | Path, out: Path, **more: Any) -> dict[str, bytes]:
    """Return the files that ``gristmill score`` writes."""
    folder = out.parent / "unbroken"
    folder.mkdir(exist_ok=True)
    score_file(client, Job(source, folder / out.name, **{**KEYWORDS, **more}))
    return files_of(folder / out.name)


class TestRuns:
    @pytest.mark.parametrize(
        ("name", "kind"), [("csv", "csv"), ("jsonl.gz", "jsonl"), ("parquet", "csv"), ("tsv.zst", "csv")]
    )
    def test_two_rq_workers_write_what_score_writes(
        self, fleet: Fleet, client: Client, tmp_path: Path, name: str, kind: str
    ) -> None:
        source, out = write_input(tmp_path / f"in.{kind}", rows=1500), tmp_path / f"out.{name}"
        fleet.worker()
        fleet.worker()
        printed = fleet.submit(source.name, "--out", out.name)
        assert printed.stdout.strip() == output_id(str(out))
        code, found = fleet.ended(out)
        assert code == ExitCode.ROWS_FAILED
        assert found["state"] == "finished"
        assert found["rows"] == found["total"] == found["result"]["rows"]
        assert files_of(out) == expected(client, source, out)
        assert not Path(f"{out}.shards").exists()
        assert len(found["shards"]) == 3
        assert fleet.status(found["id"]) == (code, found)

    def test_several_files_become_a_folder_of_parts(
        self, fleet: Fleet, client: Client, tmp_path: Path
    ) -> None:
        for number in range(3):
            write_input(tmp_path / f"in-{number}.csv", number, 240)
        out = tmp_path / "out.csv.gz"
        fleet.worker()
        fleet.submit("in-*.csv", "--out", out, "--parts", shards=4)
        fleet.ended(out)
        score_file(client, Job(str(tmp_path / "in-*.csv"), tmp_path / "whole.csv.gz", parts=True, **KEYWORDS))
        made = {path.name: path.read_bytes() for path in out.iterdir()}
        assert made == {path.name: path.read_bytes() for path in (tmp_path / "whole.csv.gz").iterdir()}
        assert len(made) > 6

    def test_an_output_at_a_url_needs_a_shared_folder(
        self, fleet: Fleet, client: Client, tmp_path: Path
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=300), tmp_path / "out.csv"
        refused = fleet.submit(source, "--out", f"file://{out}", ok=False)
        assert refused.returncode == ExitCode.USAGE
        assert "--work has to name a folder" in refused.stderr
        fleet.worker()
        fleet.submit(source, "--out", f"file://{out}", "--work", tmp_path / "work")
        code, _ = fleet.ended(f"file://{out}")
        assert code == ExitCode.ROWS_FAILED
        assert files_of(out) == expected(client, source, out)
        assert not (tmp_path / "work").exists()

    def test_an_empty_file_is_a_run_too(self, fleet: Fleet, client: Client, tmp_path: Path) -> None:
        source, out = tmp_path / "in.csv", tmp_path / "out.csv"
        source.write_text("id,text\n")
        fleet.worker()
        fleet.submit(source, "--out", out)
        assert fleet.ended(out)[0] == ExitCode.OK
        assert files_of(out) == expected(client, source, out)


class TestFaults:
    def test_a_killed_work_horse_goes_on_after_its_last_part(
        self, fleet: Fleet, client: Client, tmp_path: Path
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=3000), tmp_path / "out.csv"
        worker = fleet.worker()
        fleet.submit(source, "--out", out, "--window", 32, shards=1)
        done = pause_in_the_middle(client, fleet, out)
        times = {path: path.stat().st_mtime_ns for path in Path(f"{out}.shards").glob("parts-*/*")}
        (horse,) = _children(worker)
        horse.kill()
        wait_until(lambda: _children(worker) not in ([horse], []))  # RQ runs it again
        client.resume("labels")
        wait_until(lambda: parts_done(out) > done or out.exists())
        with_times = {path: path.stat().st_mtime_ns for path in times if path.exists()}
        assert out.exists() or with_times == times
        code, found = fleet.ended(out)
        assert (code, found["state"]) == (ExitCode.ROWS_FAILED, "finished")
        assert files_of(out) == expected(client, source, out)

    @pytest.mark.parametrize("orphan", [False, True], ids=["with its horse", "and its horse goes on"])
    def test_a_killed_rq_workers_shard_is_run_by_another(
        self, fleet: Fleet, client: Client, tmp_path: Path, *, orphan: bool
    ) -> None:
        """The horse of a killed worker goes on by itself: then two processes score the same shard."""
        source, out = write_input(tmp_path / "in.csv", rows=3000), tmp_path / "out.csv.gz"
        worker = fleet.worker()
        fleet.submit(source, "--out", out, "--window", 32, shards=1)
        pause_in_the_middle(client, fleet, out)
        (horse,) = _children(worker)
        worker.kill()
        worker.wait()
        if not orphan:
            horse.kill()
        fleet.abandon()
        fleet.worker()
        assert fleet.status(out)[0] == ExitCode.UNFINISHED  # puts the shard back
        wait_until(lambda: len([*Path(f"{out}.shards/tries").iterdir()]) == 2)
        client.resume("labels")
        code, _ = fleet.ended(out)
        assert code == ExitCode.ROWS_FAILED
        assert files_of(out) == expected(client, source, out)
        if orphan:
            horse.wait(30)

    def test_a_cancelled_run_is_gone_on_with(self, fleet: Fleet, client: Client, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=3000), tmp_path / "out.csv"
        fleet.worker()
        fleet.submit(source, "--out", out, "--window", 32, shards=2)
        done = pause_in_the_middle(client, fleet, out)
        again = fleet.submit(source, "--out", out, shards=2, ok=False)
        assert again.returncode == ExitCode.BAD_INPUT
        assert "is being scored by 2 jobs that are queued or run" in again.stderr
        stopped = fleet.run("cancel", out)
        assert "submit it again with the same arguments" in stopped.stdout
        code, found = fleet.status(out)
        assert (code, found["state"]) == (ExitCode.INTERRUPTED, "cancelled")
        assert [shard["status"] for shard in found["shards"]] == ["stopped", "canceled"]
        client.resume("labels")
        other = fleet.submit(source, "--out", out, "--top-k", 2, ok=False)
        assert other.returncode == ExitCode.BAD_INPUT
        assert "top_k was 1, now it is 2" in other.stderr
        resumed = fleet.submit(source, "--out", out, shards=4)
        before = re.search(r"([0-9,]+) were done before", resumed.stderr)
        assert before is not None
        done_before = int(before[1].replace(",", ""))
        assert done_before >= done * PART_ROWS  # a part may come after the count
        code, found = fleet.ended(out)
        assert (code, len(found["shards"]), found["done_before"]) == (3, 4, done_before)
        assert files_of(out) == expected(client, source, out)

    def test_a_run_whose_worker_does_not_hear_of_the_cancelling_ends_by_itself(
        self, fleet: Fleet, tmp_path: Path
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=6000), tmp_path / "out.csv"
        worker = fleet.worker()
        fleet.submit(source, "--out", out, "--window", 16, shards=1)
        wait_until(lambda: parts_done(out) >= 2)
        worker.send_signal(signal.SIGSTOP)
        (horse,) = _children(worker)
        fleet.run("cancel", out)
        wait_until(lambda: horse.status() == psutil.STATUS_ZOMBIE)  # its parent does not wait for it
        worker.send_signal(signal.SIGCONT)
        assert not out.exists()
        code, found = fleet.status(out)
        assert (code, found["state"]) == (ExitCode.INTERRUPTED, "cancelled")

    def test_a_shard_that_fails_for_good_is_named_and_nothing_is_merged(
        self, fleet: Fleet, client: Client, tmp_path: Path
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=1500), tmp_path / "out.csv"
        fleet.submit(source, "--out", out, "--retries", 1, shards=2)
        code, found = fleet.status(out)
        assert (code, found["state"], found["rows"]) == (ExitCode.UNFINISHED, "running", 0)
        content = source.read_bytes()
        source.write_bytes(content + b"1,more\n")
        fleet.worker()
        code, found = fleet.ended(out)
        wait_until(lambda: {one["status"] for one in fleet.status(out)[1]["shards"]} == {"failed"})
        code, found = fleet.status(out)
        assert (code, found["state"]) == (ExitCode.FAILURE, "failed")
        assert found["merge"]["status"] == "deferred"
        for shard in found["shards"]:
            assert shard["reason"].startswith(f"InputFileError: the input {source} has changed since")
        shown = fleet.run("status", out)
        assert shown.returncode == ExitCode.FAILURE
        assert f"{found['id']} failed: 0 of" in shown.stdout
        assert "has changed since" in " ".join(shown.stdout.split())
        assert not out.exists()
        forced = fleet.submit(source, "--out", out, "--force", shards=2)
        assert forced.returncode == ExitCode.OK
        assert fleet.ended(out)[0] == ExitCode.ROWS_FAILED
        assert files_of(out) == expected(client, source, out)

    def test_retries_may_wait_for_a_scheduler(self, fleet: Fleet, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=300), tmp_path / "out.csv"
        fleet.submit(source, "--out", out, "--retry-after", "3600,7200", shards=1)
        source.unlink()
        fleet.worker()
        wait_until(lambda: fleet.status(out)[1]["shards"][0]["status"] == "scheduled")
        code, found = fleet.status(out)
        assert (code, found["state"]) == (ExitCode.UNFINISHED, "running")
        fleet.run("cancel", out)
        code, found = fleet.status(out)
        assert (code, found["state"]) == (ExitCode.INTERRUPTED, "cancelled")
        assert found["shards"][0]["status"] == "canceled"

    def test_files_that_a_machine_lacks_are_named(self, fleet: Fleet, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=300), tmp_path / "out.csv"
        fleet.submit(source, "--out", out, "--retries", 0, shards=1)
        Path(f"{out}.shards").rename(tmp_path / "elsewhere")
        fleet.worker()
        _, found = fleet.ended(out)
        assert "that all machines with RQ workers share" in found["shards"][0]["reason"]

    def test_errors_of_all_shards_count(self, fleet: Fleet, client: Client, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=1500), tmp_path / "out.csv"
        fleet.worker()
        fleet.submit(source, "--out", out, "--max-errors", 150, shards=3)
        code, found = fleet.ended(out)
        assert code == ExitCode.FAILURE
        reasons = [str(one["reason"]) for one in (*found["shards"], found["merge"])]
        assert any("TooManyErrors" in reason for reason in reasons)
        assert not out.exists()
        wait_until(
            lambda: not {one["status"] for one in fleet.status(out)[1]["shards"]} & {"queued", "started"}
        )
        fleet.submit(source, "--out", out, "--max-errors", 1500, shards=3)
        assert fleet.ended(out)[0] == ExitCode.ROWS_FAILED
        assert files_of(out) == expected(client, source, out)


class TestCron:
    CONFIG = Path(__file__).parent.parent / "configs" / "rq" / "nightly.py"

    def test_rq_cron_submits_the_run_of_the_day(self, fleet: Fleet, client: Client, tmp_path: Path) -> None:
        """The configuration as it is shipped, with other paths and every two seconds instead of at night."""
        source = write_input(tmp_path / "in.csv", rows=600)
        text = self.CONFIG.read_text("utf-8")
        for was, now in {
            '"/data/incoming/{date}/*.parquet"': repr(str(source)),
            '"/data/scored/{date}.parquet"': repr(f"{tmp_path}/out-{{date}}.csv"),
            '"queue": "topics"': f'"queue": "labels", "part_rows": {PART_ROWS}, "rq_queue": {fleet.queue!r}',
            '"gristmill-cron"': repr(f"{fleet.queue}-cron"),
            'cron="30 2 * * *"': "interval=2",
        }.items():
            assert text.count(was) == 1
            text = text.replace(was, now)
        (tmp_path / "nightly.py").write_text(text)
        fleet.worker()
        fleet.start(queue=f"{fleet.queue}-cron")
        fleet.start("nightly.py", module="cron")
        wait_until(lambda: [*tmp_path.glob("out-*.csv")])
        out = min(tmp_path.glob("out-*.csv"))  # at midnight there are two
        code, _ = fleet.ended(out)
        assert code == ExitCode.ROWS_FAILED
        assert files_of(out) == expected(client, source, out)

    def test_rq_takes_the_configuration_as_it_is(self, fleet: Fleet) -> None:
        process = fleet.start(str(self.CONFIG), module="cron")
        log = fleet.folder / "rq-0.log"
        wait_until(lambda: process.poll() is not None or "registered 1 cron" in log.read_text())
        assert "with cron schedule '30 2 * * *'" in log.read_text()
        assert process.poll() is None


class TestWithoutRq:
    """The jobs' own work, at moments that a process cannot be caught at."""

    def planned(self, url: str, source: Path, out: Path, shards: int = 1, **more: Any) -> ShardPlan:
        job = Job(source, out, **{**KEYWORDS, **more})
        submit(url, job, How(shards, rq_queue="nobody-serves-this"))
        plan = ShardPlan.last(Path(f"{out}.shards"))
        assert plan is not None
        return plan

    def test_a_shard_that_runs_three_times_at_once_is_scored_once(
        self, url: str, client: Client, tmp_path: Path
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=2000), tmp_path / "out.csv"
        plan = self.planned(url, source, out)
        with pytest.raises(InputFileError, match=r"lacks the parts 0 to \d+: submit again"):
            merge(plan, lambda _: None, patience_s=0)
        parts: list[int] = []

        def score() -> None:
            with Client(url) as own:
                parts.append(score_shard(own, plan, 0, lambda _: None).rows)

        threads = [threading.Thread(target=score) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert parts == [plan.rows] * 3
        assert [*Path(f"{out}.shards/tries").iterdir()] == []
        merged = merge(plan, lambda _: None)
        assert merged["rows"] == plan.rows
        assert files_of(out) == expected(client, source, out)

    @pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "folder"])
    def test_a_merge_that_ends_at_any_rename_or_removal_goes_on(
        self, url: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=400), tmp_path / name.replace("folder", "out.csv")
        more = {"parts": name == "folder"}
        plan = self.planned(url, source, out, **more)
        score_shard(client, plan, 0, lambda _: None)
        published: list[dict[str, Any]] = []
        left = 0
        for method in ("replace", "unlink", "rename", "rmdir"):
            original = getattr(Path, method)

            def fail(self: Path, *args: Any, original: Any = original, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Cut
                return original(self, *args, **keywords)

            monkeypatch.setattr(Path, method, fail)
        crashes = 0
        while True:
            left = crashes  # each time one step further
            try:
                merge(ShardPlan.of(plan.folder, plan.run), published.append)
            except Cut:
                crashes += 1
                assert crashes < 100
            except InputFileError:
                assert published  # the plan is removed last: here the job says that it is done
                break
            else:
                break
        monkeypatch.undo()
        assert crashes > 5
        assert out.exists()
        if name == "folder":
            assert len([*out.iterdir()]) == len(plan.starts)
        else:
            assert files_of(out) == expected(client, source, out)

    def test_a_submission_that_was_cut_short_is_repeated(self, url: str, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=500), tmp_path / "out.csv"
        first = self.planned(url, source, out, shards=2)
        with Redis.from_url(url) as redis:
            RqJob.fetch(output_id(str(out)), connection=redis, serializer=JSONSerializer).delete()
        second = self.planned(url, source, out, shards=2)
        assert second.run != first.run
        with pytest.raises(InputFileError, match="of another run"):
            ShardPlan.of(first.folder, first.run)
        with Redis.from_url(url) as redis:
            queue = Queue("nobody-serves-this", connection=redis, serializer=JSONSerializer)
            ours = [name for name in queue.job_ids if name.startswith(output_id(str(out)))]
        assert ours == [f"{output_id(str(out))}-{second.run}-{number}" for number in range(2)]

    def test_a_job_of_before_has_no_part_in_a_run_that_was_started_afresh(
        self, url: str, client: Client, tmp_path: Path
    ) -> None:
        """The input changes while a job scores; RQ has forgotten the job, and the run is forced."""
        source, out = write_input(tmp_path / "in.csv", rows=1000), tmp_path / "out.csv"
        first = self.planned(url, source, out)
        plans: list[ShardPlan] = []

        def on_part() -> None:
            if not plans:
                write_input(source, seed=2, rows=1000)
                with Redis.from_url(url) as redis:
                    RqJob.fetch(output_id(str(out)), connection=redis, serializer=JSONSerializer).delete()
                plans.append(self.planned(url, source, out, force=True))

        with pytest.raises(InputFileError):
            score_shard(client, first, 0, lambda _: None, on_part)
        (second,) = plans
        assert second.missing() == [(0, len(second.starts))]
        score_shard(client, second, 0, lambda _: None)
        merge(second, lambda _: None)
        assert files_of(out) == expected(client, source, out)

    def test_a_damaged_plan_is_said_and_can_be_forced(self, url: str, tmp_path: Path) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=50), tmp_path / "out.csv"
        plan = self.planned(url, source, out)
        (path,) = plan.folder.glob("plan-*")
        path.write_bytes(b"{")
        with pytest.raises(InputFileError, match="cannot be read"):
            self.planned(url, source, out)
        with Redis.from_url(url) as redis:
            RqJob.fetch(output_id(str(out)), connection=redis, serializer=JSONSerializer).delete()
        assert self.planned(url, source, out, force=True).run != plan.run

    def test_a_folder_of_others_is_left_alone(self, url: str, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=50)
        (tmp_path / "out.csv.shards").mkdir()
        (tmp_path / "out.csv.shards" / "mine.txt").write_text("mine")
        with pytest.raises(InputFileError, match=r"not of a run \(mine.txt\): move them away"):
            self.planned(url, source, tmp_path / "out.csv")
        assert [path.name for path in (tmp_path / "out.csv.shards").iterdir()] == ["mine.txt"]

    def test_parts_are_shared_out_evenly_and_in_order(self) -> None:
        assert ranges_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
        assert split([(0, 10)], 3) == [[(0, 3)], [(3, 6)], [(6, 10)]]
        assert split([(0, 2), (5, 7)], 2) == [[(0, 2)], [(5, 7)]]
        assert split([(0, 2), (5, 6)], 2) == [[(0, 1)], [(1, 2), (5, 6)]]
        assert split([(3, 5)], 9) == [[(3, 4)], [(4, 5)]]
        assert split([], 4) == []


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "code", "said"),
        [
            (["in.csv", "--out", "-"], ExitCode.BAD_INPUT, "cannot reach '-'"),
            (["-", "--out", "o.csv", "--in-format", "csv"], ExitCode.BAD_INPUT, "cannot reach '-'"),
            (["none.csv", "--out", "o.csv"], ExitCode.BAD_INPUT, "none.csv"),
            (["in.csv", "--out", "in.csv"], ExitCode.BAD_INPUT, "is the input file"),
            (["in.csv", "--out", "none/o.csv"], ExitCode.BAD_INPUT, "does not exist"),
            (["in.csv", "--out", "o.csv", "--retry-after", "soon"], ExitCode.USAGE, "whole seconds"),
            (["in.csv", "--out", "o.csv", "--columns", "nope"], ExitCode.BAD_INPUT, "no column 'nope'"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_enqueued(
        self, fleet: Fleet, tmp_path: Path, words: list[str], code: int, said: str
    ) -> None:
        write_input(tmp_path / "in.csv", rows=10)
        done = fleet.submit(*words, ok=False)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert not [*tmp_path.glob("*.shards")]
        assert Queue(fleet.queue, connection=fleet.redis, serializer=JSONSerializer).count == 0

    def test_a_run_that_nobody_submitted_is_not_found(self, fleet: Fleet) -> None:
        for command in ("status", "cancel"):
            for name in ("out.csv", "gm-bulk-123"):
                done = fleet.run(command, name)
                assert done.returncode == ExitCode.FAILURE
                assert "RQ knows no run" in done.stderr

    def test_no_worker_of_the_queue_is_said_and_leaves_nothing(self, fleet: Fleet, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=10)
        words = ["--out", "o.csv", "--queue", "nobody", "--text-column", "text", "--shards", 1, "--wait", 0]
        done = fleet.run("submit", source, *words)
        assert done.returncode == ExitCode.NO_WORKER
        assert not [*tmp_path.glob("*.shards")]

    def test_an_rq_worker_without_the_address_of_the_queue_says_so(
        self, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, out = write_input(tmp_path / "in.csv", rows=10), tmp_path / "out.csv"
        fleet.submit(source, "--out", out, "--retries", 0)
        job = RqJob.fetch(
            fleet.status(out)[1]["shards"][0]["job"], connection=fleet.redis, serializer=JSONSerializer
        )
        monkeypatch.delenv("GRISTMILL_REDIS", raising=False)
        with pytest.raises(Exception, match="set GRISTMILL_REDIS for the RQ worker"):
            job.perform()
