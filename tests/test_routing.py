"""URLs of several servers, and which of them a command goes to: no server is needed to see that."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from redis import exceptions
from redis.crc import key_slot

from gristmill import AsyncClient, Client, urls
from gristmill.cluster import ClusterRouter, key_of
from gristmill.core import Core
from gristmill.errors import BrokerUnavailable, InvalidRequestError
from gristmill.ops import Read, Script, Sleep
from gristmill.routing import Place, Router, Send
from gristmill.sentinel import SentinelRouter

A, B, C = (f"redis://10.0.0.{i}:6379" for i in (1, 2, 3))
SLOTS = [
    [0, 8000, [b"10.0.0.1", 6379, b"a"], [b"10.0.0.9", 6379, b"r"]],
    [8001, 16383, [b"10.0.0.2", 6379, b"b"]],
]
SENTINELS = [f"redis://s{i}:26379" for i in (1, 2, 3)]


def servers(url: str) -> urls.Servers:
    found = urls.parse(url)
    assert found is not None
    return found


class Dialogue:
    """Answers what a route asks for, with what is expected and what to reply."""

    def __init__(self, router: Router, *commands: tuple[Any, ...]) -> None:
        self._route: Generator[Send, list[Any], list[Any]] = router.route(commands)
        self._next = next(self._route)

    def answer(self, url: str, replies: Sequence[Any] | Exception) -> tuple[Any, ...]:
        """Check where the route sends to, reply, and return the commands."""
        sent = self._next
        assert sent.place.url == url
        self.result: list[Any] = []
        try:
            if isinstance(replies, Exception):
                self._next = self._route.throw(replies)
            else:
                assert len(replies) == len(sent.commands)
                self._next = self._route.send(list(replies))
        except StopIteration as stop:
            self.result = stop.value
        return tuple(sent.commands)


class TestUrls:
    def test_hosts_logins_and_options_are_read(self) -> None:
        found = servers(
            "rediss+sentinel://ann:p%40ss@h1,[::1]:7,h3:8/my%20mill/3"
            "?sentinel_password=a%2Fb&ssl_ca_certs=%2Fca.pem&sentinel_username=eve"
        )
        assert found.nodes == (("h1", 26379), ("::1", 7), ("h3", 8))
        assert found.service == "my mill"
        assert found.node_url(urls.Node("x", 1)) == "rediss://ann:p%40ss@x:1/3?ssl_ca_certs=%2Fca.pem"
        assert found.sentinel_url(found.nodes[1]) == "rediss://eve:a%2Fb@[::1]:7?ssl_ca_certs=%2Fca.pem"
        assert found.name == "Redis 'my mill' (sentinels h1:26379, [::1]:7, h3:8)"
        found = servers("redis+cluster://:secret@h1,h2:7000")
        assert (found.service, found.node_url(found.nodes[0])) == ("", "redis://:secret@h1:6379")
        assert found.name == "Redis Cluster (h1:6379, h2:7000)"

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("redis+sentinel://h1:26379", "name of the service is missing"),
            ("redis+sentinel:///mill", "is not a host"),
            ("redis+sentinel://h1,/mill", "is not a host"),
            ("redis+sentinel://h1:x/mill", "is not a host"),
            ("redis+sentinel://h1:70000/mill", "is not a host"),
            ("redis+sentinel://h1/mill/zero", "a database's number"),
            ("redis+sentinel://h1/mill/0/1", "a database's number"),
            ("redis+sentinel://h1/mill?db=1", "options that cannot be set"),
            ("redis+sentinel://h1/mill?ssl_cert_reqs=none", "not a Redis URL"),
            ("redis+cluster://h1/1", "no other database than 0"),
            ("redis+cluster://h1?sentinel_password=x", "options that cannot be set"),
            ("rediss+cluster://h1?ssl_cert_reqs=maybe", "not a Redis URL"),
            ("redis+cluster://h1#x", "not a Redis URL"),
            ("redis+other://h1", "not a Redis URL"),
            ("redis://h1:1,h2:2", "not a Redis URL"),
        ],
    )
    def test_a_url_that_is_none_is_refused_before_anything_is_sent(self, url: str, words: str) -> None:
        for kind in (Client, AsyncClient):
            with pytest.raises(InvalidRequestError, match=words):
                kind(url)

    def test_passwords_are_not_shown(self) -> None:
        for url in (
            "redis+sentinel://ann:secret@h1:x/mill",
            "redis://:secret@h1:x",
            "redis+cluster://h1/1?sentinel_password=secret",
            "reddis://ann:secret@h",
        ):
            with pytest.raises(InvalidRequestError) as caught:
                Client(url)
            assert "secret" not in str(caught.value)


class TestKeys:
    @pytest.mark.parametrize(
        ("command", "key"),
        [
            (("GET", "a"), b"a"),
            (("XGROUP CREATE", "a", "workers", "0"), b"a"),
            (("XGROUP", "DESTROY", "a", "workers"), b"a"),
            (("XINFO CONSUMERS", "a", "workers"), b"a"),
            (("EVALSHA", "sha", 2, "a", "b", "c"), b"a"),
            (("EVAL", "return 1", 0), None),
            (("XREAD", "COUNT", 100, "BLOCK", 5, "STREAMS", "a", "0"), b"a"),
            (("XREADGROUP", "GROUP", "workers", "STREAMS", "COUNT", 1, "STREAMS", "a", "b", ">", ">"), b"a"),
            (("PING",), None),
            (("INFO", "memory"), None),
            (("CONFIG", "GET", "save"), None),
        ],
    )
    def test_the_key_of_a_command(self, command: tuple[Any, ...], key: bytes | None) -> None:
        assert key_of(command) == key


class TestCluster:
    def router(self, hosts: str = "10.0.0.1") -> ClusterRouter:
        return ClusterRouter(servers(f"redis+cluster://{hosts}"))

    def test_commands_of_one_queue_are_one_send(self) -> None:
        router = self.router()
        assert key_slot(b"gm:{q}:a") > 8000
        commands = [("GET", "gm:{q}:a"), ("EXISTS", "gm:{q}:b"), ("PING",)]
        talk = Dialogue(router, *commands)
        assert talk.answer(A, [SLOTS]) == (("CLUSTER", "SLOTS"),)
        assert talk.answer(B, [b"1", 0, b"PONG"]) == tuple(commands)
        assert talk.result == [b"1", 0, b"PONG"]
        talk = Dialogue(router, ("PING",))  # where the last key was
        assert talk.answer(B, [b"PONG"]) == (("PING",),)

    def test_only_what_was_redirected_is_sent_again(self) -> None:
        router = self.router()
        slot = key_slot(b"gm:{q}:a")
        commands = [("GET", "gm:{q}:a"), ("GET", "gm:{q}:b"), ("GET", "gm:{q}:c")]
        talk = Dialogue(router, *commands)
        talk.answer(A, [SLOTS])
        moved = exceptions.MovedError(f"{slot} 10.0.0.3:6379")
        talk.answer(B, [b"1", moved, moved])
        assert talk.answer(C, [b"2", b"3"]) == tuple(commands[1:])
        assert talk.result == [b"1", b"2", b"3"]
        assert Dialogue(router, commands[0]).answer(C, [b"1"])  # remembered

    def test_who_is_asked_for_a_moving_slot_is_told_so_and_not_remembered(self) -> None:
        router = self.router()
        talk = Dialogue(router, ("GET", "gm:{q}:a"), ("GET", "gm:{q}:b"))
        talk.answer(A, [SLOTS])
        talk.answer(B, [exceptions.AskError("1 :7000"), b"2"])  # the same host
        again = talk.answer("redis://10.0.0.2:7000", [b"OK", b"1"])
        assert again == (("ASKING",), ("GET", "gm:{q}:a"))
        assert talk.result == [b"1", b"2"]
        assert Dialogue(router, ("GET", "gm:{q}:a")).answer(B, [b"1"])

    def test_nothing_is_sent_again_after_a_lost_connection_and_another_node_is_asked(self) -> None:
        router = self.router("10.0.0.1,10.0.0.3")
        talk = Dialogue(router, ("GET", "gm:{q}:a"))
        talk.answer(A, [SLOTS])
        with pytest.raises(exceptions.ConnectionError):
            talk.answer(B, exceptions.ConnectionError("gone"))
        talk = Dialogue(router, ("GET", "gm:{q}:a"))
        talk.answer(A, exceptions.ConnectionError("gone as well"))
        talk.answer(B, [[]])  # just started, knows of no slots
        talk.answer(C, [[[0, 16383, [None, 7000, b"c"]]]])
        talk.answer("redis://10.0.0.3:7000", [b"1"])
        assert talk.result == [b"1"]

    def test_a_slot_without_a_node_and_endless_redirects_are_errors_that_pass(self) -> None:
        router = self.router()
        talk = Dialogue(router, ("GET", "gm:{q}:a"))
        with pytest.raises(exceptions.ClusterDownError, match="no node serves slot"):
            talk.answer(A, [SLOTS[:1]])
        talk = Dialogue(router, ("GET", "gm:{q}:a"))
        talk.answer(A, [SLOTS])
        for url in (B, C, B, C, B):
            there = "10.0.0.3" if url == B else "10.0.0.2"
            talk.answer(url, [exceptions.MovedError(f"1 {there}:6379")])
        with pytest.raises(exceptions.ClusterDownError, match="redirect to each other"):
            talk.answer(C, [exceptions.MovedError("1 10.0.0.2:6379")])


def test_after_a_lost_connection_a_reply_stream_is_looked_at_before_it_is_read_on() -> None:
    """Another server may have it by now, whose clock is behind: its next entries have lower IDs."""
    core = Core(max_length=1, max_body_bytes=1, retry_s=1.0)
    box = core.mailbox("q")
    box.last_id, box.renew_at = "1700000000000-0", math.inf
    read = core.read(box, 1.0, 0, time.monotonic() + 60)
    assert isinstance(next(read), Read)
    assert isinstance(read.throw(BrokerUnavailable("gone")), Sleep)
    listen = core.listen(box, 0.0)
    assert next(listen) == Script("listen", [box.key], [600, "1700000000000-0"])
    with pytest.raises(StopIteration) as end:
        listen.send(1)  # not the stream that was read
    assert end.value.value is True
    assert box.read_command(1)[-1] == "0"


class TestSentinel:
    def router(self) -> SentinelRouter:
        return SentinelRouter(servers("redis+sentinel://s1,s2,s3/mill"))

    def names(self, url: str, epoch: int) -> list[Any]:
        host, port = url.removeprefix("redis://").split(":")
        return [[host.encode(), port.encode()], [b"name", b"mill", b"config-epoch", str(epoch).encode()]]

    def test_an_answer_that_is_older_than_a_known_one_is_not_believed(self) -> None:
        router = self.router()
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[0], self.names(B, 5))
        with pytest.raises(exceptions.ConnectionError):
            talk.answer(B, exceptions.ConnectionError("gone"))
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[1], self.names(A, 4))  # has lost touch
        talk.answer(SENTINELS[2], self.names(C, 6))
        talk.answer(C, [b"PONG"])
        assert talk.result == [b"PONG"]

    def test_sentinels_that_were_set_up_anew_are_believed(self) -> None:
        router = self.router()
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[0], self.names(B, 5))
        talk.answer(B, [exceptions.ReadOnlyError("READONLY You can't write against a read only replica.")])
        talk = Dialogue(router, ("PING",))
        for sentinel in (1, 2, 0):
            talk.answer(SENTINELS[sentinel], self.names(A, 0))
        talk.answer(A, [b"PONG"])

    def test_sentinels_that_are_away_do_not_take_a_primary_away(self) -> None:
        router = self.router()
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[0], self.names(B, 5))
        with pytest.raises(exceptions.ConnectionError):
            talk.answer(B, exceptions.ConnectionError("cut"))
        talk = Dialogue(router, ("PING",))
        for sentinel in (1, 2, 0):
            talk.answer(SENTINELS[sentinel], exceptions.TimeoutError("away"))
        talk.answer(B, [b"PONG"])
        assert talk.result == [b"PONG"]

    def test_a_primary_is_asked_what_it_is_and_a_sentinel_is_not(self) -> None:
        router = self.router()
        route = router.route([("PING",)])
        assert next(route).place == Place(SENTINELS[0], timeout_s=2.0)
        assert route.send(self.names(B, 5)).place == Place(B, primary=True)

    def test_a_later_primary_is_raised_as_a_lost_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        router = self.router()
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[0], self.names(B, 5))
        monkeypatch.setattr("gristmill.sentinel.GLANCE_S", 0.0)
        talk.answer(B, [b"PONG"])
        router._glance_at = 0.0
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[1], self.names(A, 4))  # nothing new
        talk.answer(B, [b"PONG"])
        talk = Dialogue(router, ("PING",))
        with pytest.raises(exceptions.ConnectionError, match="another primary"):
            talk.answer(SENTINELS[2], self.names(C, 6))
        talk = Dialogue(router, ("PING",))
        talk.answer(SENTINELS[0], exceptions.ConnectionError("away"))  # the primary works
        talk.answer(C, [b"PONG"])
