"""The interfaces between rooms: what the worker asks of the engine and of the bus.

Two implementations of each exist: the real one, and the fake in ``tests.support`` that passes the same specification.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from prometheus_client import CollectorRegistry

from schemas.base import Headers, Origin, Record, immutable
from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from schemas.control import Cache, Control
from schemas.progress import Progress
from schemas.requests import Attempt, Endpoint, ReplyTo, Request
from schemas.results import Chunk, Result
from schemas.status import Presence, Status
from service.models_file import ModelsFile

# --- the engine ---------------------------------------------------------------------------------------------------


@immutable
class Turn:
    """A call's place in a session: its prompt goes on where the answer to the part before it ended.

    ``part`` counts from 0; ``final`` ends the session. ``owner`` is the tenant and the record's key that all parts
    share: under another one, the same name is another session. ``origin`` is the part's request: it comes again only
    where its answer was never committed.
    """

    session: str
    part: int
    final: bool
    owner: tuple[str, bytes | None] = ("", None)
    origin: Origin | None = None

    def digest(self, alias: str) -> str:
        """Tells the session apart from all others, and does not name it."""
        tenant, key = self.owner
        told = [alias, tenant, None if key is None else key.hex(), self.session]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@immutable
class Call:
    """One run of one request on one model. ``id`` is the worker's own, never the producer's.

    ``alias`` is always given and names a context; ``body["model"]`` may also be a LoRA of that context.
    """

    id: str
    alias: str
    endpoint: Endpoint
    body: Mapping[str, Any]
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    turn: Turn | None = None
    tenant: str = ""
    """Whose it is, for what has turns; empty: nobody's."""


@immutable
class Answer:
    """What vLLM's server would have answered: HTTP status, and a response or ``{"error": {...}}`` as the body.

    A call that was aborted has a partial body (finish reason ``abort``, usage) and ``aborted`` set.
    """

    status: int
    body: dict[str, Any]
    aborted: bool = False
    retriable: bool = False
    first_token_s: float | None = None
    """Seconds from the call until its first token, where it made any."""
    continued: tuple[int, ...] = ()
    """How many of its tokens had been said, and were not generated again, each time that a run went on with it."""
    longest: int | None = None
    """Tokens of its longest sample; None where that is not known: of a beam search, and of a part of a session."""
    session: Progress | None = None
    """Of a part: what its session has come to, for whoever has the next one; no parts where none can be gone on with.

    None where the answer changes nothing of that.
    """


@dataclass(frozen=True, slots=True)
class Transition:
    """A step of a switch, told to whoever observes it."""

    phase: SwitchPhase
    at: float
    report: SwitchReport


ChunkSink = Callable[[dict[str, Any]], Awaitable[None]]
Say = Callable[[], Progress | None]
"""What a run has said by now; None where that is nothing, or could not be gone on with."""
Observer = Callable[[Transition], None]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What an operator asks of one model's server, by a route of vLLM's that is about its inside."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What that server answers."""

    status: int
    media_type: str
    content: bytes


