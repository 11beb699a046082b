"""Servers as people run them: a primary with a replica and sentinels, and a cluster; all on loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from conftest import wait_until
from gristmill import keys

SERVICE: Final = "mill"
SENTINEL_PASSWORD: Final = "sesame"  # noqa: S105 - of a test
USERS: Final = Path(__file__).parent.parent / "configs" / "redis" / "users.acl"
NODE_TIMEOUT_MS: Final = 2000
DOWN_AFTER_MS: Final = 1500


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses, nor those that a cluster's nodes have beside them."""
    found: list[int] = []
    taken: list[socket.socket] = []
    try:
        while len(found) < count:
            first = socket.create_server(("127.0.0.1", 0))
            taken.append(first)
            port = first.getsockname()[1]
            try:
                taken.append(socket.create_server(("127.0.0.1", port + 10_000)))
            except (OSError, OverflowError):
                continue
            found.append(port)
    finally:
        for each in taken:
            each.close()
    return found


class Servers:
    """Redis processes on ports of their own; a context manager."""

    url: str

    def __init__(self, program: Path, folder: Path, count: int) -> None:
        self.program = program
        self.folder = folder
        self.ports = free_ports(count)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.guarded: set[int] = set()  # ports of those that want a password
        self._connections: dict[int, Redis] = {}

    def start_server(self, port: int, **options: str) -> None:
        """Start a server; options have _ in place of -."""
        words = {"port": str(port), "bind": "127.0.0.1", "dir": str(self.folder), "save": ""}
        words |= {"repl-diskless-sync-delay": "0", "dbfilename": f"{port}.rdb"}
        words |= {name.replace("_", "-"): value for name, value in options.items()}
        self._start(
            port, [word for name, value in words.items() for word in (f"--{name}", *value.split(" "))]
        )

    def start_sentinel(self, port: int, *lines: str) -> None:
        path = self.folder / f"sentinel-{port}.conf"
        path.write_text("\n".join([f"port {port}", "bind 127.0.0.1", f"dir {self.folder}", *lines, ""]))
        self._start(port, [str(path), "--sentinel"])

    def _start(self, port: int, words: Sequence[str]) -> None:
        with (self.folder / f"{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen([self.program, *words], stdout=log, stderr=log)

    def at(self, port: int) -> Redis:
        """Return a client of one server."""
        if port not in self._connections:
            password = SENTINEL_PASSWORD if port in self.guarded else None
            never = Retry(NoBackoff(), 0)
            self._connections[port] = Redis(
                port=port, password=password, protocol=2, socket_timeout=10, retry=never
            )
        return self._connections[port]

    def add_users(self, port: int, *queues: str) -> None:
        """Add the users of ``configs/redis``, with rights to ``queues`` (those that the file names)."""
        for line in USERS.read_text("utf-8").splitlines():
            _, name, *rules = line.split()
            more = [f"~gm:{{{queue}}}:*" for queue in queues] if "~gm:queues" in rules else []
            if name != "default":
                self.at(port).execute_command("ACL", "SETUSER", name, *rules, *more)

    def url_of(self, name: str) -> str:
        """Return the URL for one of the users of ``configs/redis``."""
        password = {"producer": "change-me", "worker": "change-me-too", "operator": "change-me-as-well"}[name]
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{name}:{password}@{rest}"

    def ask(self, port: int, *command: Any) -> Any:
        """Ask one server; None while it does not answer."""
        try:
            return self.at(port).execute_command(*command)
        except Exception:  # noqa: BLE001 - not there yet, or no more
            return None

    def has_replicated(self, port: int, queue: str) -> bool:
        """Say whether a replica has all of a queue that the server has acknowledged until now."""
        try:
            with self.at(port).pipeline(transaction=False) as pipe:
                pipe.set(keys.result(queue, "marker"), 1)  # WAIT is for what its connection wrote
                pipe.execute_command("WAIT", 1, 50)
                return bool(pipe.execute()[1])
        except Exception:  # noqa: BLE001 - it is gone, or no primary any more
            return False

    def is_replica(self, port: int) -> bool:
        """Say whether the server is a replica that follows its primary."""
        return (self.ask(port, "ROLE") or [b"", 0, 0, b""])[3:4] == [b"connected"]

    def kill(self, port: int) -> None:
        self.processes[port].send_signal(signal.SIGKILL)
        self.processes.pop(port).wait()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


class Watched(Servers):
    """A primary and a replica, and three sentinels of which two have to agree."""

    def __init__(self, program: Path, folder: Path) -> None:
        super().__init__(program, folder, 5)
        self.data, self.sentinels = self.ports[:2], self.ports[2:]
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}/0?sentinel_password={SENTINEL_PASSWORD}"
        self.guarded = set(self.sentinels)

    def start(self) -> None:
        first, second = self.data
        self.start_server(first)
        self.start_server(second, replicaof=f"127.0.0.1 {first}")
        wait_until(lambda: self.is_replica(second))
        for port in self.data:
            self.add_users(port)
        for port in self.sentinels:
            self.start_sentinel(
                port,
                f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 1000",
                f"requirepass {SENTINEL_PASSWORD}",
                f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
            )
        wait_until(lambda: all(self._sees_all(port) for port in self.sentinels))

    def _sees_all(self, port: int) -> bool:
        others = self.ask(port, "SENTINEL", "SENTINELS", SERVICE)
        replicas = self.ask(port, "SENTINEL", "REPLICAS", SERVICE)
        return others is not None and len(others) == 2 and bool(replicas)

    def primary(self) -> int | None:
        """Return the primary's port, None while the sentinels do not agree."""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        found = {int(self.ask(port, *question)[1]) for port in self.sentinels}
        return found.pop() if len(found) == 1 else None

    def wait_for_another(self, old: int) -> int:
        """Wait until the sentinels name another primary; returns its port."""
        wait_until(lambda: self.primary() not in {None, old})
        return next(port for port in self.data if port != old)

    def fail_over(self) -> None:
        """Have the sentinels replace the primary by its replica, as before a server is taken away."""
        wait_until(lambda: self.ask(self.sentinels[0], "SENTINEL", "FAILOVER", SERVICE))


