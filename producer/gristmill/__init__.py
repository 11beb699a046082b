"""Gristmill's client: submit texts to CPU scoring workers through Redis and collect the results."""

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
