"""The client: ``from service.client import Client``. Imports neither vLLM nor torch."""

from service.client.client import Client
from service.client.options import Options
from service.client.session import Session
from service.client.stream import Stream
from service.client.sync import SyncClient
from service.errors import (
    BatchInvalid,
    BrokerUnavailable,
    GearshiftError,
    NoAnswer,
    RequestCancelled,
    RequestExpired,
    RequestFailed,
    SessionLost,
    StreamBroken,
    SwitchFailed,
    TopicError,
    UnknownModel,
)
from service.ports import RecordRefused

__all__ = [
    "BatchInvalid",
    "BrokerUnavailable",
    "Client",
    "GearshiftError",
    "NoAnswer",
    "Options",
    "RecordRefused",
    "RequestCancelled",
    "RequestExpired",
    "RequestFailed",
    "Session",
    "SessionLost",
    "Stream",
    "StreamBroken",
    "SwitchFailed",
    "SyncClient",
    "TopicError",
    "UnknownModel",
]
