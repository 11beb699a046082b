"""Files in, scored files out: what readers and writers do with real and with broken rows."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulk_rows import Cut, cut_at, write_input
from conftest import Workers
from gristmill import Client
from gristmill.bulk import Job, Summary, score_file
from gristmill.bulk.encoders import CsvEncoder, Encoder, JsonlEncoder
from gristmill.bulk.files import Input, find_inputs
from gristmill.bulk.job import check_output
from gristmill.bulk.kinds import Compression, Format, Kind, kind_of
from gristmill.bulk.readers import CsvReader, JsonlReader, first_columns
from gristmill.bulk.rows import Place, Row
from gristmill.bulk.summary import Latencies
from gristmill.bulk.text_parts import TextParts
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import InputFileError, NoWorkerError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def errors(rows: list[Row]) -> list[str | None]:
    return [None if row.error is None else row.error.message for row in rows]


def one_input(path: Path) -> Input:
    return find_inputs([str(path)], None)[0]


class TestCsvReader:
    def read(self, path: Path, content: str | bytes, delimiter: str = ",") -> list[Row]:
        with CsvReader(one_input(write(path / "in.csv", content)), delimiter=delimiter) as reader:
            return list(reader)

    def test_yields_rows_in_order_with_their_lines_and_positions(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, 'id,text\n1,one\n2,"t\nwo"\n\n3,"three, ""3"""\n')
        assert [row.values for row in rows] == [
            {"id": "1", "text": "one"},
            {"id": "2", "text": "t\nwo"},
            {"id": "3", "text": 'three, "3"'},
        ]
        assert [row.line for row in rows] == [2, 3, 6]
        assert rows[-1].end == Place(0, (tmp_path / "in.csv").stat().st_size, 6)
        assert errors(rows) == [None] * 3

    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_takes_any_line_ending_and_a_byte_order_mark(self, tmp_path: Path, ending: str) -> None:
        rows = self.read(tmp_path, "\ufeff" + ending.join(["text", "one", "zwölf 🌾"]))
        assert [row.values for row in rows] == [{"text": "one"}, {"text": "zwölf 🌾"}]

    def test_takes_other_delimiters(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, "a\tb\n1,0\t2\n", "\t")[0].values == {"a": "1,0", "b": "2"}

    def test_a_ragged_row_is_an_error_of_that_row_and_loses_nothing(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, "id,text\n1\n2,a,b,c\n3,fine\n")
        assert [row.values for row in rows] == [
            {"id": "1", "text": ""},
            {"id": "2", "text": "a,b,c"},
            {"id": "3", "text": "fine"},
        ]
        assert errors(rows) == [
            "line 2 has 1 fields, the header has 2",
            "line 3 has 4 fields, the header has 2",
            None,
        ]

    def test_bytes_that_are_not_utf8_are_an_error_of_that_row(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, b"text\nfine\ncaf\xe9\nfine too\n")
        assert errors(rows) == [None, "line 3: not valid UTF-8", None]

    def test_a_quote_that_is_never_closed_does_not_swallow_rows_silently(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, 'id,text\n1,one\n2,"two\n3,three\n')
        assert errors(rows) == [None, "line 3 is not valid CSV: unexpected end of data"]
        rows = self.read(tmp_path, 'id,text\n1,"one\n2,"two"\n3,three\n')
        assert [row.error is None for row in rows] == [False, True]

    def test_nul_bytes_and_very_long_fields_are_text(self, tmp_path: Path) -> None:
        long = "x" * 1_000_000
        rows = self.read(tmp_path, f"text\na\0b\n{long}\n")
        assert [row.values for row in rows] == [{"text": "a\0b"}, {"text": long}]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "is empty"),
            ("\n\n", "is empty"),
            ("a,b,a,b,c\n", "names a column twice: 'a', 'b'"),
            ('"a\n', "header is not valid CSV"),
            ("text\n".encode("utf-16"), "save the file as UTF-8"),
        ],
    )
    def test_refuses_a_file_without_a_usable_header(
        self, tmp_path: Path, content: str | bytes, message: str
    ) -> None:
        with pytest.raises(InputFileError, match=message):
            self.read(tmp_path, content)


