"""The client: ``from service.client import Client``. Imports neither vLLM nor torch.

``Client`` and ``SyncClient`` ask and wait; ``run_batch`` asks a file of requests and waits, and ``submit_batch``,
``batch_status``, ``fetch_batch`` and ``cancel_batch`` leave it on the bus and come back to it.
"""

from service.client.batch import Progress, batch_status, cancel_batch, fetch_batch, run_batch, submit_batch
from service.client.client import Client
from service.client.feed import Traffic
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
    "batch_status",
    "cancel_batch",
    "fetch_batch",
    "run_batch",
    "submit_batch",
]
