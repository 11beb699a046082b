"""Redis as people guard it: users with few rights, and TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from conftest import PROGRAMS, Server, Workers
from gristmill import Client, keys
from gristmill.errors import BrokerUnavailable
from probes import fetch_metrics
from topologies import free_ports


def _knows_tls(program: Path) -> bool:
    linked = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return "libssl" in linked.stdout


TLS_PROGRAMS = [program for program in PROGRAMS if _knows_tls(program)]
USERS = Path(__file__).parent.parent / "configs" / "redis" / "users.acl"
QUEUE = "topics"  # that the file gives rights to


@pytest.fixture(params=PROGRAMS, ids=[program.parent.parent.name for program in PROGRAMS])
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with the users of ``configs/redis``."""
    folder = tmp_path / "redis"
    folder.mkdir()
    shutil.copyfile(USERS, folder / "users.acl")
    server = Server(folder, request.param)
    server.start(ready=False, aclfile=str(folder / "users.acl"))
    yield server
    server.stop()


def as_user(server: Server, name: str, password: str) -> str:
    path = server.url.removeprefix("unix://")
    return f"unix://{name}:{password}@{path}"


def test_the_users_of_the_example_can_do_their_work_and_nothing_else(
    guarded: Server, tiny_classifier: Path, tmp_path: Path
) -> None:
    producer, worker = as_user(guarded, "producer", "change-me"), as_user(guarded, "worker", "change-me-too")
    workers = Workers(worker, QUEUE, tmp_path)
    try:
        workers.start(tiny_classifier, "--metrics", "0", config="{lease_s: 1}", ready=False)
        with Client(producer) as client:
            results = client.score_many(QUEUE, ["bread", "the mill", "water"])
            assert [result.status for result in results] == ["ok"] * 3
            assert client.result(client.submit(QUEUE, "flour"), timeout_s=60).ok
            assert [beat["name"] for beat in client.workers(QUEUE)] == ["w0"]
            assert client.depth(QUEUE).dead == 0
            assert f'gristmill_queue_waiting{{queue="{QUEUE}"}} 0.0' in fetch_metrics(workers.log())
            for refused in (
                lambda: client.submit("another", "bread"),
                lambda: client.pause(QUEUE),
                lambda: client.set_limit(QUEUE, 5),
            ):
                with pytest.raises(BrokerUnavailable, match=r"(?i)permission"):
                    refused()
        for name, password, command in (
            ("producer", "change-me", ("XDEL", keys.requests(QUEUE), "1-1")),
            (
                "producer",
                "change-me",
                ("XGROUP", "DESTROY", keys.requests(QUEUE), keys.GROUP),
            ),
            ("producer", "change-me", ("FLUSHALL",)),
            ("producer", "change-me", ("GET", "gm:{another}:result:x")),
            ("worker", "change-me-too", ("FLUSHALL",)),
            ("worker", "change-me-too", ("KEYS", "*")),
            ("worker", "change-me-too", ("HSET", "gm:{another}:config", "paused", "1")),
        ):
            with (
                Redis.from_url(as_user(guarded, name, password)) as connection,
                pytest.raises(Exception, match=r"(?i)permission"),
            ):
                connection.execute_command(*command)
        with Client(guarded.url) as nobody, pytest.raises(BrokerUnavailable, match=r"(?i)auth"):
            nobody.submit(QUEUE, "bread")
        process = workers.processes[0]
        process.terminate()
        assert process.wait(60) == 0
        log = workers.log().read_text()
        assert "NOPERM" not in log
        assert "permissions" not in log
    finally:
        workers.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate of this host that signs itself."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def tls_options(certificates: Path) -> dict[str, Any]:
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    return {
        "tls_cert_file": cert,
        "tls_key_file": key,
        "tls_ca_cert_file": cert,
        "tls_auth_clients": "no",
        "tls_replication": "yes",
        "tls_cluster": "yes",
    }


needs_tls = pytest.mark.skipif(
    not TLS_PROGRAMS or shutil.which("openssl") is None, reason="no redis-server with TLS, or no openssl"
)


@needs_tls
def test_requests_and_results_travel_by_tls(
    certificates: Path, tmp_path: Path, tiny_classifier: Path, queue: str
) -> None:
    [port] = free_ports(1)
    folder = tmp_path / "redis"
    folder.mkdir()
    cert = str(certificates / "cert.pem")
    server = Server(folder, TLS_PROGRAMS[0])
    server.start(tls_port=str(port), **tls_options(certificates))
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={cert}"
    workers = Workers(url, queue, tmp_path)
    try:
        workers.start(tiny_classifier)
        with Client(url) as client:
            assert [result.status for result in client.score_many(queue, ["bread", "water"])] == ["ok"] * 2
        # A certificate that nobody vouches for is refused.
        with Client(f"rediss://localhost:{port}/0", retry_s=0.1) as client, pytest.raises(BrokerUnavailable):
            client.submit(queue, "bread")
    finally:
        workers.close()
        server.stop()


@needs_tls
def test_sentinels_and_clusters_are_spoken_to_by_tls(certificates: Path, tmp_path: Path, queue: str) -> None:
    ports = free_ports(3)
    servers = []
    for name, port, cluster in (("node", ports[0], "yes"), ("primary", ports[1], "no")):
        folder = tmp_path / name
        folder.mkdir()
        servers.append(Server(folder, TLS_PROGRAMS[0]))
        servers[-1].start(tls_port=str(port), cluster_enabled=cluster, **tls_options(certificates))
    lines = {"tls_port": str(ports[2]), "port": "0", "dir": str(tmp_path), **tls_options(certificates)}
    path = tmp_path / "sentinel.conf"
    path.write_text(
        "".join(f"{name.replace('_', '-')} {value}\n" for name, value in lines.items())
        + f"sentinel monitor mill 127.0.0.1 {ports[1]} 1\n"
    )
    with (tmp_path / "sentinel.log").open("wb") as log:
        sentinel = subprocess.Popen([TLS_PROGRAMS[0], str(path), "--sentinel"], stdout=log, stderr=log)
    try:
        with Redis.from_url(servers[0].url) as node:
            node.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        option = f"ssl_ca_certs={certificates / 'cert.pem'}"
        for url in (
            f"rediss+cluster://localhost:{ports[0]}?{option}",
            f"rediss+sentinel://localhost:{ports[2]}/mill?{option}",
        ):
            with Client(url) as client:
                client.submit(queue, "bread")
                assert client.depth(queue).waiting == 1
            with Client(url.partition("?")[0], retry_s=0.1) as client, pytest.raises(BrokerUnavailable):
                client.submit(queue, "bread")
    finally:
        sentinel.kill()
        sentinel.wait()
        for server in servers:
            server.stop()
