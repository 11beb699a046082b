"""The error tree. Every error that a user can meet is one of these; driver exceptions never leak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Final


class ErrorCode(StrEnum):
    """Codes of failed requests, as they stand in a result's ``error.code``."""

    BAD_REQUEST = "bad_request"  # not JSON, wrong types, unknown options
    EMPTY_INPUT = "empty_input"
    TOO_LONG = "too_long"  # more tokens than the model takes, truncation not allowed
    TOO_LARGE = "too_large"  # more bytes than the queue takes
    ENGINE_ERROR = "engine_error"
    INVALID_OUTPUT = "invalid_output"  # the model answered NaN or infinity
    DEAD_LETTERED = "dead_lettered"  # given up after too many deliveries
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Status(StrEnum):
    """What a result's ``status`` can be."""

    OK = "ok"
    ERROR = "error"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class ExitCode(IntEnum):
    """Exit codes of ``gristmill`` and ``gristmill-worker``."""

    OK = 0
    FAILURE = 1  # an error that no other code names
    USAGE = 2  # wrong arguments
    ROWS_FAILED = 3  # the run finished, and some rows carry an error
    BAD_INPUT = 4  # a file, configuration or model that cannot be used
    BROKER_UNAVAILABLE = 5
    NO_WORKER = 6  # nobody serves the queue
    TIMEOUT = 7  # no result in time
    REQUEST_FAILED = 8  # the result is an error
    FORCED = 9  # a second signal ended a worker before it had drained
    CRASH_LOOP = 10  # workers ended again and again before they were ready
    UNFINISHED = 11  # a bulk run waits or runs
    INTERRUPTED = 130  # Ctrl-C, SIGTERM or SIGHUP


# What a web backend answers for a failed request; the fault is ours where a code is not named.
_HTTP_STATUS: Final[Mapping[str, int]] = {
    ErrorCode.BAD_REQUEST: 422,
    ErrorCode.EMPTY_INPUT: 422,
    ErrorCode.TOO_LONG: 422,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.EXPIRED: 504,
    ErrorCode.CANCELLED: 409,
}


class GristmillError(Exception):
    """Base of all errors of this project.

    ``http_status`` is what a web backend would answer: 4xx if the request is to blame, 503 if it may be sent
    again after a while, 504 if there was no result in time, else 500.
    """

    exit_code: ExitCode = ExitCode.FAILURE
    http_status: int = 500


class InvalidRequestError(GristmillError, ValueError):
    """The request can never be accepted as it is; nothing was sent."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = _HTTP_STATUS.get(code, 422)


class WireError(GristmillError):
    """A stored record does not follow the wire contract."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class BrokerUnavailable(GristmillError):
    """Redis cannot be reached or refuses commands.

    ``retryable`` says whether waiting may help; ``denied`` that login or permission is what lacks;
    ``unwilling`` that Redis answers, and refuses for now whatever is asked: read-only, full, loading, …
    """

    exit_code = ExitCode.BROKER_UNAVAILABLE
    http_status = 503

    def __init__(
        self, message: str, *, retryable: bool = True, denied: bool = False, unwilling: bool = False
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.denied = denied
        self.unwilling = unwilling


class QueueFull(GristmillError):
    """The queue holds as many requests as its admission bound allows; ``accepted`` ones were queued."""

    http_status = 503

    def __init__(self, queue: str, accepted: Sequence[str], refused: int) -> None:
        super().__init__(
            f"queue {queue!r} is full: {refused} of {refused + len(accepted)} requests were refused. "
            "Submit them again later or wait for room (wait_s), add workers, or raise the bound with "
            f"'gristmill queue limit {queue} N'."
        )
        self.queue = queue
        self.accepted = list(accepted)
        self.refused = refused


class ResultTimeout(GristmillError, TimeoutError):
    """No result arrived in time. The request itself is not withdrawn: ask again for the same ID."""

    exit_code = ExitCode.TIMEOUT
    http_status = 504


class ScoringError(GristmillError):
    """The request was processed and failed; ``code`` is one of :class:`ErrorCode` (as a string)."""

    exit_code = ExitCode.REQUEST_FAILED

    def __init__(self, request_id: str, code: str, message: str) -> None:
        super().__init__(f"request {request_id!r} failed: {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.http_status = _HTTP_STATUS.get(code, 500)


class RequestExpired(ScoringError):
    """The request's deadline passed before it ran."""

    def __init__(self, request_id: str, message: str = "its deadline passed before it ran") -> None:
        super().__init__(request_id, ErrorCode.EXPIRED, message)


class RequestCancelled(ScoringError):
    """The request was cancelled before it had a result."""

    def __init__(self, request_id: str, message: str = "it was cancelled") -> None:
        super().__init__(request_id, ErrorCode.CANCELLED, message)


class InputFileError(GristmillError):
    """A file, configuration or model directory cannot be used; the message says what to do."""

    exit_code = ExitCode.BAD_INPUT


class TooManyErrors(InputFileError):
    """More rows of a file failed than were allowed; those that were scored are kept."""


class NotFoundError(GristmillError):
    """Nothing on the queue has the given ID."""

    http_status = 404


class NoWorkerError(GristmillError):
    """No live worker serves the queue."""

    exit_code = ExitCode.NO_WORKER
    http_status = 504
