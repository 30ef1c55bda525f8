"""All settings, and the only place that reads the environment.

Each value comes from, in this order: the command line, ``GEARSHIFT_<NAME>`` in the environment, the default here.
"""

import os
import socket
import uuid
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from schemas.errors import nearest
from service.errors import ConfigError


class Inactive(StrEnum):
    """What happens to a request for a model that is not active."""

    SWITCH = "switch"
    """The worker switches by itself, by its scheduler."""
    PARK = "park"
    """It waits for a control.switch."""
    REFUSE = "refuse"
    """It fails with OpenAI's 404, as vllm-gaudi's multi-model server answers."""


class Forgotten(StrEnum):
    """Where a pool goes on whose committed offsets have expired while it was scaled to zero."""

    RESUME = "resume"
    """Where it stood, as the ledgers topic remembers."""
    BEGINNING = "beginning"
    """Everything that is still there is answered again."""
    END = "end"
    """What is there is never answered."""


def read_keys(path: Path | None, setting: str) -> tuple[bytes, ...]:
    """The keys in a file, one per line; none without a file. Raises ConfigError."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from None
    if not keys:
        raise ConfigError(f"{setting}: {path} is empty")
    return keys


class _Group(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="GEARSHIFT_", frozen=True, extra="forbid", populate_by_name=True)


def _split(value: object) -> object:
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


def _pairs(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    return {name.strip(): weight for name, _, weight in pairs}


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Several words in one variable, separated by commas."""
Weights = Annotated[dict[str, Annotated[float, Field(gt=0)]], NoDecode, BeforeValidator(_pairs)]
"""Names with their weights in one variable: ``a=2,b=1``."""
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
"""Names with their values in one variable: ``a=b,c=d``."""


