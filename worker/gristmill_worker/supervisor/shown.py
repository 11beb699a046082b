"""Where a machine's /metrics and probes are, which a reload may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gristmill.errors import InputFileError
from gristmill_worker import health
from gristmill_worker.settings import Settings
from gristmill_worker.vitals import Snapshot


class Shown:
    """Serves /metrics and the probes of all workers, which ``provide`` returns, where that is wanted."""

    def __init__(self, provide: Callable[[], Sequence[Snapshot]]) -> None:
        self._provide = provide
        self._server: health.Server | None = None
        self._at: tuple[str, str] | None = None  # the address, and the Redis that queue depths are read from

    def serve(self, found: Sequence[Settings]) -> None:
        """Serve where ``found`` wants it. Raises InputFileError; what was served before still is then."""
        addresses = {settings.metrics: settings.redis for settings in reversed(found) if settings.metrics}
        if len(addresses) > 1:
            raise InputFileError(
                f"metrics: one address is for all workers, not {', '.join(sorted(addresses))}"
            )
        wanted = next(iter(addresses.items()), None)
        if wanted == self._at:
            return
        if wanted is not None and self._at is not None and wanted[0] == self._at[0]:
            self.close()  # only one can listen there
        server = None if wanted is None else health.serve(wanted[0], self._provide, wanted[1])
        self.close()
        self._server, self._at = server, wanted

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._at = None