class Engine(Protocol):
    """Many models in one engine process; one of them is active.

    Calls may be made for any loaded alias at any time: one for a model that is not active is frozen until it is.
    """

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def active(self) -> str:
        """The active alias, or the target of the switch under way."""
        ...

    def contexts(self) -> tuple[ContextInfo, ...]: ...

    def tiers(self) -> Mapping[str, Tier]:
        """The tier of each context, as ``contexts`` has it; asked before every decision, however many there are."""
        ...

    def asleep(self) -> Collection[str]:
        """The models that sleep, as ``contexts`` has it; asked as often."""
        ...

    @property
    def steps(self) -> int:
        """Steps that were heard of, of all models: it moves while a long prompt is read, of which no token comes yet.

        It stands still where a model keeps no statistics.
        """
        ...

    @property
    def device_bytes(self) -> int | None:
        """What contexts may take of the device; None where that is not bounded."""
        ...

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        """Run a call to its end. Bad input is an answer with its status, not an exception.

        With ``on_chunk``, a body that asks for a stream is streamed to it, one event of vLLM's server at a time and
        in order; the answer is still the whole one. Cancelling the awaiting task aborts the call.

        With ``progress``, the call goes on from there: the answer is the same, and neither a token that was said is
        generated again nor the event that told it given to ``on_chunk``. Of a part of a session, it is what the
        session has come to: one that is not here goes on from there.

        Raises HandedBack (run it again), NotContinued (run it again without ``progress``), EngineDied.
        """
        ...

    def progress(self, call_id: str) -> Progress | None:
        """What a running call has said so far, for another engine to go on with; of a stream, what was told of it.

        None as long as it has said nothing, where it could not be gone on with, and for an unknown call.
        """
        ...

    async def inquire(self, alias: str, inquiry: Inquiry) -> Reply:
        """Ask ``/server_info``, ``/tokenizer_info`` or ``/collective_rpc`` of an alias; a model that was never loaded,
        and a path that is none of these, is a 404.

        Raises UnknownModel, EngineDied.
        """
        ...

    async def openapi(self) -> Mapping[str, Any]:
        """OpenAPI's document of the endpoints that the models loaded so far have, by ``schemas.requests.Endpoint``."""
        ...

    async def abort(self, call_id: str) -> None:
        """End a call now; its ``answer`` returns with what it has. Unknown ids are ignored."""
        ...

    def tokens(self, call_id: str) -> int:
        """How many tokens a running call has generated so far; 0 for an unknown one."""
        ...

    async def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode = SwitchMode.KEEP,
        drain_timeout: float = 60.0,
        leftover: Leftover = Leftover.ABORT,
        observe: Observer | None = None,
    ) -> SwitchReport:
        """Make ``alias`` active. Switches asked at once are done one after another.

        Raises UnknownModel, SwitchFailed (the previous model serves), EngineDied.
        """
        ...

    @property
    def brings_beside(self) -> frozenset[Tier]:
        """The tiers from which a model is brought in while the active one's steps run."""
        ...

    def expect(self, order: Sequence[str]) -> None:
        """Who will be switched to next, soonest first: those are spared where room has to be made."""
        ...

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        """Bring a model in while another one is active; ``stall=False``: only what can be done beside its steps.

        Raises UnknownModel, SwitchFailed where there is no room beside the active one, EngineDied.
        """
        ...

    async def park(self, alias: str) -> ContextInfo: ...

    async def drop(self, alias: str) -> ContextInfo: ...

    async def pin(self, alias: str, pinned: bool) -> ContextInfo: ...

    async def add_lora(self, alias: str, name: str, path: str) -> None: ...

    async def remove_lora(self, alias: str, name: str) -> None: ...

    async def pin_lora(self, alias: str, name: str) -> None: ...

    def loras(self, alias: str) -> tuple[str, ...]: ...

    async def reset_caches(
        self,
        alias: str | None = None,
        cache: Cache | None = None,
        *,
        running: bool = False,
        external: bool = False,
    ) -> bool:
        """Forget caches (default: all three) of one model, or of all that are loaded; ``running`` and ``external`` are
        ``reset_running_requests`` and ``reset_connector`` of AsyncLLM. False: requests that run hold blocks."""
        ...

    async def profile(self, alias: str | None = None, *, start: bool) -> None:
        """Start vLLM's profiler on a model (default: the active one), or stop it (default: wherever it runs).

        Raises UnknownModel for one that is not loaded, EngineRefused for one that has no profiler.
        """
        ...

    async def sleep(self, level: int, alias: str | None = None) -> tuple[ContextInfo, ...]:
        """Give memory back, of one alias or of all: level 1 parks, level 2 drops. Nothing runs there until ``wake``."""
        ...

    async def wake(self, alias: str | None = None) -> tuple[ContextInfo, ...]: ...

    async def reload(self, models: ModelsFile) -> Mapping[str, str]:
        """Take a new models.yaml: per alias ``added``, ``removed``, ``changed`` or ``kept``.

        Contexts of kept aliases are not touched. Raises ConfigError and changes nothing, if it can't be taken.
        """
        ...

    async def died(self) -> BaseException:
        """Wait until the engine is dead, and say why."""
        ...

    async def close(self) -> None:
        """Stop every process of the engine. May be called twice."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine that keeps metrics of its own."""

    def registries(self) -> Mapping[str, CollectorRegistry]:
        """They, by alias; of the aliases that have been loaded."""
        ...


# --- the bus: requests and their results -------------------------------------------------------------------------


@immutable
class Delivery:
    """A record handed to the worker. ``attempt`` is the run that this is: n is 1 for one never started before,
    and one more for each run that an earlier owner started and neither settled nor withdrew: it died with it.

    ``evidence``: what those say against it. Nothing where it had company; alone, 1 if the worker was gone too, from
    whatever cause, and 2 if the worker saw its engine die.
    """

    record: Record
    attempt: Attempt = field(default_factory=Attempt)
    evidence: int = 0
    active_meant: bool = False
    """A body that names no model means the one that is active; otherwise it is refused."""
    progress: Progress | None = None
    """What an earlier owner's run had said, for this one to go on with."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Records that could not be decoded, from the offset ``first`` to ``last``; ``reason`` says why in words."""

    topic: str
    partition: int
    first: int
    last: int
    reason: str

    def __str__(self) -> str:
        offsets = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.topic}/{self.partition}/{offsets}: {self.reason}"


