"""The micro-batching loop: take -> encode -> plan -> run -> finish.

Three threads overlap: one takes, encodes and plans, one runs the engine, one decodes and finishes. The engine
thus never waits for Redis or the tokenizer while there is work; one window runs and at most one more is held.
What comes alone to an idle worker goes through all of it in the first thread. What a dead worker left, being
older than what is held, goes before it, as do requests of high priority.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import Queue
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill.keys import HIGH
from gristmill_worker.batching.linger import Bounds, drain
from gristmill_worker.batching.planner import Planner
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.engines.base import Engine, Shape, may_pass
from gristmill_worker.handoff import Handoff
from gristmill_worker.jobs import Batch, BatchRun, Job, Judge, Ran, everyone, part_late
from gristmill_worker.settings import BatchSettings
from gristmill_worker.sharing import Sharing
from gristmill_worker.sources.base import Delivery, Outcome, Source
from gristmill_worker.storing import BACKOFF_S, FINISHED_TOGETHER, Storing
from gristmill_worker.tasks.base import Encoded, ItemError, Task
from gristmill_worker.telemetry import logger
from gristmill_worker.vitals import Vitals

LOGGED_IDS: Final = 20  # of a window that failed
LOOK_S: Final = 0.1  # for what is urgent, while all places are taken
GC_OBJECTS: Final = 20_000  # between two looks for cycles: several windows' worth, which by then are gone


class Loop:
    """Runs until ``stop`` is set, and then finishes what it has taken."""

    def __init__(
        self,
        source: Source,
        engine: Engine,
        task: Task,
        batch: BatchSettings,
        sizing: Sizing,
        judge: Judge,
        vitals: Vitals,
        sharing: Sharing,
        stop: threading.Event,
    ) -> None:
        self._source = source
        self._engine = engine
        self._task = task
        self._batch = batch
        self._max_wait_s = batch.max_wait_ms / 1000
        self._reached = False  # Redis, once
        self._bounds = Bounds(batch.max_items, batch.max_bytes, judge.max_body_bytes)
        self._planner = Planner(engine.shapes, sizing.costs)
        self._lengths = sizing.lengths
        self._judge = judge
        self._sharing = sharing
        self._stop = stop
        self._storing = Storing(source, judge, vitals, stop)
        self._handoff = Handoff()
        self._ran: Queue[Ran | list[Outcome] | None] = Queue(maxsize=8)
        self._vitals = vitals
        self.counters = vitals.counters
        self.on_ran: list[Callable[[Ran], None]] = []  # told of each batch; they do not raise

    def run(self) -> None:
        """Take and process windows. Survives every error; only a refused login at the start is raised."""
        engine = threading.Thread(target=self._run_batches, name="engine", daemon=True)
        finisher = threading.Thread(target=self._finish_batches, name="finish", daemon=True)
        gc.freeze()  # what is loaded stays: walking it again and again would hold up the requests
        gc.set_threshold(GC_OBJECTS)
        engine.start()
        finisher.start()
        try:
            self._feed()
        finally:
            self._handoff.close()
            engine.join()
            self._ran.put(None)
            finisher.join()

    # The first thread: take -> encode -> plan

    def _feed(self) -> None:
        wait_s = LOOK_S
        while not self._stop.is_set():
            if self._handoff.reserve(wait_s):
                self._vitals.move()
                self._pass_on(self._next(self._take_window))
                wait_s = LOOK_S
            elif batches := self._next(self._take_urgent):
                self._handoff.run_first(batches)
                wait_s = 0.0  # there may be more
            else:
                wait_s = LOOK_S

    def _take_window(self) -> list[Delivery]:
        window = drain(self._source.take, self._bounds, self._max_wait_s)
        self._reached = True
        self._storing.reached_redis()
        return window

    def _take_urgent(self) -> list[Delivery]:
        # It may not ask Redis at all. One of high priority goes before others, not before its like.
        return self._source.take_urgent(self._bounds.room(()), high=not self._handoff.holds_high())

    def _next(self, take: Callable[[], list[Delivery]]) -> list[Batch]:
        """Take a window and plan it; [] where nothing came, or nothing can be had."""
        try:
            with self.counters.stage("take"):
                window = take()
            with self._redelivered_on_error(window):
                return self._prepare(window)
        except BrokerUnavailable as error:
            if not self._reached and not error.retryable:
                raise
            self._storing.wait_for_redis(error)
            self._source.recover()  # a lost reply leaves entries under our name
        except Exception:  # noqa: BLE001 - a worker that stops answers nobody
            logger().exception("take_failed")
            self._source.recover()
            self._stop.wait(BACKOFF_S[1])
        return []

    def _pass_on(self, batches: list[Batch]) -> None:
        """Let a window run for which there is a place."""
        deliveries = [job.delivery for batch in batches for job in batch.jobs]
        idle = self._handoff.is_idle()
        if len(deliveries) == 1 and idle:
            self._run_here(batches[0])
        elif batches and not idle and self._goes_first(deliveries):
            self._handoff.run_first(batches)
        elif batches:
            self._handoff.pass_on(batches)
            if any(delivery.suspect for delivery in deliveries):
                self._handoff.wait_until_idle()  # if it kills this process, nothing else is to blame
            return
        self._handoff.give_back()

    def _goes_first(self, deliveries: Sequence[Delivery]) -> bool:
        high = not self._handoff.holds_high()
        return all(each.deliveries > 1 or (high and each.priority == HIGH) for each in deliveries)

    def _prepare(self, window: Sequence[Delivery]) -> list[Batch]:
        jobs, refused = self._judge.read(window)
        jobs, known = self._share(jobs)
        refused += known
        suspects = [[job] for job in jobs if job.delivery.suspect]
        fresh = [job for job in jobs if not job.delivery.suspect]
        batches: list[Batch] = []
        for group in [*suspects, fresh]:
            with self.counters.stage("encode"):
                items = self._encode(group)
            good: list[Job] = []
            for job, item in zip(group, items, strict=True):
                if isinstance(item, ItemError):
                    refused += [self._judge.failed(each, item.code, item.message) for each in everyone([job])]
                else:
                    job.give(item)
                    good.append(job)
            with self.counters.stage("plan"):
                batches += self._plan(good)
        if refused:
            self._ran.put(refused)
        return batches

    def _share(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Outcome]]:
        """Return the jobs that have to run, and the outcomes of those whose answer is known."""
        parted = self._sharing.part(jobs)
        if self._sharing.answers.on:
            self.counters.add(cache_hits=len(parted.known), cache_misses=len(jobs) - len(parted.known))
        if parted.twins:
            self.counters.add(deduplicated=parted.twins)
        return parted.to_run, [self._judge.known(job, answer) for job, answer in parted.known]

    def _encode(self, jobs: Sequence[Job]) -> list[Encoded | ItemError]:
        if not jobs:
            return []
        started = time.perf_counter()
        try:
            with self._exposing(jobs):
                items = self._task.encode([job.body for job in jobs])
        except Exception as error:  # noqa: BLE001 - one request is to blame: find it by going one by one
            if len(jobs) > 1:
                return [item for job in jobs for item in self._encode([job])]
            logger().warning("request_failed", **jobs[0].named(), error=str(error))
            return [ItemError(f"the request cannot be encoded: {error}")]
        encode_ms = round((time.perf_counter() - started) * 1000, 3)
        for job in jobs:
            job.encode_ms = encode_ms
        return items

    def _plan(self, jobs: Sequence[Job]) -> list[Batch]:
        if not jobs:
            return []
        lengths = [job.item.length for job in jobs]
        self._lengths.add(lengths)
        deadlines = [job.ends_ms() for job in jobs]
        planned = self._planner.plan(lengths, deadlines)
        return [self._assemble([jobs[i] for i in batch.items], batch.shape) for batch in planned]

    def _assemble(self, jobs: list[Job], shape: Shape) -> Batch:
        return Batch(jobs, shape, self._task.assemble([job.item for job in jobs], shape))

    # The second thread: run

    def _run_batches(self) -> None:
        for batch in self._handoff.batches():
            with self._redelivered_on_error([job.delivery for job in everyone(batch.jobs)]):
                for ran in self._run_on_time(batch):
                    self._ran.put(ran)

    def _run_here(self, batch: Batch) -> None:
        """Run and finish in this thread what came alone to an idle worker: hand-offs would only delay it."""
        with self._redelivered_on_error([job.delivery for job in everyone(batch.jobs)]):
            for ran in self._run_on_time(batch):
                with self.counters.stage("finish"):
                    self._storing.store(self._outcomes(ran))

    def _run_on_time(self, batch: Batch) -> Iterator[Ran | list[Outcome]]:
        jobs, late = part_late(batch.jobs)
        if late:
            yield [self._judge.expired(job) for job in late]
            if not jobs:
                return
            batch = self._assemble(jobs, batch.shape)
        yield from self._run_batch(batch)

    def _run_batch(self, batch: Batch) -> Iterator[Ran]:
        """Run one batch; where the engine fails, halve it until the request to blame stands alone."""
        started, started_ms = time.perf_counter(), time.time() * 1000
        outputs, message, passes = None, "", False
        try:
            with self._exposing(batch.jobs), self._vitals.batch(), self.counters.stage("run"):
                outputs = self._engine.run(batch.inputs)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises belongs to its batch
            message, passes = str(error), may_pass(error)
            if len(batch.jobs) > 1:
                middle = len(batch.jobs) // 2
                for half in (batch.jobs[:middle], batch.jobs[middle:]):
                    yield from self._run_batch(self._assemble(half, batch.shape))
                return
        run_ms = round((time.perf_counter() - started) * 1000, 3)
        run = BatchRun(len(batch.jobs), batch.shape, started_ms, run_ms)
        yield Ran(batch.jobs, run, outputs, message, passes)

    # The third thread: finish

    def _finish_batches(self) -> None:
        more = True
        while more:
            ran = self._ran.get()
            outcomes: list[Outcome] = []
            with self.counters.stage("finish"):
                # All that is ready goes in one step: small batches cost more to store than to run.
                while ran is not None:
                    held = everyone(ran.jobs) if isinstance(ran, Ran) else ran
                    with self._redelivered_on_error([each.delivery for each in held]):
                        outcomes += self._outcomes(ran)
                    if len(outcomes) >= FINISHED_TOGETHER or self._ran.empty():
                        break
                    ran = self._ran.get()
                with self._redelivered_on_error([outcome.delivery for outcome in outcomes]):
                    self._storing.store(outcomes)
            more = ran is not None

    def _outcomes(self, ran: Ran | list[Outcome]) -> list[Outcome]:
        if not isinstance(ran, Ran):
            return ran
        for tell in self.on_ran:
            tell(ran)
        if ran.outputs is None:
            return self._failures(ran)
        self._vitals.ran(ran.run)
        items = [job.item for job in ran.jobs]
        with self._exposing(ran.jobs):
            values = self._task.decode(ran.outputs, items)
        self.counters.add(
            batches=1,
            tokens=sum(item.length for item in items),
            padded_tokens=ran.run.shape[0] * ran.run.shape[1],
            engine_us=round(ran.run.run_ms * 1000),
        )
        if self._sharing.answers.on:
            for job, value in zip(ran.jobs, values, strict=True):
                self._sharing.keep(job, value)
        return [
            self._judge.failed(each, value.code, value.message)
            if isinstance(value, ItemError)
            else self._judge.ok(each, value, ran.run)
            for job, value in zip(ran.jobs, values, strict=True)
            for each in (everyone((job,)) if job.twins else (job,))
        ]

    def _failures(self, ran: Ran) -> list[Outcome]:
        """Return the outcome of what the engine failed on for good; the rest is delivered again, later."""
        outcomes: list[Outcome] = []
        for job in everyone(ran.jobs):
            retry_in_s = self._judge.retry_in_s(job) if ran.may_pass else None
            logger().warning("request_failed", **job.named(), error=ran.error, retry_in_s=retry_in_s)
            if retry_in_s is None:
                outcomes.append(self._judge.engine_failed(job, ran))
            else:
                self.counters.add(retries=1)
                self._source.release([job.delivery], retry_in_s)
        return outcomes

    # All three

    def _exposing(self, jobs: Iterable[Job]) -> AbstractContextManager[None]:
        return self._source.exposing(job.delivery for job in everyone(jobs))

    @contextmanager
    def _redelivered_on_error(self, deliveries: Sequence[Delivery]) -> Iterator[None]:
        """Have ``deliveries`` delivered again if the block fails: nobody knows how far each of them got.

        Delivered again each runs alone, and one that fails every time ends in the dead letters.
        """
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer is no Exception
            ids = [each.fields.get(b"id", b"").decode("utf-8", "replace") for each in deliveries[:LOGGED_IDS]]
            logger().error("window_failed", requests=len(deliveries), ids=ids, exc_info=error)
            self._source.release(deliveries)
            time.sleep(BACKOFF_S[0])  # an error that comes at once must not fill the log