class KafkaSettings(_Group):
    """How to reach the broker."""

    bootstrap_servers: str = Field(
        default="localhost:9092",
        validation_alias=AliasChoices("GEARSHIFT_BOOTSTRAP_SERVERS", "KAFKA_BOOTSTRAP_SERVERS"),
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_password_file: Path | None = None
    oauth_token_file: Path | None = None
    """The token of OAUTHBEARER, which somebody else keeps fresh; it is read for every connection."""
    oauth_extensions: Pairs = Field(default={})
    """What a broker wants to know beside the token (RFC 7628), as ``logicalCluster=lkc-1,identityPoolId=pool-1``."""
    ssl_cafile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_password: SecretStr | None = None
    ssl_password_file: Path | None = None
    """Of ``ssl_keyfile``, where that is encrypted."""
    ssl_check_hostname: bool = True
    request_timeout_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    max_batch_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Bytes that a compressed batch of records may inflate to; one that has more is not read."""
    startup_timeout_s: float = Field(default=60.0, gt=0)
    """How long a worker waits for a broker to answer when it starts."""


class TopicSettings(_Group):
    """Names and sizes of the topics."""

    topic_prefix: str = ""
    requests: str = "requests"
    throttled: str = "throttled"
    control: str = "control"
    commands: str = "control.commands"
    results: str = "results"
    chunks: str = "chunks"
    status: str = "status"
    workers: str = "workers"
    dead_letters: str = "dead-letters"
    ledgers: str = "ledgers"
    progress: str = "progress"
    calls: str = "calls"
    answers: str = "answers"
    files: str = "files"
    batches: str = "batches"
    usage: str = "usage"
    usage_records: bool = True
    """Whether to say in ``usage`` what each result has cost: a record more for each."""
    usage_retention_s: float = Field(default=90 * 86400.0, ge=60, allow_inf_nan=False)
    """How long it is kept what each result has cost."""
    calls_retention_s: float = Field(default=2 * 86400.0, ge=60, allow_inf_nan=False)
    """How long what was asked durably over HTTP, and its answers, are kept; a batch may take half of that time. Kafka
    deletes whole segments: what is older, or was deleted, is gone from its files after one and a half times as long."""
    files_retention_s: float = Field(default=7 * 86400.0, ge=60, allow_inf_nan=False)
    """How long files and batches are kept, those that batches write too. A batch must end an hour before its file."""
    files_deleted_within_s: float = Field(default=3600.0, ge=1, allow_inf_nan=False)
    """When a file that was deleted is gone from Kafka's own files, as long as a worker with a door is there."""
    create_topics: bool = True
    request_partitions: int = Field(default=12, ge=1)
    result_partitions: int = Field(default=12, ge=1)
    replication_factor: int = Field(default=-1, ge=-1)
    """-1: the broker's default."""
    max_message_bytes: int = Field(default=16 << 20, ge=1 << 10)
    reply_partitions: int = Field(default=12, ge=1)
    """Of a reply topic that is made: a client reads one of them, so as many as there are clients is the most of use."""
    reply_topics: Words = ()
    """Topics (or prefixes ending in ``*``) that a reply-to header may name; never the pool's own but ``results``."""

    @property
    def segment_of_files_s(self) -> float:
        """How long Kafka writes to a segment of the topics of files: what is deleted goes once it is closed."""
        return min(self.files_deleted_within_s, self.files_retention_s) / 2

    def named(self, topic: str) -> str:
        """A topic's name with the prefix."""
        return f"{self.topic_prefix}{topic}"

    def for_alias(self, alias: str) -> str:
        """The topic of requests for one model."""
        return f"{self.named(self.requests)}.{alias}"

    def alias_of(self, topic: str) -> str | None:
        """The model that a topic of requests is for; None where it is for all."""
        own = self._of_aliases
        return topic.removeprefix(own) if topic.startswith(own) else None

    @cached_property
    def _of_aliases(self) -> str:
        """What the names of the topics of requests for one model begin with."""
        return self.for_alias("")

    @cached_property
    def for_all(self) -> frozenset[str]:
        """The topics of requests for whichever model: the shared one, that of durable calls over HTTP, and that of
        what workers moved for their tenants' quotas."""
        return frozenset(map(self.named, (self.requests, self.calls, self.throttled)))

    def takes_moved(self, topic: str) -> bool:
        """Whether a topic is one that workers move requests to: a model's own, or that of what waits for quotas."""
        return topic == self.named(self.throttled) or self.alias_of(topic) is not None

    def takes_requests(self, topic: str) -> bool:
        """Whether a topic is one of requests: for all models, or for one."""
        return topic in self.for_all or self.alias_of(topic) is not None

    def allows_reply(self, topic: str) -> bool:
        """Whether results and chunks may go there. What the pool itself reads or keeps is never written for a producer.

        Nor is what Kafka keeps for itself, in topics that begin with two underscores.
        """
        own = (
            self.requests, self.control, self.commands, self.chunks, self.status, self.workers, self.dead_letters,
            self.ledgers, self.progress, self.calls, self.usage, self.files, self.batches, self.throttled,
        )  # fmt: skip
        if topic in map(self.named, own) or self.alias_of(topic) is not None or topic.startswith("__"):
            return False
        allowed = (*map(self.named, (self.results, self.answers)), *self.reply_topics)
        return any(topic == name or (name.endswith("*") and topic.startswith(name[:-1])) for name in allowed)


class WorkerSettings(_Group):
    """How a worker behaves."""

    group_id: str = "gearshift"
    worker_id: str = Field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    inactive: Inactive = Inactive.SWITCH
    hold_s: float = Field(default=30.0, ge=0)
    """How long an operator's switch stands before the scheduler may undo it."""
    drain_timeout_s: float = Field(default=60.0, ge=0)
    progress_interval_s: float = Field(default=1.0, gt=0)
    """How much of each long answer a death may cost, in seconds of its own; ``inf``: nothing is kept but on leaving."""
    shutdown_timeout_s: float = Field(default=30.0, ge=0)
    """After SIGTERM: how long running requests may take to finish."""
    max_running: int = Field(default=256, ge=1)
    """Requests of each model given to the engine at once, frozen ones among them."""
    max_waiting: int = Field(default=4096, ge=1)
    max_waiting_bytes: int = Field(default=256 << 20, ge=1 << 10)
    max_waiting_tokens: int = Field(default=4_000_000, ge=1)
    max_request_bytes: int = Field(default=8 << 20, ge=64)
    """Of a request's JSON, with its pictures and recordings as base64: three quarters of it are their own bytes."""
    ttl_s: float | None = Field(default=None, gt=0)
    """A request's time to live from the broker's timestamp, where it has no deadline of its own."""
    park_after_s: float = Field(default=30.0, ge=0)
    """A request whose model does not get its turn within this time moves to that model's own topic."""
    max_attempts: int = Field(default=3, ge=1)
    """Of a request that fails with an error that may pass, and of loading a model, before its requests fail."""
    retry_backoff_s: float = Field(default=0.5, gt=0)
    retry_backoff_max_s: float = Field(default=30.0, gt=0)
    group_commit_s: float = Field(default=0.02, ge=0)
    """Rest between two transactions of a busy partition; what finishes meanwhile goes together."""
    forgotten_offsets: Forgotten = Forgotten.RESUME
    """Where a pool goes on whose committed offsets have expired, as they do after a week without workers."""
    session_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    rebalance_timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """How long the group waits for a member in a rebalance, and for its next poll; no request or switch delays that."""
    presence_interval_s: float = Field(default=3.0, gt=0)
    stall_after_s: float = Field(default=120.0, gt=0)
    """Work is there and nothing moves for this long: unhealthy. Each step moves something: more than the longest one
    takes, or the longest prompt of a model that keeps no statistics (``disable_log_stats``)."""
    exit_after_stall_s: float = Field(default=300.0, gt=0)
    engine_restarts: int = Field(default=3, ge=0)
    """So often within ten minutes a worker starts a new engine in place of one that died; then it ends itself."""
    max_wait_s: float = Field(default=60.0, gt=0)
    """The bound on how long a request waits for its model to get its turn."""
    switching_share: float = Field(default=0.05, gt=0, le=1)
    """The share of time that switching may take."""
    tenant_weights: Weights = Field(default={})
    """Shares of tenants within a model's queue, as ``a=2,b=1``; a tenant that is not named has the weight 1."""
    quotas_file: Path | None = None
    """What each tenant may have of the pool, as deploy/OPERATING.md says. Read again when it changes."""
    control_key_file: Path | None = None
    """Where set, control events must be signed with a key of this file, and events are signed with its first one. A
    key per line: for a new one, let all know it as a second line, then make it the first, then drop the old one."""
    pool_key_file: Path | None = None
    """The workers' own key. What one writes beside a request that it moves (where it came from, when, how many died
    with it), where it stood in a partition, and its presence with what it learnt of models, the others believe only
    where it is signed with a key of this file: a key per line, the first one signs. Not for clients."""


class EngineSettings(_Group):
    """What the engine is made of."""

    models: Path | None = Field(
        default=None,
        validation_alias=AliasChoices("GEARSHIFT_MODELS", "VLLM_HPU_MULTI_MODEL_CONFIG"),
    )
    default_model: str | None = Field(default=None, validation_alias=AliasChoices("GEARSHIFT_DEFAULT_MODEL", "MODEL"))
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    chat_template: str | None = None
    device_memory_bytes: int | None = Field(default=None, gt=0)
    """What contexts may take of the device with all that they have; None: what `gpu_memory_utilization` says."""
    host_memory_bytes: int | None = Field(default=None, gt=0)
    """What parked models may take of the host: copies of weights, and what they keep of KV caches. A prefix cache is
    kept only where this is said."""
    lend_kv: bool = True
    """Whether models whose memory is shared out equally lend each other what they don't use of their KV caches. Each
    has its own part back as soon as it needs it, for which requests of the others may be preempted. On CPUs; where all
    models fit at once."""
    lora_root: Path | None = None
    constraint_cpu_s: float = Field(default=10.0, gt=0)
    """Processor time that a structured output's constraint (regex, JSON schema, grammar) may take to be compiled; one
    that takes more is refused."""
    constraint_memory_bytes: int = Field(default=1 << 30, gt=0)
    """Memory that it may take for that."""
    session_idle_s: float = Field(default=60.0, gt=0)
    """How long a session may wait for the next part of its prompt."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """A load that takes longer is given up: the model before it serves on; at the start the worker ends."""
    stuck_timeout_s: float = Field(default=120.0, gt=0)
    """How much longer the engine may be silent, before it is given up as dead. On Gaudi it may be so for four hours
    more from when it has begun to warm a model up."""
    quant_config: str | None = Field(
        default=None, validation_alias=AliasChoices("GEARSHIFT_QUANT_CONFIG", "QUANT_CONFIG")
    )


class LogSettings(_Group):
    """What is logged, in which form, and where traces go."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    otlp_endpoint: str | None = None


class HttpSettings(_Group):
    """The HTTP server: where it listens, who may ask, and what one client may take of it."""

    http_port: int | None = Field(default=None, ge=0, le=65535)
    http_host: str = "127.0.0.1"
    http_ssl_certfile: Path | None = None
    """The certificate with its chain (PEM), for HTTPS; ``http_ssl_keyfile`` goes with it. Both are read again when they
    change."""
    http_ssl_keyfile: Path | None = None
    http_max_connections: int = Field(default=4096, ge=1)
    """Connections served at once; beyond it, probes and metrics are answered, and everything else with 503. Over TLS
    those that have not finished their handshake count too."""
    http_max_header_bytes: int = Field(default=32 << 10, ge=1 << 10)
    http_headers_timeout_s: float = Field(default=10.0, gt=0)
    """How long a request's headers may take to arrive, and before them a TLS handshake."""
    http_body_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive, from the end of its headers."""
    http_write_timeout_s: float = Field(default=30.0, gt=0)
    """A client that takes nothing of its answer for this long is disconnected, and what it asked for is aborted."""
    http_keep_alive_s: int = Field(default=75, ge=1)
    """How long a connection may idle between requests. A client, or a proxy, that reuses connections for longer now and
    then sends a request into one that is just being closed."""
    http_stream_backlog: int = Field(default=4096, ge=1)
    """Pieces of a stream that wait for a slow reader, beside what the connection holds; beyond it the stream ends
    with an error, and the run is aborted: a run never waits for its reader."""
    http_anonymous: bool = False
    """Whether others than this machine may ask without a key; else an address that they reach needs api_keys_file, and
    without it answers probes and metrics only."""
    http_hosts: Words = ()
    """Names that this server is reached by, ``*`` for any; numbers, localhost and this machine's own name always are.
    Where there are keys, any name is good unless this is set."""
    http_durable: bool = False
    """Whether every call goes through the log, and not only those that ask for it; that needs a broker."""
    http_most_calls: int = Field(default=1_000_000, ge=1)
    """Durable calls that are unfinished at a time, all doors together; more are answered with 429."""
    http_calls_share: float = Field(default=0.25, gt=0, le=1)
    """The share of them that one tenant may have, or one API key without a tenant; more are answered with 429."""
    http_max_file_bytes: int = Field(default=200 << 20, ge=1)
    """Of a file that is uploaded."""
    http_file_timeout_s: float = Field(default=600.0, gt=0)
    """How long it may take to arrive."""
    http_most_batch_lines: int = Field(default=50_000, ge=1)
    """Requests in a batch."""
    http_most_files: int = Field(default=10_000, ge=1)
    """Files and batches that are kept at a time, all doors together; more are answered with 429."""
    http_files_share: float = Field(default=0.25, gt=0, le=1)
    """The share of them that one tenant may have, or one API key without a tenant; more are answered with 429."""
    api_keys_file: Path | None = None
    """A key per line, with what it may do behind it: ``look``, ``ask`` (where nothing is said), ``operate``, or several
    with commas between them, and ``tenant=NAME`` where several keys are one tenant's. Read again when it changes."""
    cors_origins: Words = ()
    dev_mode: bool = Field(default=False, validation_alias=AliasChoices("GEARSHIFT_DEV_MODE", "VLLM_SERVER_DEV_MODE"))


class Settings(BaseModel):
    """Everything together. ``load`` is how to get one."""

    model_config = ConfigDict(frozen=True)

    kafka: KafkaSettings
    topics: TopicSettings
    worker: WorkerSettings
    engine: EngineSettings
    log: LogSettings
    http: HttpSettings


GROUPS: dict[str, type[_Group]] = {
    "kafka": KafkaSettings,
    "topics": TopicSettings,
    "worker": WorkerSettings,
    "engine": EngineSettings,
    "log": LogSettings,
    "http": HttpSettings,
}
_BOOTSTRAP_ONLY = {"GEARSHIFT_HOME", "GEARSHIFT_PYTHON", "GEARSHIFT_VLLM"}
"""Read by deploy/local, not by the service."""


def load(**given: object) -> Settings:
    """Settings from the command line's values (None: not given), the environment and the defaults.

    Raises ConfigError that names each wrong value, and each ``GEARSHIFT_`` variable that means nothing.
    """
    known = {name for group in GROUPS.values() for name in group.model_fields}
    for variable in os.environ:
        name = variable.removeprefix("GEARSHIFT_").lower()
        if variable.startswith("GEARSHIFT_") and name not in known and variable not in _BOOTSTRAP_ONLY:
            raise ConfigError(f"environment: unknown setting {variable}{nearest(name, known)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}")
    try:
        groups = {key: _open(group, chosen) for key, group in GROUPS.items()}
        return Settings.model_validate(groups)
    except ValidationError as error:
        raise ConfigError(f"settings: {'; '.join(_explain(detail) for detail in error.errors())}") from None


def _open(group: type[_Group], chosen: dict[str, object]) -> _Group:
    values: dict[str, Any] = {
        _alias(name, field): chosen[name] for name, field in group.model_fields.items() if name in chosen
    }
    return group(**values)


def _alias(name: str, field: FieldInfo) -> str:
    """What a given value goes by, so that no variable comes before it."""
    choices = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name]
    return str(choices[0])


def _explain(detail: ErrorDetails) -> str:
    name = ".".join(map(str, detail["loc"]))
    secret = any(word in name for word in ("password", "key", "token"))
    return f"{name}: {detail['msg']}" + ("" if secret else f" (got {detail['input']!r})")
