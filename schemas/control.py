"""What an operator asks of the workers: desired state, which is compacted by key, and commands, which happen once."""

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from schemas.base import MAX_ATTRIBUTE, Message
from schemas.contexts import Leftover, SwitchMode
from schemas.errors import LONGEST_WORD, nearest
from schemas.objectives import CLASS_NAME, Objective

EVERYONE = "*"
MAX_CONTROL_BYTES = 64 << 10
"""Bytes of a control event; what has more is not parsed."""


def _bounded(text: str) -> str:
    if len(text.encode()) > MAX_ATTRIBUTE:
        raise ValueError(f"must have at most {MAX_ATTRIBUTE} bytes")
    return text


Name = Annotated[str, Field(max_length=MAX_ATTRIBUTE), AfterValidator(_bounded)]
"""A text that statuses repeat and keys are made of: at most 256 bytes."""


class ControlEvent(Message):
    """What every control event says. ``target`` is ``*``, a pool (group id) or a worker id.

    ``issued`` is in seconds since the epoch.
    """

    id: Name = Field(default_factory=lambda: uuid.uuid4().hex)
    target: Name = EVERYONE
    issued: float = Field(default_factory=time.time, allow_inf_nan=False)

    @property
    def subject(self) -> str:
        """The second half of the record's key: the latest event per target and subject counts."""
        return "active"

    def superseded(self, subjects: Iterable[str]) -> Iterable[str]:  # noqa: ARG002
        """Which of the ``subjects`` asked about earlier mean nothing after this event; its own may be among them."""
        return (self.subject,)


