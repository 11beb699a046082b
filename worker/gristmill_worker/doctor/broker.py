"""Checks of Redis, through the connection that a worker would use. Nothing is written."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Final

from gristmill import urls
from gristmill.cluster import slot_table
from gristmill.driver import ERRORS, Connections, translate
from gristmill.embedded import OLDEST_SERVER
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.sources.advice import info, risks, setting

PINGS: Final = 100
SLOW_MS: Final = 2.0  # a window takes about three round trips
SKEW_S: Final = 1.0
ALMOST_FULL: Final = 0.8  # share of maxmemory
_HIDDEN: Final = "this user is not permitted to look (INFO)"


def check_redis(url: str) -> Iterator[Finding]:
    """Yield what every check finds, of a cluster for each of its primaries.

    Raises InvalidRequestError for a URL that is none.
    """
    servers = urls.parse(url)
    if servers is None or servers.service:
        yield from _check_server(url, sentinels=servers is not None)
        return
    try:
        with closing(Connections(url)) as redis:
            table = slot_table(redis.call("CLUSTER", "SLOTS"), servers.nodes[0])
    except ERRORS as error:
        yield _refused(error, url)
        return
    if missing := table.count(None):
        fix = "redis-cli --cluster fix: requests of some queues are refused"
        yield Finding("cluster", Level.PROBLEM, f"no node serves {missing} of {len(table)} slots", fix)
    nodes = sorted({node for node in table if node is not None})
    yield Finding("cluster", Level.OK, f"{len(nodes)} primaries: {', '.join(map(str, nodes))}")
    for node in nodes:
        for finding in _check_server(servers.node_url(node), cluster=True):
            yield replace(finding, found=f"{node}: {finding.found}")


def _check_server(url: str, *, sentinels: bool = False, cluster: bool = False) -> Iterator[Finding]:
    """Look at one server; one that does not answer ends the checks."""
    with closing(Connections(url)) as redis:
        try:
            redis.call("PING")
            yield from _check_told(redis, sentinels=sentinels, cluster=cluster)
            yield check_latency(redis)
            yield from _check_clock(redis, url)
        except ERRORS as error:
            yield _refused(error, url)
            if translate(error, url).unwilling:  # it still tells about itself
                yield from _check_told(redis, sentinels=sentinels, cluster=cluster)


def _refused(error: Exception, url: str) -> Finding:
    refused = translate(error, url)
    if refused.denied:
        fix = "give the user its rights: configs/redis/users.acl has an example"
    elif refused.unwilling:
        fix = "wait, or mend what it says"
    else:
        fix = "start it, or name another one: --redis URL, or 'redis' in the configuration"
    return Finding("Redis", Level.PROBLEM, str(refused), fix)


def _check_told(redis: Connections, *, sentinels: bool, cluster: bool) -> Iterator[Finding]:
    """Look at what Redis tells about itself."""
    server = info(redis, "server")
    if server is None:
        yield Finding("Redis", Level.NOTE, f"version, persistence and memory are unknown: {_HIDDEN}")
        return
    yield check_version(server)
    if not cluster and server.get("redis_mode") == "cluster":
        fix = "use redis+cluster://HOST:PORT: other queues are on other nodes"
        yield Finding("cluster", Level.PROBLEM, "a node of a Redis Cluster, taken for a single server", fix)
    yield from _check_keeping(redis)
    yield from _check_state(redis, sentinels=sentinels)


def check_version(server: dict[str, str]) -> Finding:
    """Look at the version, by which a Valkey says what Redis it is like."""
    name = "Valkey" if server.get("server_name") == "valkey" else "Redis"
    found = f"{name} {server.get('valkey_version') or server.get('redis_version', 'of an unknown version')}"
    version = re.match(r"(\d+)\.(\d+)", server.get("redis_version", ""))
    if version is not None and (int(version[1]), int(version[2])) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        return Finding(
            "Redis version", Level.PROBLEM, found, f"Redis {oldest} or later, or Valkey, is needed"
        )
    return Finding("Redis version", Level.OK, found)


def _check_keeping(redis: Connections) -> Iterator[Finding]:
    """Look at what is lost by eviction and restarts."""
    at_risk = {risk.event: risk for risk in risks(redis)}
    if (risk := at_risk.get("redis_may_evict")) is not None:
        yield Finding("eviction", Level.PROBLEM, risk.found, risk.advice)
    else:
        yield Finding("eviction", Level.OK, "none: maxmemory-policy noeviction")
    if (risk := at_risk.get("redis_keeps_nothing")) is not None:
        yield Finding("persistence", Level.WARNING, risk.found, risk.advice)
    else:
        yield check_persistence(info(redis, "persistence") or {}, setting(redis, "appendfsync"))


def check_persistence(persistence: dict[str, str], fsync: str | None) -> Finding:
    """Look at how much a crash of Redis's machine loses, where something is kept at all."""
    name = "persistence"
    failed = [
        what
        for what, key in (
            ("append-only file", "aof_last_write_status"),
            ("snapshot", "rdb_last_bgsave_status"),
        )
        if persistence.get(key, "ok") != "ok"
    ]
    if failed:
        fix = "look into Redis's log and at the space on its disk: it refuses all writes for this"
        return Finding(name, Level.PROBLEM, f"the last write of the {' and the '.join(failed)} failed", fix)
    if persistence.get("aof_enabled") == "0":
        fix = "CONFIG SET appendonly yes: a restart loses what came after the last snapshot"
        return Finding(name, Level.WARNING, "snapshots alone", fix)
    if fsync == "always":
        return Finding(name, Level.OK, "append-only file, every write")
    if fsync == "no":
        fix = "CONFIG SET appendfsync everysec (or always): now the kernel decides, after up to 30 s"
        return Finding(name, Level.WARNING, "append-only file, not synchronised", fix)
    fix = "CONFIG SET appendfsync always, if a crash of Redis's machine may not lose its last second"
    return Finding(name, Level.NOTE, f"append-only file, {fsync or 'how often is not to be seen'}", fix)


