"""Bulk scoring from and to an S3 server: s3fs as users have it, against moto's server as a process."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import boto3
import pyarrow.parquet as pq
import pytest

from bulk_rows import write_input
from conftest import wait_until
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import ExitCode


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A client of a running S3 server with a bucket, and the environment to reach it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=file, stderr=file
        )
    try:
        wait_until(lambda: process.poll() is not None or answers(url))
        assert process.poll() is None, log.read_text()
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        env = {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106 - of a server that takes any
        )
        client.create_bucket(Bucket="texts")
        yield client, env
        client.close()
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/moto-api/") as reply:  # noqa: S310 - http
            return bool(reply.status == 200)
    except OSError:
        return False


def test_runs_go_on_from_and_to_a_bucket(
    s3: tuple[Any, dict[str, str]], tiny_classifier: Path, tmp_path: Path
) -> None:
    bucket, env = s3
    data = write_input(tmp_path / "in.csv", rows=3000).read_bytes()
    bucket.put_object(Bucket="texts", Key="in/a.csv.gz", Body=gzip.compress(data, mtime=0))
    bucket.put_object(Bucket="texts", Key="in/b.csv.gz", Body=gzip.compress(data, mtime=0))
    with PrivateRedis() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_ENGINE", "null")
        with PrivateWorkers(tiny_classifier, "labels", redis, threads=1):

            def score(out: str, *more: str) -> subprocess.CompletedProcess[str]:
                command = [sys.executable, "-m", "gristmill.cli", "score", "s3://texts/in/*.csv.gz", *more]
                command += ["--out", out, "--text-column", "text", "--queue", "labels", "--redis", redis.url]
                return subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=120,
                    cwd=tmp_path,
                    env={**os.environ, **env},
                )

            cut = score("s3://texts/out.parquet", "--max-errors", "500")
            assert cut.returncode == ExitCode.BAD_INPUT
            assert "scored rows are kept in out.parquet.parts" in cut.stderr
            done = score("s3://texts/out.parquet")
            assert done.returncode == ExitCode.ROWS_FAILED, done.stderr
            assert "of them before this run" in done.stderr
            (tmp_path / "found.parquet").write_bytes(
                bucket.get_object(Bucket="texts", Key="out.parquet")["Body"].read()
            )
            local = score("local.parquet")
            assert local.returncode == ExitCode.ROWS_FAILED, local.stderr
            assert (tmp_path / "found.parquet").read_bytes() == (tmp_path / "local.parquet").read_bytes()
            assert pq.read_table(tmp_path / "local.parquet").num_rows > 5500

            assert score("again.csv", "--max-errors", "500").returncode == ExitCode.BAD_INPUT
            bucket.put_object(
                Bucket="texts", Key="in/b.csv.gz", Body=gzip.compress(data[:-1] + b"x", mtime=0)
            )
            changed = score("again.csv")
            assert changed.returncode == ExitCode.BAD_INPUT
            assert "the input s3://texts/in/b.csv.gz has changed since" in changed.stderr
