"""Where a machine's /metrics and probes are, which a reload may move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gristmill.errors import InputFileError
from gristmill_worker import health
from gristmill_worker.depths import Readers
from gristmill_worker.settings import Settings
from gristmill_worker.vitals import Snapshot


class Shown:
    """Serves /metrics and the probes of all workers, which ``provide`` returns, where that is wanted."""

    def __init__(self, provide: Callable[[], Sequence[Snapshot]]) -> None:
        self._provide = provide
        self._server: health.Server | None = None
        self._at: str | None = None  # the address
        self._readers = Readers()
        self._known: dict[str, Settings] = {}  # by queue; one that is left out now may be served for a while

    def serve(self, found: Sequence[Settings]) -> None:
        """Serve where ``found`` wants it. Raises InputFileError; what was served before still is then."""
        addresses = {settings.metrics for settings in found if settings.metrics}
        if len(addresses) > 1:
            raise InputFileError(
                f"metrics: one address is for all workers, not {', '.join(sorted(addresses))}"
            )
        wanted = next(iter(addresses), None)
        known = self._known | {each.queue: each for each in found}
        if wanted == self._at:
            self._readers.know(found)
        else:
            self._move(wanted, known)
        self._known = known

    def _move(self, wanted: str | None, known: Mapping[str, Settings]) -> None:
        readers = Readers(known.values())
        before = self._at
        self.close()  # first: it may be in the way, at the same port of another address
        try:
            self._listen(wanted, readers)
        except InputFileError:
            self._listen(before, Readers(self._known.values()))
            raise

    def _listen(self, address: str | None, readers: Readers) -> None:
        self._server = None if address is None else health.serve(address, self._provide, readers)
        self._at, self._readers = address, readers

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._at = None