class TestJsonlReader:
    def read(self, path: Path, content: str | bytes, columns: tuple[str, ...] | None = None) -> list[Row]:
        with JsonlReader(one_input(write(path / "in.jsonl", content)), columns=columns) as reader:
            return list(reader)

    def test_yields_objects_and_skips_blank_lines(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, '\ufeff{"text": "one"}\r\n\n  {"text": "two", "n": [1]}')
        assert [row.values for row in rows] == [{"text": "one"}, {"text": "two", "n": [1]}]
        assert [row.line for row in rows] == [1, 3]
        assert rows[-1].end == Place(0, (tmp_path / "in.jsonl").stat().st_size, 3)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("nonsense", "not valid JSON"),
            ('{"text": NaN}', "not valid JSON"),
            (r'{"text": "\ud83d"}', "not valid JSON"),
            ('{"text": "cut off', "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ('["text"]', "the row is a list, it has to be a JSON object"),
            ("null", "the row is null, it has to be a JSON object"),
        ],
    )
    def test_a_line_that_is_no_object_is_an_error_of_that_row(
        self, tmp_path: Path, line: str, message: str
    ) -> None:
        rows = self.read(tmp_path, f'{{"text": "one"}}\n{line}\n{{"text": "two"}}\n')
        assert [row.values for row in rows] == [{"text": "one"}, None, {"text": "two"}]
        assert (errors(rows)[1] or "").startswith(f"line 2: {message}")

    def test_bytes_that_are_not_utf8_are_an_error_of_that_row(self, tmp_path: Path) -> None:
        rows = self.read(tmp_path, b'{"id": 7, "text": "caf\xe9"}\n\xff\xfe\n')
        assert errors(rows) == ["line 1: not valid UTF-8", "line 2: not valid UTF-8"]
        assert [row.values and row.values["id"] for row in rows] == [7, None]

    def test_a_row_with_other_keys_than_the_first_has_an_error_where_columns_are_fixed(
        self, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "in.jsonl", 'broken\n{"a": 1, "b": 2}\n{"b": 3}\n{"c": 4, "a": 5}\n')
        assert first_columns(one_input(path)) == ("a", "b")
        with JsonlReader(one_input(path), columns=("a", "b")) as reader:
            rows = list(reader)
        assert [row.error is None for row in rows] == [False, True, True, False]
        assert errors(rows)[3] == "line 4: the first row does not have 'c'"


def test_the_name_tells_the_format() -> None:
    assert kind_of("a.b.CSV") == Kind(Format.CSV)
    assert kind_of("a.ndjson.GZ") == Kind(Format.JSONL, Compression.GZIP)
    assert kind_of("a.tsv.zst").delimiter == "\t"
    with pytest.raises(InputFileError, match=r"has to end in one of .csv, .tsv, .jsonl"):
        kind_of("a.xlsx")
    with pytest.raises(InputFileError, match="compresses its columns itself"):
        kind_of("a.parquet.gz")


def test_a_file_that_cannot_be_read_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        find_inputs([str(tmp_path / "none.csv")], None)
    with pytest.raises(InputFileError, match="Is a directory"):
        find_inputs([str(tmp_path)], Kind(Format.JSONL))[0].open()


class TestCheckOutput:
    def test_refuses_what_exists_unless_forced(self, tmp_path: Path) -> None:
        source, out = write(tmp_path / "in.csv", ""), write(tmp_path / "out.csv", "")
        with pytest.raises(InputFileError, match="--force"):
            check_output([str(source)], out, force=False)
        check_output([str(source)], out, force=True)
        check_output([str(source)], tmp_path / "new.csv", force=False)

    def test_never_takes_the_input_for_the_output(self, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "")
        link = tmp_path / "link.csv"
        link.symlink_to(source)
        hard = tmp_path / "hard.csv"
        os.link(source, hard)
        for out in (source, link, hard):
            with pytest.raises(InputFileError, match="is the input file"):
                check_output([str(source)], out, force=True)

    def test_refuses_folders_and_missing_folders(self, tmp_path: Path) -> None:
        with pytest.raises(InputFileError, match="is not a file"):
            check_output([str(tmp_path / "in.csv")], tmp_path, force=True)
        with pytest.raises(InputFileError, match="does not exist"):
            check_output([str(tmp_path / "in.csv")], tmp_path / "none" / "out.csv", force=True)


