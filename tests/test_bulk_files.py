"""Where inputs come from and outputs go: globs, pipes, compressed files, URLs; and shares of a queue."""

from __future__ import annotations

import gzip
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from bulk_chaos import endure
from bulk_rows import Cut, cut_at, write_input
from conftest import Workers
from gristmill import Client
from gristmill.bulk import Job, Summary, score_file
from gristmill.bulk.files import ByteStream, find_inputs
from gristmill.bulk.kinds import Kind, kind_of
from gristmill.bulk.pace import LEAST_PER_WORKER, MOST_BYTES, Pace
from gristmill.bulk.readers import lines
from gristmill.core import MAX_WINDOW
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import ExitCode, InputFileError


@pytest.fixture(scope="module")
def private(tiny_classifier: Path) -> Iterator[PrivateRedis]:
    """A server with one worker on the queue "labels" that computes nothing."""
    with PrivateRedis() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_ENGINE", "null")
        with PrivateWorkers(tiny_classifier, "labels", redis, threads=1):
            yield redis


@pytest.fixture
def scorer(private: PrivateRedis) -> Iterator[Client]:
    with Client(private.url) as client:
        yield client


def score(client: Client, source: Any, out: str | Path, **keywords: Any) -> Summary:
    return score_file(client, Job(source, out, "labels", "text", **keywords))


class TestLines:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
    def test_are_the_same_however_the_bytes_are_cut(self, size: int) -> None:
        data = b"one\r\ntwo\rthree\n\r\n\r\rfour\n\nfive"
        chunks = [data[i : i + size] for i in range(0, len(data), size)]
        assert list(lines("x", chunks, any_ending=True)) == data.splitlines(keepends=True)
        assert list(lines("x", chunks, any_ending=False)) == data.replace(b"\n", b"\n|").split(b"|")

    def test_a_line_without_an_end_is_not_held_for_ever(self) -> None:
        taken = []

        def chunks() -> Iterator[bytes]:
            for i in range(1000):
                taken.append(i)
                yield bytes(1024 * 1024)

        with pytest.raises(InputFileError, match="line 1 is longer than 64 MiB"):
            list(lines("x", chunks(), any_ending=False))
        assert len(taken) == 64


