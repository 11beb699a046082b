"""Whatever stands in a stream: it is a request or a refusal, and never the end of a worker."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from conftest import Workers, wait_until
from gristmill import Client, keys, wire
from gristmill.errors import WireError
from gristmill.wire import Refusal, Request
from gristmill_worker.jobs import Judge
from gristmill_worker.sources.base import Delivery

NAMES = [b"id", b"body", b"reply", b"deadline", b"ttl", b"trace", b"text", b""]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["text", "pair", "options", "tensors", "x"]), JSON, max_size=4)
NUMBERS = st.integers(-(10**20), 10**20).map(lambda number: str(number).encode())


def dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=str)
    except TypeError:  # an integer of more than 64 bits, a lone surrogate
        return repr(value).encode("utf-8", "replace")


VALUES = st.binary(max_size=300) | NUMBERS | (JSON | OBJECTS).map(dumps)
FIELDS = st.dictionaries(st.sampled_from(NAMES) | st.binary(max_size=20), VALUES, max_size=8)


@given(FIELDS)
@settings(max_examples=1000, deadline=None)
def test_any_entry_is_a_request_or_a_refusal(fields: dict[bytes, bytes]) -> None:
    decoded = wire.decode_request(fields, 200)
    assert isinstance(decoded, Request | Refusal)
    if isinstance(decoded, Request):
        assert wire.check_id(decoded.id) == decoded.id
        assert len(decoded.body) <= 200
    judge = Judge("w", "m", max_deliveries=5, max_body_bytes=200)
    jobs, refused = judge.read([Delivery(b"1-1", fields, 1)])
    assert len(jobs) + len(refused) == 1
    for outcome in refused:
        if outcome.result is not None:
            assert wire.decode_result(wire.encode_result(outcome.result)).id == outcome.result.id


@given(st.binary(max_size=300) | (JSON | OBJECTS).map(dumps))
@settings(max_examples=1000, deadline=None)
def test_any_bytes_are_results_or_a_wire_error(data: bytes) -> None:
    for decode in (wire.decode_result, wire.decode_results, wire.decode_body):
        with suppress(WireError):
            decode(data)


def entry(chooser: random.Random) -> list[bytes]:
    """Return fields of something that may look like a request."""
    odd: list[Any] = [
        None,
        True,
        -1,
        1e308,
        "",
        "bread",
        " \n",
        "\u0000",
        "🌾" * 50,
        [],
        {},
        [[]],
        {"text": "a"},
    ]

    def value() -> Any:
        return chooser.choice(odd)

    bodies = [
        {"text": value()},
        {"text": "bread", "pair": value()},
        {"text": "bread", "options": value()},
        {"text": "bread", "options": {"top_k": value(), "truncate": value()}},
        {"text": "bread", "options": {chooser.choice(["top_k", "encoding", "x"]): value()}},
        {"tensors": value()},
        value(),
    ]
    body = orjson.dumps(chooser.choice(bodies))
    if chooser.random() < 0.3:
        body = chooser.choice([b"", b"{", body[:-1], chooser.randbytes(40), b'{"text": "\xff"}', b"[" * 5000])
    fields = {b"id": f"f-{chooser.randrange(10**9)}".encode(), b"body": body}
    for _ in range(chooser.randrange(3)):
        some = [b"", b"0", b"-1", b"9" * 30, b"1e3", b"\x00", b"a b", b"reader", chooser.randbytes(20)]
        fields[chooser.choice(NAMES)] = chooser.choice(some)
    if chooser.random() < 0.1:
        del fields[chooser.choice(list(fields))]
    flat = [part for pair in fields.items() for part in pair]
    return flat or [b"x", b"y"]


def test_no_entry_ends_a_worker_and_all_leave_the_stream(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    chooser = random.Random(20)
    process = workers.start(tiny_classifier, config="{max_deliveries: 2}")
    redis.set(keys.reply(queue, "reader"), "no stream")
    for _ in range(400):
        redis.execute_command("XADD", keys.requests(queue), "*", *entry(chooser))
    assert client.score(queue, "the miller grinds the corn")
    wait_until(lambda: redis.xlen(keys.requests(queue)) == 0)
    assert redis.execute_command("XPENDING", keys.requests(queue), keys.GROUP)["pending"] == 0
    assert process.poll() is None
    log = workers.log().read_text()
    assert "window_failed" not in log
    assert "take_failed" not in log
    for key in redis.scan_iter(f"gm:{{{queue}}}:result:*", count=1000):
        stored = redis.get(key)
        assert isinstance(stored, bytes)
        assert stored == wire.DONE or wire.decode_result(stored).status in {"ok", "error", "expired"}
