"""Parquet in and out: types, embeddings, and runs that are cut short."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk_rows import Cut, cut_at, write_input
from gristmill import Client
from gristmill.bulk import Job, Summary, score_file
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import InputFileError


@pytest.fixture(scope="module")
def scorer(tiny_classifier: Path, tiny_encoder: Path) -> Iterator[Client]:
    """A client of a server with a worker on "labels" that computes nothing, and a real one on "vectors"."""
    with PrivateRedis() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_ENGINE", "null")
        with PrivateWorkers(tiny_classifier, "labels", redis, threads=1):
            patch.delenv("GRISTMILL_ENGINE")
            with PrivateWorkers(tiny_encoder, "vectors", redis, threads=1), Client(redis.url) as client:
                yield client


def score(client: Client, source: Any, out: Path, queue: str = "labels", **keywords: Any) -> Summary:
    return score_file(client, Job(source, out, queue, "text", **keywords))


def a_table(rows: int = 3000) -> Any:
    """Return a table with types that neither JSON nor Python has in full."""
    moment = 1_700_000_000_123_456_789
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int16()),
            "text": pa.array([None if i % 50 == 7 else f"the mill {i}" for i in range(rows)]),
            "kind": pa.array([f"kind {i % 7}" for i in range(rows)]).dictionary_encode(),
            "at": pa.array([moment + i for i in range(rows)], pa.timestamp("ns", "UTC")),
            "price": pa.array([Decimal(f"{i}.10") for i in range(rows)], pa.decimal128(12, 2)),
            "tags": pa.array([["a", None]] * rows, pa.list_(pa.string())),
            "blob": pa.array([b"\xff\x00"] * rows, pa.binary()),
            "day": pa.array([dt.date(2026, 1, 1)] * rows),
        }
    )


class TestParquetIn:
    def test_every_type_passes_to_parquet_as_it_is(self, scorer: Client, tmp_path: Path) -> None:
        table = a_table()
        pq.write_table(table, tmp_path / "in.parquet", row_group_size=700)
        summary = score(scorer, tmp_path / "in.parquet", tmp_path / "out.parquet", part_rows=1000)
        found = pq.read_table(tmp_path / "out.parquet")
        expected = table.set_column(2, "kind", table.column("kind").cast(pa.string()))
        assert found.select(table.column_names).equals(expected)
        assert found.column_names[-3:] == ["gm_label", "gm_score", "gm_error"]
        assert found.schema.field("gm_score").type == pa.float64()
        errors = found.column("gm_error").to_pylist()
        assert errors[7] == "bad_request: line 8: 'text' is null, it has to be a string"
        assert errors[6] is None
        assert summary.failed == sum(error is not None for error in errors) == 60
        assert summary.position == summary.size_bytes

    def test_text_formats_get_what_they_can_hold(self, scorer: Client, tmp_path: Path) -> None:
        pq.write_table(a_table(3), tmp_path / "in.parquet")
        score(scorer, tmp_path / "in.parquet", tmp_path / "out.jsonl")
        row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])
        assert row["at"].startswith("2023-11-14T22:13:20.123456")
        assert (row["id"], row["price"], row["tags"], row["blob"], row["day"]) == (
            1,
            "1.10",
            ["a", None],
            "/wA=",
            "2026-01-01",
        )
        score(scorer, tmp_path / "in.parquet", tmp_path / "out.csv", columns=("price", "id"))
        assert (tmp_path / "out.csv").read_text().splitlines()[:2] == [
            "price,id,gm_label,gm_score,gm_error",
            f'"""0.10""",0,flour,{row["gm_score"]},',
        ]

    def test_a_file_that_is_none_or_has_other_types_is_refused(self, scorer: Client, tmp_path: Path) -> None:
        (tmp_path / "bad.parquet").write_bytes(b"PAR1nonsense")
        with pytest.raises(InputFileError, match="is not a usable Parquet file"):
            score(scorer, tmp_path / "bad.parquet", tmp_path / "out.parquet")
        pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
        pq.write_table(pa.table({"text": ["a"], "n": ["b"]}), tmp_path / "b.parquet")
        both = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
        with pytest.raises(InputFileError, match=r"b.parquet has other types than .*a.parquet: 'n'"):
            score(scorer, both, tmp_path / "out.parquet")
        score(scorer, both, tmp_path / "out.parquet", columns=("text",))
        assert pq.read_table(tmp_path / "out.parquet").num_rows == 2
        write_input(tmp_path / "c.csv", rows=3)
        with pytest.raises(InputFileError, match="of several formats cannot become one Parquet file"):
            score(scorer, [*both, tmp_path / "c.csv"], tmp_path / "d.parquet")
        with pytest.raises(InputFileError, match="cannot be written to standard output"):
            score(scorer, both[0], Path("-"))


class TestParquetOut:
    def test_embeddings_are_lists_of_one_length(self, scorer: Client, tmp_path: Path) -> None:
        source = tmp_path / "in.csv"
        source.write_text('id,text\n1,the mill\n2,""\n3,the wheel\n')
        summary = score(scorer, source, tmp_path / "out.parquet", "vectors")
        assert summary.failed == 1
        found = pq.read_table(tmp_path / "out.parquet")
        vectors = found.column("gm_embedding")
        first = scorer.score("vectors", "the mill")
        assert vectors.type == pa.list_(pa.float32(), len(first))
        assert vectors[0].as_py() == pytest.approx(first, abs=1e-5)
        assert vectors[1].as_py() is None
        assert vectors[2].as_py() == pytest.approx(scorer.score("vectors", "the wheel"), abs=1e-5)
        assert found.column("gm_error").to_pylist()[1].startswith("empty_input")

    def test_json_rows_keep_their_types_and_what_does_not_fit_is_an_error(
        self, scorer: Client, tmp_path: Path
    ) -> None:
        rows: list[Any] = [
            {"text": f"the mill {i}", "n": i, "x": i if i % 2 else i / 4, "ok": i % 3 == 0, "any": [i]}
            for i in range(1200)
        ]
        rows[3] |= {"n": None, "any": "plain"}
        rows += [{"text": "late", "n": "seven", "x": 1, "ok": True, "any": None}, {"text": "new", "more": 1}]
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(json.dumps(row) for row in rows))
        summary = score(scorer, source, tmp_path / "out.parquet", top_k=0)
        found = pq.read_table(tmp_path / "out.parquet")
        types = [str(found.schema.field(name).type) for name in ("text", "n", "x", "ok", "any")]
        assert types == ["string", "int64", "double", "bool", "string"]
        assert found.column("n").to_pylist()[2:5] == [2, None, 4]
        assert found.column("any").to_pylist()[2:4] == ["[2]", "plain"]
        assert found.column("gm_error").to_pylist()[1200:] == [
            "bad_request: line 1201: 'n' is a string, in the first rows it is a integer",
            "bad_request: line 1202: the first row does not have 'more'",
        ]
        assert summary.failed == 2
        assert {score["label"] for score in found.column("gm_scores")[0].as_py()} == {
            "flour",
            "grain",
            "water",
        }

    @pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
    def test_a_run_that_was_cut_anywhere_writes_what_an_unbroken_one_does(
        self, scorer: Client, tmp_path: Path, kind: str
    ) -> None:
        source = tmp_path / f"in.{kind}"
        if kind == "parquet":
            pq.write_table(a_table(), source, row_group_size=450)
        else:
            write_input(source)
        summary = score(scorer, source, tmp_path / "unbroken.parquet", part_rows=700)
        for rows in [1, 300, 699, 700, 1111, 2250, summary.rows]:
            with pytest.raises(Cut):
                score_file(
                    scorer,
                    Job(source, tmp_path / "cut.parquet", "labels", "text", part_rows=700),
                    cut_at(rows),
                )
        resumed = score(scorer, source, tmp_path / "cut.parquet", part_rows=700)
        assert resumed.resumed == summary.rows
        assert (tmp_path / "cut.parquet").read_bytes() == (tmp_path / "unbroken.parquet").read_bytes()
        assert pq.ParquetFile(tmp_path / "cut.parquet").num_row_groups == -(-summary.rows // 700)

    def test_no_rows_still_have_columns(self, scorer: Client, tmp_path: Path) -> None:
        (tmp_path / "in.csv").write_text("id,text\n")
        score(scorer, tmp_path / "in.csv", tmp_path / "out.parquet")
        found = pq.read_table(tmp_path / "out.parquet")
        assert (found.num_rows, found.column_names[:2]) == (0, ["id", "text"])

    def test_a_folder_of_parts_is_a_dataset(self, scorer: Client, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.csv", rows=500)
        results = ("label", "tokens", "truncated", "model", "error")
        summary = score(scorer, source, tmp_path / "out.parquet", parts=True, part_rows=200, results=results)
        found = pq.read_table(tmp_path / "out.parquet")
        assert found.num_rows == summary.rows
        assert found.column_names == ["id", "text", *(f"gm_{name}" for name in results)]
        assert sum(tokens or 0 for tokens in found.column("gm_tokens").to_pylist()) == summary.tokens
