"""The codec: what it writes it reads back, and nothing that it is given makes it fail in another way."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import InvalidRequestError, ScoringError, keys, wire
from gristmill.errors import ErrorCode, RequestExpired, WireError
from gristmill.wire import Refusal, Request, Result

IDS = st.from_regex(r"[!-~é漢]{1,200}", fullmatch=True)


def as_entry(request: Request) -> dict[bytes, bytes]:
    flat = [x if isinstance(x, bytes) else str(x).encode() for x in request.fields()]
    return dict(zip(flat[::2], flat[1::2], strict=True))


@given(
    st.builds(
        Request,
        id=IDS,
        body=st.binary(max_size=100),
        reply=st.none() | st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
        deadline_ms=st.none() | st.integers(0, 2**53),
        ttl_s=st.none() | st.integers(0, wire.MAX_TTL_S),
        trace=st.none() | st.from_regex(r"00-[1-9a-f]{32}-[1-9a-f]{16}-0[01]", fullmatch=True),
    )
)
def test_a_request_survives_the_round_trip(request: Request) -> None:
    assert wire.decode_request(as_entry(request)) == request


def test_a_result_of_a_worker_that_did_not_count_had_one_attempt() -> None:
    assert wire.decode_result(b'{"id": "a", "status": "ok", "value": 3}').attempts == 1


def test_a_result_survives_the_round_trip() -> None:
    result = Result(
        id="a",
        status="ok",
        value=[{"label": "x", "score": 0.5}],
        model="m@1",
        worker="w",
        tokens=7,
        truncated=True,
        timing_ms={"queued": 1.0, "encode": 2.0, "run": 3.0},
        batch={"size": 1, "shape": [1, 16]},
    )
    assert wire.decode_result(wire.encode_result(result)) == result
    assert wire.decode_results(b"[" + wire.encode_result(result) + b"]") == [result]


@given(st.dictionaries(st.sampled_from([b"id", b"body", b"reply", b"deadline", b"ttl", b"x"]), st.binary()))
def test_no_entry_fails_otherwise_than_with_a_wire_error(entry: dict[bytes, bytes]) -> None:
    request = wire.decode_request(entry)
    if isinstance(request, Request):
        with suppress(WireError):
            wire.decode_body(request.body)
    else:
        assert request.error.message


@given(st.binary())
def test_no_result_record_fails_otherwise_than_with_a_wire_error(data: bytes) -> None:
    for decode in (wire.decode_result, wire.decode_results):
        with suppress(WireError):
            decode(data)


@pytest.mark.parametrize(
    ("entry", "code", "has_id"),
    [
        ({b"body": b"{}"}, ErrorCode.BAD_REQUEST, False),
        ({b"id": b"", b"body": b"{}"}, ErrorCode.BAD_REQUEST, False),
        ({b"id": b"a b", b"body": b"{}"}, ErrorCode.BAD_REQUEST, False),
        ({b"id": b"\xff", b"body": b"{}"}, ErrorCode.BAD_REQUEST, False),
        ({b"id": b"a"}, ErrorCode.BAD_REQUEST, True),
        ({b"id": b"a", b"body": b"x" * 2_000_000}, ErrorCode.TOO_LARGE, True),
        ({b"id": b"a", b"body": b"{}", b"ttl": b"-1"}, ErrorCode.BAD_REQUEST, True),
        ({b"id": b"a", b"body": b"{}", b"ttl": b"1_0"}, ErrorCode.BAD_REQUEST, True),
        ({b"id": b"a", b"body": b"{}", b"ttl": b"99999999999999"}, ErrorCode.BAD_REQUEST, True),
        ({b"id": b"a", b"body": b"{}", b"deadline": b"soon"}, ErrorCode.BAD_REQUEST, True),
        ({b"id": b"a", b"body": b"{}", b"reply": b"a:b"}, ErrorCode.BAD_REQUEST, True),
    ],
)
def test_a_broken_entry_is_named(entry: dict[bytes, bytes], code: ErrorCode, has_id: bool) -> None:
    refusal = wire.decode_request(entry)
    assert isinstance(refusal, Refusal)
    assert refusal.error.code == code
    assert refusal.id == ("a" if has_id else None)


def test_a_refusal_knows_who_can_be_told() -> None:
    entry = {b"id": b"a", b"body": b"{}", b"reply": b"me", b"ttl": b"0", b"deadline": b"soon"}
    refusal = wire.decode_request(entry)
    assert isinstance(refusal, Refusal)
    assert (refusal.id, refusal.reply, refusal.ttl_s) == ("a", "me", 0)


@pytest.mark.parametrize("body", [b"", b"nope", b"[]", b"1", b'"text"', b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_body(body)


def test_ids_are_uuids_of_version_7_in_the_order_of_time() -> None:
    first = wire.new_id()
    time.sleep(0.002)
    second = wire.new_id()
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", first)
    assert first < second
    assert abs(int(first.replace("-", "")[:12], 16) - time.time() * 1000) < 60_000


@pytest.mark.parametrize("bad", ["", "a b", "a\nb", "x" * 201, "\ud800", "a\x00"])
def test_an_illegal_id_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequestError):
        wire.check_id(bad)


@pytest.mark.parametrize("bad", ["", "a b", "ä", "x" * 65, "a{b}", "a:b"])
def test_an_illegal_queue_name_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequestError):
        keys.check_queue(bad)


def test_a_body_that_cannot_be_sent_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        wire.encode_body({"text": "\ud800"})
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        wire.encode_body({"text": object()})
    with pytest.raises(InvalidRequestError) as caught:
        wire.encode_body({"text": "x" * wire.MAX_BODY_BYTES})
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_unwrap_gives_the_value_or_raises() -> None:
    assert Result("a", "ok", value=3).unwrap() == 3
    with pytest.raises(ScoringError) as failed:
        Result("a", "error", error=("too_long", "shorten it")).unwrap()
    assert failed.value.code == "too_long"
    with pytest.raises(RequestExpired):
        Result("a", "expired", error=("expired", "late")).unwrap()
