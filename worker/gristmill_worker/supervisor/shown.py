"""Where a machine's /metrics and probes are, which a reload may move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gristmill.errors import InputFileError
from gristmill_worker import health
from gristmill_worker.depths import Readers
from gristmill_worker.settings import Settings, parse_address
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
        before = self._at
        port = None if wanted is None else parse_address(wanted)[1]
        if self._server is not None and self._server.server_address[1] == port:
            self.close()  # first: it is in the way
        try:
            readers = Readers(known.values())
            server = None if wanted is None else health.serve(wanted, self._provide, readers)
        except InputFileError:
            if before is not None and self._at is None:
                self._readers = Readers(self._known.values())
                self._server, self._at = health.serve(before, self._provide, self._readers), before
            raise
        self.close()
        self._server, self._at, self._readers = server, wanted, readers

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._at = None