def one_of_three(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """What is wrong with a ``hold``: one complaint instead of one per way in which it could have been right."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("give seconds (0 or more), 'drained' or 'forever'") from None


Hold = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["drained", "forever"]


class Switch(ControlEvent):
    """Make ``model`` active and stay with it for ``hold``: seconds, until ``drained``, or ``forever`` (manual mode).

    ``drain_timeout`` (seconds) alone means: drain, then abort what is left.
    """

    type: Literal["switch"] = "switch"
    model: Name
    mode: SwitchMode | None = None
    drain_timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    leftover: Leftover | None = None
    hold: Hold | None = None

    _one_complaint = field_validator("hold", mode="wrap")(one_of_three)


class _OneOrAll(ControlEvent):
    """About one model, or without ``model`` about all, which ends what was said of single ones."""

    what: ClassVar[str]
    model: Name | None = None

    @property
    def subject(self) -> str:
        return f"{self.what}/{self.model or EVERYONE}"

    def superseded(self, subjects: Iterable[str]) -> Iterable[str]:
        if self.model is not None:
            return (self.subject,)
        return [subject for subject in subjects if subject.startswith(f"{self.what}/")]


class Pause(_OneOrAll):
    """Stop starting requests, of one model or of all; those that run go on."""

    what = "paused"
    type: Literal["pause"] = "pause"


class Resume(_OneOrAll):
    """Start requests again, of one model or of all."""

    what = "paused"
    type: Literal["resume"] = "resume"


class Sleep(_OneOrAll):
    """Give memory back: level 1 parks the contexts, level 2 drops them."""

    what = "asleep"
    type: Literal["sleep"] = "sleep"
    level: Literal[1, 2] = 1


class Wake(_OneOrAll):
    """Bring back what slept."""

    what = "asleep"
    type: Literal["wake"] = "wake"


class Pin(ControlEvent):
    """Keep a context resident whatever the memory budget asks."""

    type: Literal["pin"] = "pin"
    model: Name

    @property
    def subject(self) -> str:
        return f"pin/{self.model}"


class Unpin(ControlEvent):
    """Let a context be parked or dropped again."""

    type: Literal["unpin"] = "unpin"
    model: Name

    @property
    def subject(self) -> str:
        return f"pin/{self.model}"


class SetObjective(ControlEvent):
    """What requests of ``model`` are to get from now on, or those of one of its classes, which may be a new one.

    Without times it is again what models.yaml says.
    """

    type: Literal["objective"] = "objective"
    model: Name
    request_class: Annotated[str, Field(pattern=CLASS_NAME)] | None = None
    ttft_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    share: float = Field(default=0.9, gt=0, le=1)

    @model_validator(mode="after")
    def _both_or_none(self) -> "SetObjective":
        if (self.ttft_s is None) != (self.tpot_s is None):
            raise ValueError("give both ttft_s and tpot_s, or none of them")
        return self

    @property
    def subject(self) -> str:
        return f"objective/{self.model}/{self.request_class or ''}"

    @property
    def objective(self) -> Objective | None:
        """None: what models.yaml says."""
        if self.ttft_s is None or self.tpot_s is None:
            return None
        return Objective(ttft_s=self.ttft_s, tpot_s=self.tpot_s, share=self.share)


class LoraAdd(ControlEvent):
    """Load a LoRA adapter under ``name`` beside its base model; ``path`` is below the worker's ``lora_root``."""

    type: Literal["lora.add"] = "lora.add"
    model: Name
    name: Name
    path: str = Field(max_length=4096)

    @property
    def subject(self) -> str:
        return f"lora/{self.name}"


class LoraRemove(ControlEvent):
    """Unload a LoRA adapter."""

    type: Literal["lora.remove"] = "lora.remove"
    model: Name
    name: Name

    @property
    def subject(self) -> str:
        return f"lora/{self.name}"


class LoraPin(ControlEvent):
    """Keep a LoRA adapter in the host's memory, whatever others are used."""

    type: Literal["lora.pin"] = "lora.pin"
    model: Name
    name: Name

    @property
    def subject(self) -> str:
        return f"lora-pin/{self.name}"


class Cancel(ControlEvent):
    """Cancel one request by id, or all of a correlation id. Honoured also for requests not yet read."""

    type: Literal["cancel"] = "cancel"
    request: Name | None = None
    correlation_id: Name | None = None

    @property
    def subject(self) -> str:
        return f"cancel/{self.request or 'correlation/' + str(self.correlation_id)}"


class LoraList(ControlEvent):
    """Ask which adapters are loaded."""

    type: Literal["lora.list"] = "lora.list"
    model: Name | None = None


Cache = Literal["prefix", "mm", "encoder"]
"""A cache of a model that can be forgotten."""


class ResetCache(ControlEvent):
    """Forget a model's caches: its prefix cache, its multimodal and its encoder cache. Answered with ``success``.

    The prefix cache is not forgotten while requests that run hold blocks of it.
    """

    type: Literal["reset_cache"] = "reset_cache"
    model: Name | None = None
    """None: every model that is loaded."""
    cache: Cache | None = None
    """None: all three."""
    reset_running_requests: bool = False
    """Preempt what runs, which is then prefilled again, so that no block is held."""
    reset_external: bool = False
    """The prefix cache of a connector, too."""


class Profile(ControlEvent):
    """Start vLLM's profiler on a model (default: the active one), or stop it (default: wherever it runs)."""

    type: Literal["profile"] = "profile"
    action: Literal["start", "stop"]
    model: Name | None = None


class Query(ControlEvent):
    """Ask where a request stands, or for the worker's whole state."""

    type: Literal["query"] = "query"
    request: Name | None = None


class Reload(ControlEvent):
    """Read models.yaml again: aliases added, removed or changed, without touching the others."""

    type: Literal["reload"] = "reload"


class Preload(ControlEvent):
    """Load or bring back a context while another one serves."""

    type: Literal["preload"] = "preload"
    model: Name


Desired = Switch | Pause | Resume | Sleep | Wake | Pin | Unpin | LoraAdd | LoraRemove | LoraPin | SetObjective | Cancel
Command = LoraList | ResetCache | Profile | Query | Reload | Preload
Control = Desired | Command

_ADAPTER: TypeAdapter[Control] = TypeAdapter(Annotated[Control, Field(discriminator="type")])
DESIRED_TYPES = frozenset(kind.model_fields["type"].default for kind in Desired.__args__)
CONTROL_FIELDS = {kind.model_fields["type"].default: kind.model_fields for kind in Control.__args__}
"""The fields of each kind of control event."""
CONTROL_TYPES = frozenset(CONTROL_FIELDS)


def unknown_type(kind: str) -> str:
    """What is wrong with a kind of control event that there is not."""
    hint = nearest(kind, CONTROL_TYPES)
    return f"unknown control event {kind[:LONGEST_WORD]!r}{hint}; known: {', '.join(sorted(CONTROL_TYPES))}"


def parse_control(value: dict[str, Any]) -> Control:
    """The control event in a JSON object. Without ``type`` it is a switch, if a switch's fields are all that it has.

    So ``{"model": "qwen"}`` is one, and a request or a result in the wrong topic, which names a model too, is not.
    Raises ValueError (pydantic's ValidationError is one).
    """
    if "type" not in value and "model" in value:
        strange = sorted(value.keys() - Switch.model_fields.keys())
        if strange:
            raise ValueError(f"type: missing, and {', '.join(map(repr, strange[:5]))} is nothing that a switch says")
        value = {"type": "switch", **value}
    kind = value.get("type")
    if isinstance(kind, str) and kind not in CONTROL_TYPES:
        raise ValueError(f"type: {unknown_type(kind)}")
    return _ADAPTER.validate_python(value)