def _check_state(redis: Connections, *, sentinels: bool) -> Iterator[Finding]:
    replication = info(redis, "replication") or {}
    if replication.get("role") == "slave":
        primary = f"{replication.get('master_host')}:{replication.get('master_port')}"
        yield Finding("role", Level.PROBLEM, "a replica, which refuses writes", f"use its primary: {primary}")
    elif sentinels and replication.get("connected_slaves") == "0":
        fix = "start a replica: the sentinels have no other server to make the primary"
        yield Finding("role", Level.WARNING, "a primary without replicas", fix)
    memory = info(redis, "memory") or {}
    used, most = (int(memory.get(name, "0")) for name in ("used_memory", "maxmemory"))
    if most:
        level = Level.WARNING if used > ALMOST_FULL * most else Level.OK
        fix = "raise maxmemory, add workers, or shorten result_ttl_s" if level is Level.WARNING else ""
        yield Finding("Redis memory", level, f"{used / 2**20:,.0f} of {most / 2**20:,.0f} MiB", fix)
    else:
        fix = "set maxmemory below what its machine has: otherwise the kernel kills it when memory is short"
        yield Finding("Redis memory", Level.NOTE, f"{used / 2**20:,.0f} MiB, without a bound", fix)


def check_latency(redis: Connections) -> Finding:
    """Measure round trips. Raises one of ERRORS."""
    times_ms = []
    for _ in range(PINGS):
        started = time.perf_counter()
        redis.call("PING")
        times_ms.append((time.perf_counter() - started) * 1000)
    found = f"{median(times_ms):.2f} ms (median of {PINGS} PINGs), {max(times_ms):.2f} ms at most"
    if median(times_ms) > SLOW_MS:
        fix = "put Redis nearer, or look for what slows it: 'redis-cli --intrinsic-latency 10' on its machine"
        return Finding("Redis latency", Level.WARNING, found, fix)
    return Finding("Redis latency", Level.OK, found)


def _check_clock(redis: Connections, url: str) -> Iterator[Finding]:
    before = time.time()
    try:
        seconds, microseconds = redis.call("TIME")
        theirs = int(seconds) + int(microseconds) / 1e6
    except ERRORS as error:
        if not translate(error, url).denied:
            raise
        told = (info(redis, "server") or {}).get("server_time_usec", "")
        if not told.isdigit():
            yield Finding("clock", Level.NOTE, "not to be seen: this user may call neither TIME nor INFO")
            return
        theirs = int(told) / 1e6
    yield check_skew(theirs - (before + time.time()) / 2)


def check_skew(ahead_s: float) -> Finding:
    """Judge by how many seconds Redis's clock is ahead of this machine's."""
    found = f"Redis's is {abs(ahead_s) * 1000:,.0f} ms {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) > SKEW_S:
        fix = "synchronise all machines (chrony, systemd-timesyncd): deadlines and ages compare their clocks"
        return Finding("clock", Level.WARNING, found, fix)
    return Finding("clock", Level.OK, found)
