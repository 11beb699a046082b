"""Gristmill's client: submit texts to CPU scoring workers through Redis and collect the results."""

from importlib import import_module

TYPE_CHECKING = False  # typing takes longer to import than this module
if TYPE_CHECKING:
    from gristmill.aio import AsyncClient
    from gristmill.calls import RequestId
    from gristmill.client import Client
    from gristmill.control import DeadLetter
    from gristmill.core import Depth
    from gristmill.errors import (
        BrokerUnavailable,
        ErrorCode,
        GristmillError,
        InvalidRequestError,
        NotFoundError,
        QueueFull,
        RequestCancelled,
        RequestExpired,
        ResultTimeout,
        ScoringError,
        Status,
    )
    from gristmill.wire import Result

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BrokerUnavailable",
    "Client",
    "DeadLetter",
    "Depth",
    "ErrorCode",
    "GristmillError",
    "InvalidRequestError",
    "NotFoundError",
    "QueueFull",
    "RequestCancelled",
    "RequestExpired",
    "RequestId",
    "Result",
    "ResultTimeout",
    "ScoringError",
    "Status",
    "__version__",
]

_LAZY = {
    "AsyncClient": "aio",
    "Client": "client",
    "DeadLetter": "control",
    "Depth": "core",
    "RequestId": "calls",
    "Result": "wire",
}  # the others are in errors


def __getattr__(name: str) -> object:
    """Import what is asked for: who wants one client need not wait for the other, nor a command for both."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_LAZY.get(name, 'errors')}"), name)
    globals()[name] = found
    return found