class TestCompressed:
    DATA = b"".join(b"%d,text\n" % i for i in range(50_000))

    def packed(self, name: str) -> bytes:
        """Return two members, as of two files that were joined."""
        half = len(self.DATA) // 2
        pack = (
            gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress
        )
        return pack(self.DATA[:half]) + pack(self.DATA[half:])

    @pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst", "a.csv"])
    def test_is_read_from_any_offset(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(self.DATA if name == "a.csv" else self.packed(name))
        for offset in (0, 1, 299_999, len(self.DATA) - 1, len(self.DATA)):
            with ByteStream(find_inputs([str(path)], None)[0], offset) as stream:
                assert b"".join(stream) == self.DATA[offset:]
                assert stream.taken == path.stat().st_size

    def read(self, path: Path) -> bytes:
        with ByteStream(find_inputs([str(path)], None)[0]) as stream:
            return b"".join(stream)

    @pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst"])
    def test_what_is_cut_off_or_damaged_is_said_to_be(
        self, scorer: Client, tmp_path: Path, name: str
    ) -> None:
        data = self.packed(name)
        path = tmp_path / name
        path.write_bytes(data[:-5])
        with pytest.raises(InputFileError, match=r"is damaged: it ends in the middle"):
            self.read(path)
        path.write_bytes(data[:1000] + bytes(100) + data[1100:])
        with pytest.raises(InputFileError, match="is damaged"):
            self.read(path)
        path.write_bytes(b"not packed at all")
        with pytest.raises(InputFileError, match="is damaged"):
            score(scorer, path, tmp_path / "out.csv")
        assert not list(tmp_path.glob("out*"))


class TestInputs:
    def test_globs_are_expanded_in_order_and_several_may_be_given(self, tmp_path: Path) -> None:
        for name in ("b.csv", "a.csv", "sub/c.csv", "d.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("text\n")
        found = find_inputs([f"{tmp_path}/**/*.csv", f"{tmp_path}/d.jsonl"], None)
        assert [one.name.removeprefix(f"{tmp_path}/") for one in found] == [
            "a.csv",
            "b.csv",
            "sub/c.csv",
            "d.jsonl",
        ]
        with pytest.raises(InputFileError, match="no file fits"):
            find_inputs([f"{tmp_path}/*.parquet"], None)
        with pytest.raises(InputFileError, match="named twice"):
            find_inputs([f"{tmp_path}/*.csv", f"{tmp_path}/a.csv"], None)
        with pytest.raises(InputFileError, match="cannot be one of several"):
            find_inputs(["-", f"{tmp_path}/a.csv"], Kind(kind_of("a.csv").format))

    def test_a_name_with_a_star_in_it_is_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "a[1].csv").write_text("text\n")
        assert [one.name for one in find_inputs([f"{tmp_path}/a[1].csv"], None)] == [f"{tmp_path}/a[1].csv"]

    def test_files_with_other_columns_are_refused_before_the_work_begins(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        (tmp_path / "a.csv").write_text("id,text\n1,one\n")
        (tmp_path / "b.csv").write_text("text,id\ntwo,2\n")
        (tmp_path / "c.csv").write_text("text\nthree\n")
        both = [tmp_path / "a.csv", tmp_path / "b.csv"]
        score(scorer, both, tmp_path / "out.csv", columns=("id", "text"))
        assert [line[:5] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]] == [
            "1,one",
            "2,two",
        ]
        with pytest.raises(
            InputFileError, match=r"c.csv has other columns than .*a.csv: they differ in 'id'"
        ):
            score(scorer, [*both, tmp_path / "c.csv"], tmp_path / "more.csv")
        score(scorer, [*both, tmp_path / "c.csv"], tmp_path / "more.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "more.jsonl").read_text().splitlines()]
        assert [row.get("id") for row in rows] == ["1", "2", None]

    def test_chosen_columns_and_results_are_all_that_is_written(self, scorer: Client, tmp_path: Path) -> None:
        source = tmp_path / "in.jsonl"
        source.write_text('{"a": 1, "text": "x", "b": [2]}\n{"text": "y", "b": 3}\n')
        results = ("tokens", "label", "truncated")
        score(scorer, source, tmp_path / "out.jsonl", columns=("b", "a"), results=results, prefix="")
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        more = {"tokens": 3, "label": "flour", "truncated": False}
        assert rows == [{"b": [2], "a": 1} | more, {"b": 3} | more]
        assert list(rows[0]) == ["b", "a", "tokens", "label", "truncated"]
        with pytest.raises(InputFileError, match=r"has no result 'embedding'; there are: label, score"):
            score(scorer, source, tmp_path / "no.jsonl", results=("embedding",))


class TestPipes:
    def run(self, url: str, *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "gristmill.cli", "score", *map(str, arguments)]
        command += ["--text-column", "text", "--queue", "labels", "--redis", url]
        return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=120)

    def test_a_pipe_in_and_out_has_the_bytes_of_the_files(
        self, private: PrivateRedis, scorer: Client, tmp_path: Path
    ) -> None:
        source = write_input(tmp_path / "in.csv", rows=1000)
        score(scorer, source, tmp_path / "out.csv")
        done = self.run(private.url, "-", "--out", "-", "--format", "csv", stdin=source.read_bytes())
        assert done.returncode == ExitCode.ROWS_FAILED
        assert done.stdout == (tmp_path / "out.csv").read_bytes()
        assert b"output    -" in done.stderr
        packed = self.run(private.url, source, "--out", "-", "--format", "csv.gz", "--quiet")
        assert gzip.decompress(packed.stdout) == done.stdout
        assert packed.stderr == b""

    def test_a_name_that_tells_nothing_needs_a_format(self, private: PrivateRedis, tmp_path: Path) -> None:
        source, out = tmp_path / "texts", tmp_path / "scored"
        source.write_text("id\ttext\n1\tthe mill\n")
        done = self.run(private.url, source, "--out", out)
        assert done.returncode == ExitCode.BAD_INPUT
        assert b"has to end in one of .csv, .tsv, .jsonl, .parquet" in done.stderr
        assert self.run(private.url, source, "--out", out, "--format", "xls").returncode == ExitCode.USAGE
        kinds = ["--in-format", "tsv", "--format", "jsonl"]
        unknown = self.run(private.url, source, "--out", out, *kinds, "--columns", "name")
        assert unknown.returncode == ExitCode.BAD_INPUT
        assert b"has no column 'name'; its columns are: 'id', 'text'" in unknown.stderr
        done = self.run(private.url, source, "--out", out, *kinds, "--columns", "id", "--results", "label")
        assert done.returncode == ExitCode.OK, done.stderr
        assert json.loads(out.read_text()) == {"id": "1", "gm_label": "flour"}

    def test_what_a_pipe_lacks_is_said(self) -> None:
        done = self.run("redis://127.0.0.1:1", "-", "--out", "-", "--parts")
        assert done.returncode == ExitCode.USAGE
        done = self.run("redis://127.0.0.1:1", "-", "--out", "-")
        assert done.returncode == ExitCode.BAD_INPUT
        assert b"standard input has no name that tells its format" in done.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A real web server of a folder, and the folder."""
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()
        thread.join()


class TestUrls:
    @pytest.mark.parametrize("name", ["in.csv", "in.csv.gz"])
    def test_a_file_on_a_web_server_is_scored_and_gone_on_with(
        self, scorer: Client, web: tuple[str, Path], tmp_path: Path, name: str
    ) -> None:
        url, folder = web
        source = write_input(tmp_path / "in.csv", rows=2000)
        data = source.read_bytes()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        score(scorer, source, tmp_path / "local.csv")
        with pytest.raises(Cut):
            score_file(scorer, Job(f"{url}/{name}", tmp_path / "out.csv", "labels", "text"), cut_at(700))
        assert score(scorer, f"{url}/{name}", tmp_path / "out.csv").resumed == 700
        assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "local.csv").read_bytes()

    def test_what_is_not_there_is_said_not_to_be(
        self, scorer: Client, web: tuple[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(InputFileError, match=r"none.csv cannot be used"):
            score(scorer, f"{web[0]}/none.csv", tmp_path / "out.csv")
        with pytest.raises(InputFileError, match=r"nope://x.csv cannot be used"):
            score(scorer, "nope://x.csv", tmp_path / "out.csv")

    def test_an_output_at_a_url_is_written_at_the_end(
        self, scorer: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = fsspec.filesystem("memory")
        store.pipe("/bulk/in-0.jsonl", b'{"text": "one"}\n' * 300)
        store.pipe("/bulk/in-1.jsonl", b'{"text": "two"}\n' * 300)
        job = Job("memory://bulk/in-*.jsonl", "memory://bulk/out.jsonl.gz", "labels", "text")
        with pytest.raises(Cut):
            score_file(scorer, job, cut_at(400))
        assert not store.exists("/bulk/out.jsonl.gz")
        assert (tmp_path / "out.jsonl.gz.parts").exists()
        assert score_file(scorer, job).resumed == 400
        lines = gzip.decompress(store.cat("/bulk/out.jsonl.gz")).splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert texts == ["one"] * 300 + ["two"] * 300
        assert not list(tmp_path.iterdir())
        with pytest.raises(InputFileError, match="exists already"):
            score_file(scorer, job)
        store.rm("/bulk", recursive=True)


class TestPace:
    def workers(self, **requests: int) -> list[dict[str, str]]:
        return [{"name": name, "started_ms": "1", "requests": str(count)} for name, count in requests.items()]

    def test_follows_what_the_workers_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        seen = self.workers(a=1000)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        pace = Pace(lambda: seen)
        pace.update()
        assert pace.window() == LEAST_PER_WORKER
        seen, now = self.workers(a=9000, b=500), 104.0  # b is new: what it did before does not count
        pace.update()
        assert pace.window() == 4000
        seen, now = [{**seen[0], "requests": "10", "started_ms": "2"}, seen[1]], 108.0  # a was started again
        pace.update()
        assert pace.window() == 2000
        seen, now = self.workers(b=900_000), 112.0
        pace.update()
        assert pace.window() == MAX_WINDOW

    def test_is_what_the_user_chose(self) -> None:
        assert Pace(list, fixed=7).window() == 7

    def test_few_long_rows_are_enough(self) -> None:
        pace = Pace(list)
        for _ in range(3):
            assert pace.window() > 0
            pace.took(MOST_BYTES // 2)
        assert pace.window() == 0
        pace.gave(MOST_BYTES // 2)
        assert pace.window() == 0  # until half of it is free
        pace.gave(MOST_BYTES // 2)
        assert pace.window() > 0


def test_two_producers_get_about_the_same_of_a_queue(
    workers: Workers, tiny_classifier: Path, redis_url: str, tmp_path: Path
) -> None:
    """The second one comes when the first has settled."""
    workers.start(tiny_classifier, "--engine", "null")
    rows = 40_000
    source = tmp_path / "in.csv"
    source.write_text("text\n" + "the mill grinds\n" * rows)
    done = [0, 0]
    stopped = threading.Event()

    def run(number: int) -> None:
        def on_progress(summary: Summary) -> None:
            done[number] = summary.rows

        job = Job(source, tmp_path / f"out-{number}.csv", workers.queue, "text")
        with Client(redis_url) as client, suppress(KeyboardInterrupt):
            score_file(client, job, on_progress, stop=stopped.is_set)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    threads[0].start()
    while done[0] < rows // 4:
        time.sleep(0.01)
    threads[1].start()
    while done[1] < rows // 8 and done[0] < rows:  # it has found out how fast the workers are
        time.sleep(0.01)
    since = list(done)
    while max(done) < rows:
        time.sleep(0.01)
    ratio = (done[1] - since[1]) / (done[0] - since[0])
    stopped.set()
    for thread in threads:
        thread.join()
    assert 0.5 < ratio < 2.0


def test_kills_of_all_kinds_leave_no_trace(tiny_classifier: Path, tmp_path: Path) -> None:
    kills = ["producer", "worker", "redis", "producer"]
    made = endure(tmp_path, tiny_classifier, rows=12_000, kills=kills, seed=3)
    assert made["producer"] == 2
    assert made["worker"] == made["redis"] == 1
