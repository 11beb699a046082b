"""Redis URLs: one server, a primary that sentinels know, or a cluster; no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from gristmill.errors import InvalidRequestError

SERVER_SCHEMES: Final = ("redis://", "rediss://", "unix://")
TLS_OPTIONS: Final = (
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
URL_OPTIONS: Final = ("db", *TLS_OPTIONS)
SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
PORT: Final = 6379
SENTINEL_PORT: Final = 26379
FORMS: Final = (
    "use redis://host:6379/0, rediss://… (TLS), unix:///path, redis+sentinel://host,host/service, "
    "redis+cluster://host:6379,host:6379 or one of these two with TLS: rediss+…"
)

_MANY: Final = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://((?P<login>[^/?#]*)@)?(?P<hosts>[^/?@#]*)"
    r"(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?"
)
_HOST: Final = re.compile(r"(\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\[\]:\s]+))(:(?P<port>\d+))?")


class Node(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Servers:
    """What a URL with several hosts says.

    ``service`` is the name by which sentinels know the primary, empty for a cluster, whose ``nodes`` are some
    of its own. Logins are as they stand in a URL, with their ``@``, or empty.
    """

    nodes: tuple[Node, ...]
    service: str
    scheme: str
    login: str
    sentinel_login: str
    path: str
    query: str

    @property
    def name(self) -> str:
        """What messages call them."""
        listed = ", ".join(map(str, self.nodes))
        return f"Redis {self.service!r} (sentinels {listed})" if self.service else f"Redis Cluster ({listed})"

    def node_url(self, node: Node) -> str:
        """Return the URL of one server that holds data."""
        return f"{self.scheme}://{self.login}{node}{self.path}{self.query}"

    def sentinel_url(self, node: Node) -> str:
        """Return the URL of one sentinel."""
        return f"{self.scheme}://{self.sentinel_login}{node}{self.query}"


def parse(url: str) -> Servers | None:
    """Read a URL with several hosts; None for that of one server. Raises InvalidRequestError for all else."""
    if not isinstance(url, str):
        raise InvalidRequestError(f"{url!r} is not a Redis URL: {FORMS}")
    if url.startswith(SERVER_SCHEMES):
        return None
    found = _MANY.fullmatch(url)
    if found is None:
        raise InvalidRequestError(f"{hidden(url)!r} is not a Redis URL: {FORMS}")
    sentinel = found["kind"] == "sentinel"
    nodes = _nodes(url, found["hosts"], SENTINEL_PORT if sentinel else PORT)
    parts = [unquote(part) for part in (found["path"] or "").split("/")[1:]]
    query = found["query"] or ""
    options = check_options(query, SENTINEL_OPTIONS + TLS_OPTIONS if sentinel else TLS_OPTIONS)
    login = f"{found['login']}@" if found["login"] else ""
    tls = urlencode({name: value for name, value in options.items() if name in TLS_OPTIONS})
    service, path = "", ""
    if sentinel:
        if not parts or not parts[0]:
            raise _refused(url, "the name of the service is missing: …host:26379/mymaster")
        service, *rest = parts
        if len(rest) > 1 or not all(part.isdigit() for part in rest if part):
            raise _refused(url, "after the name of the service comes a database's number at most")
        path = f"/{rest[0]}" if rest and rest[0] else ""
    elif any(part not in {"", "0"} for part in parts):
        raise _refused(url, "a cluster has no other database than 0")
    return Servers(
        nodes=nodes,
        service=service,
        scheme=found["scheme"],
        login=login,
        sentinel_login=_login(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
        path=path,
        query=f"?{tls}" if tls else "",
    )


def name(url: str) -> str:
    """Return what messages call the Redis of a URL that is known to be one."""
    servers = parse(url)
    if servers is not None:
        return servers.name
    where = urlsplit(url)
    return f"Redis at {where.hostname}:{where.port or PORT}" if where.hostname else f"Redis at {where.path}"


def hidden(url: str) -> str:
    """Return ``url`` without its passwords."""
    url = re.sub(r"(://[^:@/]*:)[^/]*@", r"\1***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", url)


def check_options(query: str, allowed: tuple[str, ...]) -> dict[str, str]:
    """Return the options of a URL; raises InvalidRequestError if one would change how we talk to Redis."""
    options = {option: values[-1] for option, values in parse_qs(query).items()}
    if unknown := options.keys() - set(allowed):
        listed = ", ".join(sorted(unknown))
        raise InvalidRequestError(
            f"the Redis URL has options that cannot be set ({listed}): use {', '.join(allowed)}"
        )
    return options


def _nodes(url: str, hosts: str, port: int) -> tuple[Node, ...]:
    nodes = []
    for each in hosts.split(","):
        found = _HOST.fullmatch(each)
        if found is None or not 0 < int(found["port"] or port) < 65_536:
            raise _refused(url, f"{each!r} is not a host and its port; join several with commas")
        nodes.append(Node(found["six"] or found["host"], int(found["port"] or port)))
    return tuple(nodes)


def _login(user: str, password: str) -> str:
    return f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""


def _refused(url: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{hidden(url)!r} is not a Redis URL: {why}")
