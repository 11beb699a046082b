"""What need not run: requests that equal another one of their window, and those whose answer is still known.

Requests are equal if their bodies are the same JSON, whatever its spaces and the order of its names: so
texts, tensors and options count, and nothing else of a request does.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gristmill_worker.jobs import Answer, Job
from gristmill_worker.tasks.base import ItemError

DIGEST_BYTES: Final = 16
ENTRY_BYTES: Final = 300  # of memory that an answer takes beside its JSON


class Answers:
    """The answers that were used last, in up to ``max_bytes`` of memory: 0 keeps none. For any threads.

    An answer counts with the bytes of its JSON and ENTRY_BYTES.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        return self._max_bytes > 0

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> Answer | None:
        with self._lock:
            answer = self._kept.get(digest)
            if answer is not None:
                self._kept.move_to_end(digest)
            return answer

    def put(self, digest: bytes, answer: Answer) -> None:
        """Keep ``answer`` and forget others until there is room; one larger than all room is not kept."""
        size = _memory_of(answer)
        if size > self._max_bytes:
            return
        with self._lock:
            if (known := self._kept.pop(digest, None)) is not None:
                self._bytes -= _memory_of(known)
            self._kept[digest] = answer
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= _memory_of(self._kept.popitem(last=False)[1])


def _memory_of(answer: Answer) -> int:
    return len(answer.json) + ENTRY_BYTES


@dataclass(slots=True)
class Parted:
    """The jobs of a window: those to run, some of them with twins, and those whose answer is known."""

    to_run: list[Job] = field(default_factory=list)
    twins: int = 0
    known: list[tuple[Job, Answer]] = field(default_factory=list)


class Sharing:
    """Parts windows, and keeps answers for later ones if ``cache_bytes`` is not 0."""

    def __init__(self, cache_bytes: int = 0) -> None:
        self.answers: Final = Answers(cache_bytes)

    def part(self, jobs: Sequence[Job]) -> Parted:
        """Part a window. What was delivered before is nobody's twin: it runs alone."""
        parted = Parted()
        firsts: dict[bytes, Job] = {}
        for job in jobs:
            key = _key(job)
            if self.answers.on:
                job.digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()
                if (answer := self.answers.get(job.digest)) is not None:
                    parted.known.append((job, answer))
                    continue
            first = firsts.setdefault(key, job) if not job.delivery.suspect else job
            if first is job:
                parted.to_run.append(job)
            else:
                first.twins.append(job)
                parted.twins += 1
        return parted

    def keep(self, job: Job, value: Any) -> None:
        """Keep the answer to a job, unless it is an error."""
        if isinstance(value, ItemError):
            return
        # orjson's bytes stay in its buffer of 4 KiB or more: only a copy takes no more room than it needs.
        json = bytes(memoryview(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)))
        self.answers.put(job.digest, Answer(json, job.item.length, job.item.truncated))


def _key(job: Job) -> bytes:
    try:
        return orjson.dumps(job.body, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # nested deeper than can be written, though not than can be read
        return job.request.body
