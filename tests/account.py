"""The chaos test's books: what every request has to be answered, and what it was answered."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from chaos_worker import CRASH, HANG
from graphs import NAN_ROW, ROWS
from gristmill import Client, Result, wire
from gristmill.errors import ErrorCode
from gristmill.mailbox import Mailbox

Rows = tuple[int, ...]
Expected = Any  # the value of a healthy request, or the code of its error


def expected(rows: Rows) -> Expected:
    """Return what the lookup graph has to answer."""
    if any(row >= ROWS for row in rows):
        return ErrorCode.ENGINE_ERROR
    if any(row == NAN_ROW for row in rows):
        return ErrorCode.INVALID_OUTPUT
    if any(row in {CRASH, HANG} for row in rows):
        return ErrorCode.DEAD_LETTERED
    return {"rows": [[2.0 * (row % ROWS), 2.0 * (row % ROWS) + 1] for row in rows]}


def body(rows: Rows) -> dict[str, Any]:
    return {"tensors": {"ids": list(rows)}}


class Account:
    """Every request that was made, every answer that came."""

    def __init__(self) -> None:
        self.expected: dict[str, Expected] = {}
        self.answers: dict[str, Result] = {}
        self.pushes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.doubled: set[str] = set()
        self._lock = threading.Lock()

    def ask(self, asked: dict[str, Expected]) -> None:
        with self._lock:
            self.expected |= asked

    def answer(self, request_id: str, result: Result) -> None:
        """Enter an answer; a second one has to be the same to the last digit of its times."""
        want = self.expected[request_id]
        right = result.value == want if result.ok else result.error is not None and result.error[0] == want
        with self._lock:
            if not right:
                self.wrong.append(f"{request_id}: {result} instead of {want}")
            # Only what tells two runs apart: the values of 200,000 requests are no use here.
            mark = Result(request_id, result.status, worker=result.worker, timing_ms=result.timing_ms)
            if self.answers.setdefault(request_id, mark) != mark:
                self.doubled.add(request_id)

    def watch(self, client: Client, queue: str) -> None:
        """Count each push that ``client`` receives."""
        box = client._core.mailbox(queue)
        client._core._mailboxes[queue] = CountingMailbox(queue, box.key, self)

    def push(self, request_id: str) -> None:
        with self._lock:
            self.pushes[request_id] += 1


class CountingMailbox(Mailbox):
    """Enters each push that it receives into an account."""

    def __init__(self, queue: str, key: str, account: Account) -> None:
        super().__init__(queue, key)
        self._account = account

    def feed(self, reply: Any) -> None:
        for _, entries in reply or ():
            for _, fields in entries:
                for result in wire.decode_results(wire.pairs(fields).get(b"results", b"[]")):
                    self._account.push(result.id)
        super().feed(reply)