CSV = Kind(Format.CSV)


class TestTextParts:
    def parts(self, folder: Path, kind: Kind = CSV, encoder: Encoder | None = None) -> TextParts:
        return TextParts(folder, kind, encoder or CsvEncoder(("text",), ["gm_label", "gm_error"], ","))

    def test_a_part_has_its_name_only_when_it_is_whole(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        parts.open(0, 0)
        parts.add(Row({"text": "one"}, 2), {"gm_label": "a", "gm_error": ""})
        final = tmp_path / "part-000000.csv"
        assert not final.exists()
        parts.seal()
        parts.forget()
        assert final.read_text() == "text,gm_label,gm_error\none,a,\n"
        assert list(tmp_path.iterdir()) == [final]

    @pytest.mark.parametrize("compression", Compression)
    def test_an_open_part_is_cut_back_to_its_mark_also_when_it_was_sealed(
        self, tmp_path: Path, compression: Compression
    ) -> None:
        whole = []
        for crash in ("none", "open", "sealed"):
            folder = tmp_path / crash
            folder.mkdir()
            parts = self.parts(folder, Kind(Format.CSV, compression))
            parts.open(0, 0)
            parts.add(Row({"text": "one"}, 2), {"gm_label": "a"})
            mark = parts.save()
            parts.add(Row({"text": "two"}, 3), {"gm_label": "a"})
            if crash == "sealed":
                parts.seal()
            if crash != "none":
                parts.close()
                parts = self.parts(folder, Kind(Format.CSV, compression))
                parts.open(0, mark)
                parts.add(Row({"text": "two"}, 3), {"gm_label": "a"})
            parts.seal()
            parts.forget()
            parts.join(1, folder / "whole")
            whole.append((folder / "whole").read_bytes())
        assert whole[0] == whole[1] == whole[2]

    def test_a_damaged_part_is_said_to_be(self, tmp_path: Path) -> None:
        with pytest.raises(InputFileError, match="has 0 bytes, the checkpoint counts 100"):
            self.parts(tmp_path).open(0, 100)

    def test_a_full_disk_is_said_to_be_full(self, tmp_path: Path) -> None:
        with pytest.raises(InputFileError, match="cannot be written: File too large"):
            self.write_until_full(tmp_path)

    def write_until_full(self, folder: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        parts = self.parts(folder)
        parts.open(0, 0)
        try:
            for line in range(10_000):
                parts.add(Row({"text": "x" * 100}, line), {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, previous)
            parts.close()

    def test_csv_cells_read_back_as_they_were(self, tmp_path: Path) -> None:
        cells = ["plain", 'quo"te', "com,ma", "line\nfeed", "carriage\rreturn", " space ", "", "\0", "🌾"]
        parts = self.parts(tmp_path)
        parts.open(0, 0)
        for cell in cells:
            parts.add(Row({"text": cell}, 1), {})
        parts.seal()
        with CsvReader(one_input(tmp_path / "part-000000.csv")) as reader:
            assert [row.values and row.values["text"] for row in reader] == cells

    def test_a_json_rows_own_text_is_kept(self, tmp_path: Path) -> None:
        lines = [b'{ "b":1.10, "a" : 123456789012345678901234567890 }', b"{}", b'{"t": "caf\xe9"}']
        encoder = JsonlEncoder(None, ["gm_label", "gm_error"], "gm_line")
        with JsonlReader(one_input(write(tmp_path / "in.jsonl", b"\n".join(lines)))) as reader:
            written = [encoder.row(row, {"gm_label": "x", "gm_error": ""}) for row in reader]
        added = b'"gm_label":"x","gm_error":""}\n'
        assert written == [
            lines[0][:-2] + b"," + added,
            b"{" + added,
            lines[2][:-1] + b"," + added,
        ]


class TestLatencies:
    def test_percentiles_are_within_one_percent(self) -> None:
        latencies = Latencies()
        for ms in range(1, 10_001):
            latencies.add(ms / 10)
        assert latencies.percentile(50) == pytest.approx(500, rel=0.011)
        assert latencies.percentile(99) == pytest.approx(990, rel=0.011)

    def test_nothing_has_no_percentile_and_zero_is_a_duration(self) -> None:
        latencies = Latencies()
        assert latencies.percentile(50) is None
        latencies.add(0.0)
        assert latencies.percentile(99) == pytest.approx(0.001, rel=0.02)


@pytest.fixture(scope="module")
def private() -> Iterator[PrivateRedis]:
    with PrivateRedis() as redis:
        yield redis


@pytest.fixture(scope="module")
def scorer(private: PrivateRedis, tiny_classifier: Path, tiny_encoder: Path) -> Iterator[Client]:
    """A client of a server with one worker on the queue "labels" and one on the queue "vectors"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_PRECISION", "fp32")  # answers to a text differ by 1e-4 at the most
        with (
            PrivateWorkers(tiny_classifier, "labels", private, threads=1),
            PrivateWorkers(tiny_encoder, "vectors", private, threads=1),
            Client(private.url) as client,
        ):
            yield client


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class TestScoreFile:
    def score(
        self, client: Client, source: Path, out: Path, queue: str = "labels", **keywords: Any
    ) -> Summary:
        return score_file(client, Job(source, out, queue, **{"text_column": "text", **keywords}))

    def test_one_row_out_per_row_in_with_the_label_that_the_text_has(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        texts = [f"the mill grinds {i} sacks of corn" for i in range(500)]
        lines = "".join(f"{i},{text}\n" for i, text in enumerate(texts))
        source = write(tmp_path / "in.csv", "id,text\n" + lines)
        summary = self.score(scorer, source, tmp_path / "out.csv", window=64)
        rows = read_csv(tmp_path / "out.csv")
        assert [row["text"] for row in rows] == texts
        assert list(rows[0]) == ["id", "text", "gm_label", "gm_score", "gm_error"]
        for i in (0, 250, 499):
            best = scorer.score("labels", texts[i])[0]
            assert rows[i]["gm_label"] == best["label"]
            assert float(rows[i]["gm_score"]) == pytest.approx(best["score"], abs=1e-4)
        assert (summary.rows, summary.failed, summary.truncated) == (500, 0, 0)
        assert summary.tokens > 500
        assert summary.position == summary.size_bytes == source.stat().st_size
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]
        assert summary.latencies.percentile(50)

    def test_a_run_that_was_cut_agrees_with_an_unbroken_one(self, scorer: Client, tmp_path: Path) -> None:
        """With a real engine: the labels are the same, the scores within its tolerance."""
        source = write_input(tmp_path / "in.csv", rows=600)
        summary = self.score(scorer, source, tmp_path / "unbroken.csv", part_rows=150)
        for rows in (100, 150, 420):
            with pytest.raises(Cut):
                score_file(
                    scorer, Job(source, tmp_path / "cut.csv", "labels", "text", part_rows=150), cut_at(rows)
                )
        assert self.score(scorer, source, tmp_path / "cut.csv", part_rows=150).resumed == 420
        pairs = list(zip(read_csv(tmp_path / "unbroken.csv"), read_csv(tmp_path / "cut.csv"), strict=True))
        assert len(pairs) == summary.rows
        for unbroken, cut in pairs:
            scores = unbroken.pop("gm_score"), cut.pop("gm_score")
            assert unbroken == cut
            if all(scores):
                assert float(scores[1]) == pytest.approx(float(scores[0]), abs=1e-4)

    def test_broken_rows_keep_their_place_and_their_bytes(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", b'id,text\n1,good\n2,caf\xe9\n3\n4,""\n5,a,b\n6,"x"y\n7,good\n')
        summary = self.score(scorer, source, tmp_path / "out.csv")
        rejects = read_jsonl(tmp_path / "out.csv.rejects.jsonl")
        assert [(reject["line"], reject["code"]) for reject in rejects] == [
            (3, "bad_request"),
            (4, "bad_request"),
            (5, "empty_input"),
            (6, "bad_request"),
            (7, "bad_request"),
        ]
        assert rejects[1] == {
            "file": str(source),
            "line": 4,
            "code": "bad_request",
            "message": "line 4 has 1 fields, the header has 2",
            "row": {"id": "3", "text": ""},
        }
        rows = read_csv(tmp_path / "out.csv")
        assert [row["id"] for row in rows] == ["1", "2", "3", "4", "5", "", "7"]
        found = [row["gm_error"].partition(":")[0] for row in rows]
        bad = "bad_request"
        assert found == ["", bad, bad, "empty_input", bad, bad, ""]
        assert rows[1]["gm_error"] == "bad_request: line 3: not valid UTF-8"
        assert b"2,caf\xe9,,,bad_request" in (tmp_path / "out.csv").read_bytes()
        assert summary.errors == {"bad_request": 4, "empty_input": 1}

    def test_jsonl_rows_keep_their_place(self, scorer: Client, tmp_path: Path) -> None:
        lines = ['{"text": "good", "n": 1}', "nonsense", '{"n": 2}', '{"text": null}', '{"text": ["a"]}']
        source = write(tmp_path / "in.jsonl", "\n".join([*lines, '{"text": "good"}']))
        self.score(scorer, source, tmp_path / "out.jsonl")
        rows = read_jsonl(tmp_path / "out.jsonl")
        assert rows[0] == {"text": "good", "n": 1, "gm_error": ""} | {
            "gm_label": rows[5]["gm_label"],
            "gm_score": pytest.approx(rows[5]["gm_score"], abs=1e-4),
        }
        assert rows[1]["gm_line"] == 2
        assert [row["gm_error"] for row in rows[2:5]] == [
            "bad_request: line 3: 'text' is missing",
            "bad_request: line 4: 'text' is null, it has to be a string",
            "bad_request: line 5: 'text' is a list, it has to be a string",
        ]

    def test_formats_may_differ(self, scorer: Client, tmp_path: Path) -> None:
        source = write(
            tmp_path / "in.jsonl", 'oops\n{"text": "a", "tags": ["x"]}\n{"text": "b", "more": 1}\n'
        )
        self.score(scorer, source, tmp_path / "out.csv")
        rows = read_csv(tmp_path / "out.csv")
        assert [(row["text"], row["tags"]) for row in rows] == [("", ""), ("a", '["x"]'), ("b", "")]
        assert [bool(row["gm_error"]) for row in rows] == [True, False, True]
        back = write(tmp_path / "back.csv", b"text\ncaf\xe9\ngood\n")
        self.score(scorer, back, tmp_path / "back.jsonl")
        assert [row["text"] for row in read_jsonl(tmp_path / "back.jsonl")] == ["caf\ufffd", "good"]

    def test_all_labels_are_written_where_more_than_one_is_asked_for(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        source = write(tmp_path / "in.csv", "text,pair\nthe mill,the wheel\n")
        self.score(scorer, source, tmp_path / "all.csv", top_k=0, pair_column="pair")
        row = read_csv(tmp_path / "all.csv")[0]
        scores = json.loads(row["gm_scores"])
        assert len(scores) == 3
        assert row["gm_label"] == scores[0]["label"]
        assert scores == scorer.score("labels", ("the mill", "the wheel"), options={"top_k": None})
        self.score(scorer, source, tmp_path / "two.jsonl", top_k=2, prefix="p_")
        assert len(read_jsonl(tmp_path / "two.jsonl")[0]["p_scores"]) == 2

    def test_embeddings_are_written_as_lists(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "text\nthe mill\n\0\n")
        self.score(scorer, source, tmp_path / "out.csv", "vectors")
        self.score(scorer, source, tmp_path / "out.jsonl", "vectors")
        vector = scorer.score("vectors", "the mill")
        row = read_csv(tmp_path / "out.csv")[0]
        assert list(row) == ["text", "gm_embedding", "gm_error"]
        assert json.loads(row["gm_embedding"]) == pytest.approx(vector, abs=1e-5)
        assert read_jsonl(tmp_path / "out.jsonl")[0]["gm_embedding"] == pytest.approx(vector, abs=1e-5)

    def test_too_long_texts_are_cut_and_counted_or_refused(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "text\n" + "mill " * 2000 + "\nshort\n")
        assert self.score(scorer, source, tmp_path / "cut.csv").truncated == 1
        summary = self.score(scorer, source, tmp_path / "refused.csv", truncate=False)
        assert summary.errors == {"too_long": 1}

    def test_progress_is_told_after_each_row_and_the_preview_kept(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        source = write(tmp_path / "in.csv", "text\n" + "mill\n" * 50)
        seen: list[int] = []
        job = Job(source, tmp_path / "out.csv", "labels", "text", preview=2)
        summary = score_file(scorer, job, lambda summary: seen.append(summary.rows))
        assert seen == list(range(1, 51))
        assert len(summary.preview) == 2
        assert summary.preview[0].keys() == {"text", "gm_label", "gm_score", "gm_error"}

    def test_a_file_of_no_rows_gives_a_file_of_no_rows(self, scorer: Client, tmp_path: Path) -> None:
        summary = self.score(scorer, write(tmp_path / "in.csv", "text\n"), tmp_path / "out.csv")
        assert summary.rows == 0
        assert (tmp_path / "out.csv").read_text() == "text,gm_label,gm_score,gm_error\n"
        self.score(scorer, write(tmp_path / "in.jsonl", ""), tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_text() == ""

    def test_a_missing_column_is_said_at_the_start(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "id,body\n1,x\n")
        with pytest.raises(InputFileError, match="no column 'text'; its columns are: 'id', 'body'"):
            self.score(scorer, source, tmp_path / "out.csv")
        assert os.listdir(tmp_path) == ["in.csv"]  # noqa: PTH208 - names, not paths

    def test_a_queue_without_workers_is_refused(self, scorer: Client, tmp_path: Path) -> None:
        with pytest.raises(NoWorkerError, match="nobody"):
            self.score(scorer, write(tmp_path / "in.csv", "text\nx\n"), tmp_path / "out.csv", "nobody")

    def test_a_row_with_a_result_s_name_is_one_error(self, scorer: Client, tmp_path: Path) -> None:
        lines = ['{"text": "good"}'] * 300 + ['{"text": "bad", "gm_error": 1}', '{"text": "good"}']
        source = write(tmp_path / "in.jsonl", "\n".join(lines))
        summary = self.score(scorer, source, tmp_path / "out.jsonl")
        assert (summary.rows, summary.failed) == (302, 1)
        row = read_jsonl(tmp_path / "out.jsonl")[300]
        assert row["gm_line"] == 301
        assert "--prefix" in row["gm_error"]

    def test_an_error_in_the_middle_says_where_the_rows_before_it_are(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        source = write(tmp_path / "in.csv", "text\n" + "good\n" * 300)

        def on_progress(summary: Summary) -> None:
            if summary.rows == 200:
                raise KeyboardInterrupt

        job = Job(source, tmp_path / "out.csv", "labels", "text")
        with pytest.raises(KeyboardInterrupt) as caught:
            score_file(scorer, job, on_progress)
        folder = tmp_path / "out.csv.parts"
        assert caught.value.__notes__ == [f"200 scored rows are kept in {folder}"]
        assert len((folder / "rows" / "part-000000.csv.open").read_text().splitlines()) == 201

    def test_a_link_in_place_of_the_folder_is_not_followed(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "text\ngood\n")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out.csv.parts").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputFileError, match=r"out\.csv\.parts cannot be written"):
            self.score(scorer, source, tmp_path / "out.csv")
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_result_never_hides_an_input_column(self, scorer: Client, tmp_path: Path) -> None:
        source = write(tmp_path / "in.csv", "text,gm_error\ngood,x\n")
        with pytest.raises(InputFileError, match=r"'gm_error'.*--prefix"):
            self.score(scorer, source, tmp_path / "out.csv")
        self.score(scorer, source, tmp_path / "out.csv", columns=("text",))
        assert list(read_csv(tmp_path / "out.csv")[0]) == ["text", "gm_label", "gm_score", "gm_error"]

    def test_a_run_ends_when_all_workers_have_gone(
        self, workers: Workers, tiny_classifier: Path, redis_url: str, queue: str, tmp_path: Path
    ) -> None:
        process = workers.start(tiny_classifier)
        source = write(tmp_path / "in.csv", "text\n" + "good\n" * 20_000)

        def on_progress(summary: Summary) -> None:
            if summary.rows == 100:
                process.kill()

        job = Job(source, tmp_path / "out.csv", queue, "text", wait=1.0)
        with Client(redis_url) as client, pytest.raises(NoWorkerError, match=queue):
            score_file(client, job, on_progress)