@immutable
class Received:
    """What one turn of reading brought: new deliveries, and origins of work that is another worker's now.

    ``unwanted`` is ours still, and nobody waits for it: it ends as what is cancelled, and what it has cost is told.
    ``unreadable`` is what could not be decoded; of each such offset there is a delivery, with what is left of it.
    """

    deliveries: tuple[Delivery, ...] = ()
    lost: frozenset[Origin] = frozenset()
    unwanted: frozenset[Origin] = frozenset()
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceState:
    """How a source of requests stands."""

    joined: bool = True
    """Whether it is a member of its group, and has been told what it owns."""
    rebalances: int = 0
    """Assignments that the group has made so far."""
    partitions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What is assigned, by topic."""
    lag: Mapping[str, int] = field(default_factory=dict)
    """Records of each topic that are assigned and not read yet."""
    lag_tokens: Mapping[str, int] = field(default_factory=dict)
    """About how many tokens of prompt these are."""
    transaction_open_s: Mapping[str, float] = field(default_factory=dict)
    """For how long an open transaction of others has hidden what lies behind it, by topic: the longest one."""
    overtaken: int = 0
    """Requests that retention took before they were read."""
    unreadable: int = 0
    """Records, and batches of them, that could not be decoded."""
    forgotten: int = 0
    """Partitions whose committed offsets had expired, though this group had them before."""
    stuck_s: float = 0.0
    """For how long something has not moved that ought to; 0 while all is well."""
    stuck: str = ""
    """What that is, in words."""
    full_s: float = 0.0
    """For how long it has waited to read more until requests are settled, and none was; 0 while it need not wait."""
    away_s: float = 0.0
    """For how long no broker has answered; nothing counts as stuck meanwhile. 0 while one answers."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a worker has, for whoever decides what it is to read: its contexts, and the device's bytes for them."""

    contexts: tuple[ContextInfo, ...] = ()
    device_bytes: int | None = None


class RequestSource(Protocol):
    """Requests as the group assigns them, bounded by what is delivered and not yet settled."""

    async def receive(self) -> Received:
        """The next deliveries; returns within a fraction of a second, also with nothing. Is never cancelled.

        Raises Stalled, BrokerUnavailable, PositionLost when reading can't go on.
        """
        ...

    def serve_only(self, aliases: Collection[str] | None) -> None:
        """Read the per-model topics of these aliases only (None: of all). The shared topic is always read."""
        ...

    def hold_back(self, partitions: Collection[tuple[str, int]]) -> None:
        """Read these partitions, by topic and number, no further until this is called without them."""
        ...

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        """Deliver requests of models that are not served, too, when they are ``due``: in seconds since the epoch.

        Infinity: not before their model is served. Said again, everything is asked about again.
        """
        ...

    def before_rebalance(self, hand_over: Callable[[], None]) -> None:
        """Call this before partitions may become another worker's: it keeps what runs have said so far."""
        ...

    def weigh(self, load: Callable[[str, float], float]) -> None:
        """Whoever places models among workers counts one by this: by its alias and its requests per second here, the
        seconds of a device per second that it asks for."""
        ...

    def place_anew(self, missed: Mapping[str, float]) -> None:
        """Have models placed among workers anew, by what these say now; where there are others.

        ``missed``, by alias: the part of the share that is to meet its objective that did not, which is why.
        """
        ...

    async def follow(self, aliases: Collection[str]) -> None:
        """The models are these from now on. Raises TopicError, BrokerUnavailable."""
        ...

    def state(self) -> SourceState: ...

    async def stop(self) -> None:
        """Read nothing more; partitions stay assigned until ``close``, so that running work can be settled."""
        ...


@immutable
class Settlement:
    """How a request ended. ``dead``: the original record, where it is to be kept as a dead letter too."""

    result: Result
    reply: ReplyTo | None = None
    """Where its producer wants the result, if that is allowed and there; None: in the results topic."""
    dead: Record | None = None
    trace: Headers = ()
    """The W3C context of the request's span, for the result's headers."""
    usage: Mapping[str, Any] | None = None
    """What the result has cost, to be published with it: the fields of a ``Usage``."""