class Cluster(Servers):
    """Three nodes, and one replica of the first."""

    def __init__(self, program: Path, folder: Path) -> None:
        super().__init__(program, folder, 4)
        self.nodes, self.replica = self.ports[:3], self.ports[3]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.nodes)
        self.queues = [self.queue_on(i) for i in range(3)]

    def start(self) -> None:
        for port in self.ports:
            self.start_server(
                port,
                cluster_enabled="yes",
                cluster_config_file=f"nodes-{port}.conf",
                cluster_node_timeout=str(NODE_TIMEOUT_MS),
                appendonly="no",
            )
        wait_until(lambda: all(self.ask(port, "PING") for port in self.ports))
        for i, port in enumerate(self.nodes):
            first, last = i * 16384 // 3, (i + 1) * 16384 // 3
            self.ask(port, "CLUSTER", "ADDSLOTS", *range(first, last))
            self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for port in self.ports[1:]:
            self.ask(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", port)
        wait_until(lambda: self.ask(self.replica, "CLUSTER", "REPLICATE", self.id_of(self.nodes[0])))
        wait_until(lambda: all(self._is_complete(port) for port in self.ports))
        wait_until(lambda: self.is_replica(self.replica))

    def _is_complete(self, port: int) -> bool:
        info = self.ask(port, "CLUSTER", "INFO") or b""
        return b"cluster_state:ok" in info and b"cluster_known_nodes:4" in info

    def id_of(self, port: int) -> Any:
        return self.ask(port, "CLUSTER", "MYID")

    def queue_on(self, number: int) -> str:
        """Return the name of a queue whose keys are on the node with ``number``."""
        first, last = number * 16384 // 3, (number + 1) * 16384 // 3
        return next(name for i in range(1000) if first <= slot_of(name := f"mill-{i}") < last)

    def owner(self, slot: int, asked: int) -> int:
        """Return the port of the node that has ``slot``, as the node ``asked`` knows."""
        with closing(Redis(port=asked, protocol=2)) as bare:
            bare.response_callbacks.clear()
            for first, last, primary, *_ in bare.execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return int(primary[1])
        raise AssertionError(slot)

    def errors(self, code: str) -> int:
        """Return how often the nodes have replied with an error's code."""
        stats: list[dict[str, Any]] = [self.at(port).info("errorstats") for port in self.processes]
        return sum(int(each.get(f"errorstat_{code}", {"count": 0})["count"]) for each in stats)

    def migrate(self, slot: int, source: int, target: int, *, at_once: int = 1) -> None:
        """Move a slot with its keys, some at once, while it is in use."""
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while names := self.at(source).execute_command("CLUSTER", "GETKEYSINSLOT", slot, at_once):
            self.at(source).execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *names)
            time.sleep(0.01)
        for port in (target, source, *self.nodes):
            self.ask(port, "CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def migrate_whole(self, slot: int, source: int, target: int) -> None:
        """Move a slot as Valkey 9 does it: in the background, then in one step."""
        command = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.id_of(target))
        self.at(source).execute_command(*command)
        wait_until(lambda: self.owner(slot, target) == target)


def slot_of(queue: str) -> int:
    return key_slot(keys.requests(queue).encode())
