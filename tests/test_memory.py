"""What requests cost in Redis, and that nothing of them stays."""

from conftest import Server
from memory import measure


def test_nothing_is_left_of_requests_whose_results_have_expired(own_redis: Server) -> None:
    before, waiting, pending, kept, after = measure(own_redis.url, 6000)
    assert waiting.keys == before.keys + 6000  # one key a request: its mark
    assert pending.keys == kept.keys == waiting.keys
    assert after.keys == before.keys
    assert waiting.bytes < 600
    assert pending.bytes < waiting.bytes + 250
    assert kept.bytes < 800
    assert after.bytes < 20