@immutable
class Moved:
    """A request that goes to another topic, under ``key``, to be answered from there. ``deaths`` goes along with it.

    What it has said does not, and is forgotten: a request that had begun begins anew there.
    """

    record: Record
    request: Request
    topic: str
    deaths: int = 0
    key: bytes | None = None
    """Without it, the key that it has."""


Settled = TypeVar("Settled", Settlement, Moved)


class Settlements(Protocol):
    """The ledger's writer: exactly one settlement per origin."""

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        """Mark a run as started. Written beside the start; one that is alone waits until its mark is committed.

        Called again for a run under way, it says that it is (no longer) alone. False: it is another worker's by now,
        or nobody's, and is not to begin: nothing could be written of what it does.
        """
        ...

    def engine_died(self, culprit: Origin | None) -> None:
        """The engine died, and this worker did not: the run at ``culprit`` had it to itself, and no other run had."""
        ...

    def withdraw(self, origin: Origin) -> None:
        """Take a start mark back: the run ended without a settlement, and the request is not to blame."""
        ...

    def keep(self, origin: Origin, say: Say) -> None:
        """Keep what a run has said until its request is settled, for whoever is its next owner.

        ``say`` is asked when that is to be written, with what is committed next or a moment later; where nothing is
        kept, never. What can't be kept is left out: it is said again then.
        """
        ...

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        """What a session had come to when this part of it was asked for, by whoever answered the parts before.

        ``name`` is its digest. Asked when the part begins, which keeps the session until the part is settled.
        """
        ...

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        """Keep what a session has come to with the part at ``origin``, from the transaction that settles it on.

        It goes with a part after which there is nothing to go on with, and when no part comes for too long.
        """
        ...

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        """Publish ``settlement`` and finish ``origin``, both or none.

        Returns what was committed: a result that the bus does not take is published without its dead letter, else as
        an error of constant size in its place. None: the partition is no longer ours, and its new owner will do it.
        Raises RecordRefused for a request that can't be moved, Stalled where not even an error is taken.
        """
        ...

    async def flush(self) -> None:
        """Commit everything that waits, attempt marks too; before the process ends, or its engine is buried."""
        ...


# --- the bus: control, status, chunks, presence -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """A control event as read, a tombstone (neither event nor problem), or what was wrong with it."""

    event: Control | None
    record: Record
    problem: str | None = None

    @property
    def takes_back(self) -> bool:
        """Whether it is a tombstone: what was asked under its key is asked no more."""
        return self.event is None and self.problem is None


class ControlSource(Protocol):
    async def desired(self) -> Sequence[Control]:
        """The folded desired state for this worker as it stands now, read to the end: what to boot into."""
        ...

    def events(self) -> AsyncIterator[ControlRecord]:
        """Control events for this worker from here on, malformed ones included."""
        ...


class Announcements(Protocol):
    """What is said to the world beside results; idempotent, ordered per key, not transactional."""

    async def status(self, status: Status) -> None: ...

    async def chunk(self, origin: Origin, chunk: Chunk, reply: ReplyTo | None = None) -> None:
        """Send a piece of the answer to the request of ``origin`` to where its result goes; waits for a slow reader."""
        ...

    async def presence(self, presence: Presence) -> None: ...

    async def farewell(self) -> None:
        """Tombstone this worker's presence."""
        ...

    async def control(self, event: Control) -> None:
        """Publish a control event under its key."""
        ...

    async def others(self) -> Sequence[Presence]:
        """The presences of the pool, as last heard."""
        ...

    def usage(self, usage: Mapping[str, Any]) -> None:
        """Say what a result has cost that is not published itself: the fields of a ``Usage``. Returns at once."""
        ...

    async def predecessors(self) -> Sequence[Presence]:
        """What each worker of the pool said last while it served, this one's earlier life and those gone included.

        The one that was heard last is the last.
        """
        ...


@dataclass(frozen=True)
class Bus:
    """The four ports of the bus, whoever implements them."""

    source: RequestSource
    settlements: Settlements
    control: ControlSource
    announcements: Announcements


# --- who watches the worker ---------------------------------------------------------------------------------------


class Watcher:
    """Whoever is told what the worker does: metrics, the status page. Each method returns at once and raises nothing.

    What does not interest a watcher it leaves as it is here.
    """

    def status(self, status: Status) -> None:
        """A step of a switch, or the answer to a control event, in order."""

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:
        """How a request ended is committed, ``publish_s`` seconds after it was ready. ``alias``: empty if unknown."""

    def repeated(self, alias: str, *, why: str) -> None:
        """A run ended without a result, and there will be another."""

    def lost(self, alias: str) -> None:
        """A request that was waiting or running is another worker's now, or nobody wants it any more."""
