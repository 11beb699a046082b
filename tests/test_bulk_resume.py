"""A run that was cut short goes on, and its output is what an unbroken run writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bulk_rows import Cut, cut_at, write_input
from conftest import Server, Workers, wait_until
from gristmill import Client
from gristmill.bulk import Job, Summary, checkpoint, score_file
from gristmill.bulk.checkpoint import Store
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import BrokerUnavailable, InputFileError, TooManyErrors


@pytest.fixture(scope="module")
def scorer(tiny_classifier: Path) -> Iterator[Client]:
    """A client of a server with one worker on the queue "labels" that answers the same bytes each time."""
    with (
        PrivateRedis() as redis,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("GRISTMILL_ENGINE", "null")
        with PrivateWorkers(tiny_classifier, "labels", redis, threads=1), Client(redis.url) as client:
            yield client


def files(folder: Path, name: str) -> dict[str, bytes]:
    found = [folder / name, folder / f"{name}.rejects.jsonl"]
    return {path.name: path.read_bytes() for path in found if path.exists()}


class TestResume:
    @pytest.mark.parametrize("name", ["csv", "jsonl", "csv.gz", "jsonl.gz", "tsv.zst"])
    def test_a_run_that_was_cut_anywhere_writes_what_an_unbroken_one_does(
        self, scorer: Client, tmp_path: Path, name: str
    ) -> None:
        source = write_input(tmp_path / f"in.{'jsonl' if 'jsonl' in name else 'csv'}")
        (tmp_path / "unbroken").mkdir()
        (tmp_path / "cut").mkdir()
        keywords: dict[str, Any] = {"queue": "labels", "text_column": "text", "part_rows": 700}
        summary = score_file(scorer, Job(source, tmp_path / "unbroken" / f"out.{name}", **keywords))
        assert summary.failed > 100
        job = Job(source, tmp_path / "cut" / f"out.{name}", **keywords)
        places = [1, 300, 699, 700, 701, 1400, 2250, summary.rows]
        for rows in places:
            with pytest.raises(Cut) as caught:
                score_file(scorer, job, cut_at(rows))
            assert caught.value.__notes__ == [f"{rows:,} scored rows are kept in {job.out}.parts"]
        resumed = score_file(scorer, job)
        assert resumed.resumed == summary.rows
        assert (resumed.rows, resumed.errors, resumed.tokens) == (
            summary.rows,
            summary.errors,
            summary.tokens,
        )
        assert files(tmp_path / "cut", f"out.{name}") == files(tmp_path / "unbroken", f"out.{name}")
        assert not Path(f"{job.out}.parts").exists()

    @pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
    def test_each_moment_of_a_crash_in_writing_is_gone_on_from(
        self, scorer: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """The run is ended before each of its renames, one after the other, until it has made all of them."""
        source = write_input(tmp_path / "in.csv", rows=500)
        keywords: dict[str, Any] = {"queue": "labels", "text_column": "text", "part_rows": 100}
        (tmp_path / "unbroken").mkdir()
        score_file(scorer, Job(source, tmp_path / "unbroken" / name, **keywords))
        rename = Path.replace
        left = 0

        def fail(self: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise Cut
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", fail)
        crashes = 0
        while True:
            left = crashes % 3 + 1  # each try gets one to three renames further
            try:
                score_file(scorer, Job(source, tmp_path / name, **keywords))
            except Cut:
                crashes += 1
                assert crashes < 100
            else:
                break
        assert crashes > 5
        assert files(tmp_path, name) == files(tmp_path / "unbroken", name)

    def test_several_files_are_one_run(self, scorer: Client, tmp_path: Path) -> None:
        for number in range(3):
            write_input(tmp_path / f"in-{number}.csv", number, 400)
        job = Job(str(tmp_path / "in-*.csv"), tmp_path / "out.csv", "labels", "text")
        with pytest.raises(Cut):
            score_file(scorer, job, cut_at(550))
        score_file(scorer, job)
        cut = files(tmp_path, "out.csv")
        rejects = [json.loads(line) for line in cut["out.csv.rejects.jsonl"].splitlines()]
        assert {reject["file"] for reject in rejects} == {str(tmp_path / f"in-{i}.csv") for i in range(3)}
        score_file(
            scorer, Job(str(tmp_path / "in-*.csv"), tmp_path / "out.csv", "labels", "text", force=True)
        )
        assert files(tmp_path, "out.csv") == cut

    def test_a_folder_of_parts_is_gone_on_with_too(self, scorer: Client, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=500)
        job = Job(source, tmp_path / "out.csv.gz", "labels", "text", parts=True, part_rows=150)
        with pytest.raises(Cut):
            score_file(scorer, job, cut_at(310))
        summary = score_file(scorer, job)
        parts = sorted(path.name for path in (tmp_path / "out.csv.gz").iterdir())
        assert parts == [f"part-{number:06d}.csv.gz" for number in range((summary.rows + 149) // 150)]
        again = Job(str(tmp_path / "out.csv.gz" / "*"), tmp_path / "again.csv", "labels", "text", prefix="x_")
        assert score_file(scorer, again).rows == summary.rows

    def test_another_input_or_other_options_are_refused(self, scorer: Client, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=300)
        out = tmp_path / "out.csv"
        with pytest.raises(Cut):
            score_file(scorer, Job(source, out, "labels", "text"), cut_at(200))
        with pytest.raises(InputFileError, match=r"top_k was 1, now it is 2.*--force"):
            score_file(scorer, Job(source, out, "labels", "text", top_k=2))
        with pytest.raises(InputFileError, match="its inputs were"):
            score_file(scorer, Job(write_input(tmp_path / "b.csv", rows=10), out, "labels", "text"))
        with source.open("ab") as file:
            file.write(b"one,more\n")
        with pytest.raises(InputFileError, match=r"the input .*in.csv has changed since.*--force"):
            score_file(scorer, Job(source, out, "labels", "text"))
        summary = score_file(scorer, Job(source, out, "labels", "text", force=True))
        assert summary.resumed == 0
        assert not (tmp_path / "out.csv.parts").exists()

    def test_what_shapes_no_row_may_change(self, scorer: Client, tmp_path: Path) -> None:
        job = Job(write_input(tmp_path / "in.csv"), tmp_path / "out.csv", "labels", "text", max_errors=20)
        with pytest.raises(TooManyErrors, match=r"21 rows failed, more than --max-errors 20"):
            score_file(scorer, job)
        assert not (tmp_path / "out.csv").exists()
        more = Job(job.source, job.out, "labels", "text", max_errors=2000, window=77, priority="low")
        summary = score_file(scorer, more)
        assert summary.resumed > 0
        assert summary.failed > 21

    def test_a_consent_to_replace_holds_for_the_whole_run(self, scorer: Client, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=300)
        (tmp_path / "out.csv").write_text("old")
        with pytest.raises(InputFileError, match="exists already"):
            score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text"))
        with pytest.raises(Cut):
            score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text", force=True), cut_at(200))
        assert (tmp_path / "out.csv").read_text() == "old"
        score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text"))
        assert (tmp_path / "out.csv").read_bytes().startswith(b"id,text,gm_label")

    def test_a_folder_that_is_no_run_s_or_damaged_is_refused(self, scorer: Client, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=300)
        folder = tmp_path / "out.csv.parts"
        folder.mkdir()
        (folder / "mine.txt").write_text("keep me")
        job = Job(source, tmp_path / "out.csv", "labels", "text", force=True)
        with pytest.raises(InputFileError, match=r"not of a run \(mine.txt\)"):
            score_file(scorer, job)
        assert (folder / "mine.txt").read_text() == "keep me"
        (folder / "mine.txt").unlink()
        with pytest.raises(Cut):
            score_file(scorer, job, cut_at(200))
        (folder / "rows" / "part-000000.csv.open").write_bytes(b"")
        with pytest.raises(InputFileError, match=r"the checkpoint counts .* it was damaged"):
            score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text"))
        (folder / "checkpoint.json").write_bytes(b"{")
        with pytest.raises(InputFileError, match=r"checkpoint.json cannot be read.*--force"):
            score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text"))

    def test_two_runs_cannot_write_the_same_output(self, tmp_path: Path) -> None:
        with (
            Store(tmp_path / "out.parts", {}, force=False, resumable=True),
            pytest.raises(InputFileError, match="another run is writing"),
        ):
            Store(tmp_path / "out.parts", {}, force=True, resumable=True)
        assert not (tmp_path / "out.parts").exists()

    def test_a_stop_finishes_what_is_in_flight(self, scorer: Client, tmp_path: Path) -> None:
        job = Job(write_input(tmp_path / "in.csv"), tmp_path / "out.csv", "labels", "text", window=64)
        stopping = False

        def on_progress(summary: Summary) -> None:
            nonlocal stopping
            stopping = stopping or summary.rows >= 500

        with pytest.raises(KeyboardInterrupt):
            score_file(scorer, job, on_progress, stop=lambda: stopping)
        rows = checkpoint.read_state(tmp_path / "out.csv.parts").rows
        assert 500 < rows <= 600
        assert scorer.depth("labels").waiting + scorer.depth("labels").pending == 0
        assert score_file(scorer, job).resumed == rows


def test_a_checkpoint_is_made_in_between_too(
    scorer: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.bulk.outputs.SAVE_EVERY_S", 0.0)
    places = []

    def on_progress(summary: Summary) -> None:
        places.append(checkpoint.read_state(tmp_path / "out.csv.parts").rows)

    source = write_input(tmp_path / "in.csv", rows=50)
    score_file(scorer, Job(source, tmp_path / "out.csv", "labels", "text"), on_progress)
    assert all(0 <= b - a <= 1 for a, b in pairwise(places))
    assert places[-1] > 40


def test_a_run_outlives_a_redis_that_forgets_and_is_kept_by_one_that_is_gone(
    workers: Workers, own_redis: Server, tiny_classifier: Path, tmp_path: Path
) -> None:
    own_redis.stop()
    own_redis.start(appendonly="no")
    workers.start(tiny_classifier, "--engine", "null", url=own_redis.url)
    source = write_input(tmp_path / "in.csv", rows=20_000)
    restarted = False

    def restart(summary: Summary) -> None:
        nonlocal restarted
        if summary.rows > 5000 and not restarted:
            restarted = True
            own_redis.stop(9)
            own_redis.start(appendonly="no")

    def end(summary: Summary) -> None:
        if summary.rows == 10_000:
            own_redis.stop(9)

    with Client(own_redis.url) as client:
        summary = score_file(client, Job(source, tmp_path / "a.csv", workers.queue, "text"), restart)
    assert restarted
    job = Job(source, tmp_path / "b.csv", workers.queue, "text")
    with Client(own_redis.url, retry_s=1) as client, pytest.raises(BrokerUnavailable) as caught:
        score_file(client, job, end)
    assert caught.value.__notes__[0].endswith(f"scored rows are kept in {job.out}.parts")
    own_redis.start(appendonly="no")
    with Client(own_redis.url) as client:
        wait_until(lambda: client.workers(workers.queue))
        resumed = score_file(client, job)
    assert resumed.resumed >= 10_000
    assert resumed.rows == summary.rows
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_an_interruption_before_the_first_row_leaves_and_promises_nothing(
    scorer: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(write_input(tmp_path / "in.csv", rows=50), tmp_path / "out.csv", "labels", "text")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt) as caught:
        score_file(scorer, job, stop=lambda: True)
    assert caught.value.__notes__ == ["nothing was scored"]
    assert sorted(tmp_path.iterdir()) == before

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_atomically", interrupt)
    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, job)
    assert sorted(tmp_path.iterdir()) == before
