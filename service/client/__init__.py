"""The client: ``from service.client import Client``. Imports neither vLLM nor torch.

``Client`` and ``SyncClient`` ask and wait; their ``batch`` asks a file of requests and waits, or leaves it to the pool
and comes back to it.
"""

from service.client.batches import Batches, Progress
from service.client.client import Client
from service.client.feed import Traffic
from service.client.options import Options
from service.client.session import Session
from service.client.stream import Stream
from service.client.sync import SyncClient
from service.errors import (
    AlreadyAsked,
    BatchInvalid,
    BrokerUnavailable,
    GearshiftError,
    NoAnswer,
    RecordRefused,
    RequestCancelled,
    RequestExpired,
    RequestFailed,
    SessionLost,
    StreamBroken,
    SwitchFailed,
    TopicError,
    UnknownModel,
)

__all__ = [
    "AlreadyAsked",
    "BatchInvalid",
    "Batches",
    "BrokerUnavailable",
    "Client",
    "GearshiftError",
    "NoAnswer",
    "Options",
    "Progress",
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
    "Traffic",
    "UnknownModel",
]
