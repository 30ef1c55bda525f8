"""What a change of contexts takes, step by step and free of I/O: each engine performs the steps in its own way.

A change is a generator: it yields what is to be done next, is given the answer (or thrown the error), and returns its
result. The asynchronous engine awaits between the steps, the synchronous one steps its models or simply calls.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from service.engine.models.residency import ModelFrontend, Residency
from service.engine.models.switching import SwitchProgress, mib
from service.engine.versions import vllm_frontend
from service.errors import HandedBack, SwitchFailed
from service.ports import Observer
from service.scheduling.memory import Keep, Move, NoRoom


@dataclass(frozen=True, slots=True)
class Ask:
    """A command for the core on one model's context. With ``load`` it brings along what loading the model takes."""

    alias: str
    command: str
    load: bool = False
    park_left: int = 0
    """Of an activation: the level at which the model that is left sleeps before this one comes; 0: it stays."""
    keep: Keep = field(default_factory=Keep)
    """What of its KV cache a model that is parked by this may keep."""
    undo: tuple["Ask", ...] = field(default=(), compare=False)
    """What takes it back in the cores that could do it, where there are several and another one could not."""

    def arguments(self, loading: Any, within_s: float | None = None) -> tuple[Any, ...]:
        """What the core's command takes after the context's key; ``within_s`` is for loading."""
        match self.command:
            case "activate":
                return loading, self.park_left, within_s, self.keep.most, self.keep.cached
            case "preload" | "warm":
                return loading, within_s
            case "park":
                return self.keep.most, self.keep.cached
        return ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Let requests (by internal id) run until they have ended, but no longer than ``seconds``."""

    alias: str
    requests: frozenset[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests (by internal id) with what they have."""

    alias: str
    requests: frozenset[str]


@dataclass(frozen=True, slots=True)
class HandBack:
    """End all requests of a model as not finished."""

    alias: str
    error: HandedBack


@dataclass(frozen=True, slots=True)
class EndStreams:
    """End the requests of a model that wait for more of their prompt: they hold KV cache without being scheduled."""

    alias: str
    error: HandedBack


@dataclass(frozen=True, slots=True)
class LetGo:
    """End what a frontend has of the model in its core, which goes: a profile, and which images and sounds it has."""

    alias: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a model that sleeps, or the parts of it that ``tags`` name. Answers whether all of it is awake."""

    alias: str
    tags: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Arrive:
    """Wait until a model that is loaded beside the active one's steps is there, or has failed."""

    alias: str


Step = Ask | Finish | Abort | HandBack | EndStreams | LetGo | Wake | Arrive
Result = TypeVar("Result")
Change = Generator[Step, Any, Result]


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """What goes wrong inside is a SwitchFailed that says ``what``; a dead engine stays one."""
    try:
        yield
    except Exception as error:
        if vllm_frontend.is_engine_dead(error):
            raise
        raise SwitchFailed(f"{what}: {error}") from error


class Changes:
    """The changes of one engine's contexts. One at a time; ``active`` and ``target`` say how far they are."""

    def __init__(
        self,
        frontends: Mapping[str, ModelFrontend],
        residency: Residency,
        *,
        active: str,
        pids: tuple[int, ...],
        require: Callable[[str], object],
        aside: Callable[[str], bool],
    ) -> None:
        self.active = active
        self.target: str | None = None
        """Where the switch under way goes."""
        self._frontends = frontends
        self._residency = residency
        self.pids = pids
        """The process ids of the core and of its workers."""
        self._require = require
        """Raises what is known to be wrong with a model that is to be loaded."""
        self._aside = aside
        """Whether a model can be loaded between the steps of the active one."""

    def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode,
        drain_timeout: float,
        leftover: Leftover,
        observe: Observer | None,
        asked: float,
    ) -> Change[SwitchReport]:
        """Make ``alias`` active. Raises SwitchFailed, the model that was active serving as before; EngineDeadError.

        What can be known to stand in the way is found before a request is drained or aborted; where there is room for
        the new model beside all others, it is loaded before, too.
        """
        left, residency = self.active, self._residency
        found = residency.tier(alias) if alias in self._frontends else Tier.DROPPED
        progress = SwitchProgress(
            asked=asked,
            observe=observe,
            from_model=left,
            to_model=alias,
            mode=mode,
            tier_found=found,
            core_pid=self.pids[0],
            worker_pids=self.pids[1:],
            memory_before_mb=mib(residency.memory),
            host_memory_before_mb=mib(residency.host),
        )
        progress.lap("wait")
        progress.to(SwitchPhase.ACCEPTED)
        if alias == left:
            progress.to(SwitchPhase.NO_OP)
            return progress.report
        self.target = alias
        try:
            if found is Tier.DROPPED:
                self._require(alias)
            residency.room_for(alias)
            load_s = 0.0
            if found is Tier.DROPPED and self._ends_some(left, mode) and self._fits_beside(alias):
                yield from self._load_beside(alias)
                load_s = progress.lap("load")
            aborted = yield from self._settle(left, mode, drain_timeout, leftover, progress)
            drain_s = progress.lap("drain")
            progress.to(SwitchPhase.SWITCHING, aborted=aborted, drain_s=drain_s)
            answer, parting = yield from self._activate(left, alias)
        except Exception as error:
            if vllm_frontend.is_engine_dead(error):
                raise
            core_tried = progress.phase is SwitchPhase.SWITCHING
            progress.to(SwitchPhase.ROLLED_BACK if core_tried else SwitchPhase.FAILED)
            raise SwitchFailed(f"Failed to switch model from {left} to {alias}: {error}") from error
        finally:
            self.target = None
        self.active = alias
        residency.used(alias)
        reconfigure_s = load_s + progress.lap("core")
        if parting is not None and parting.tier is Tier.DROPPED:
            with suppress(SwitchFailed):  # a request came to it meanwhile: whoever needs room next takes it
                yield from self._go(parting, alias)
        progress.phases(answer["phases_ms"])
        progress.to(SwitchPhase.COMPLETED, **self._figures(left, answer), reconfigure_s=reconfigure_s)
        return progress.report

    def _ends_some(self, left: str, mode: SwitchMode) -> bool:
        """Whether the mode asks for an end of requests that there are."""
        return mode is not SwitchMode.KEEP and bool(self._frontends[left].running)

    def _fits_beside(self, alias: str) -> bool:
        """Whether there is room for a model beside all that are there. A switch may need the active one's alone."""
        try:
            return not self._residency.room_for(alias, beside=self.active)
        except NoRoom:
            return False

    def _load_beside(self, alias: str) -> Change[None]:
        """Load a model before anything ends for it: many break only then. Raises SwitchFailed, EngineDeadError."""
        if self._aside(alias) and (yield from self.begin_return(alias)):
            try:
                yield Arrive(alias)
            except Exception:
                self._residency.stays(alias)
                raise
        yield from self.preload(alias)

    def _settle(
        self, left: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, progress: SwitchProgress
    ) -> Change[int]:
        """Do what the mode asks with the requests of the model being left. Answers how many were aborted."""
        frontend = self._frontends[left]
        present = frontend.running
        if mode is SwitchMode.KEEP or not present:
            return 0
        if mode is SwitchMode.DRAIN:
            progress.to(SwitchPhase.DRAINING)
            # Those that come meanwhile are not waited for: they are frozen when the time is up.
            yield Finish(left, present, drain_timeout)
            if leftover is Leftover.KEEP:
                return 0
        left_over = present & frontend.running
        yield Abort(left, left_over)
        return len(left_over)

    def _activate(self, left: str, alias: str) -> Change[tuple[Any, Move | None]]:
        """Answers with what the core said, and with what is to become of the model that was left.

        That one is parked until the new one is there, even where it has to be dropped: it is what a failure goes
        back to. One that can't be parked lets go of its weights, and a failure loads them again.
        """
        residency = self._residency
        parting = yield from self._make_room(alias, spare=left)
        keep = Keep() if parting is None else residency.room_to_keep(left, incoming=alias, moves=(parting,))
        park_left = 0 if parting is None else 1 if residency.parks(left) else 2
        if park_left:
            yield EndStreams(left, HandedBack(f"{left} went from memory while it waited for its prompt"))
        if park_left > 1:
            yield HandBack(left, HandedBack(f"{left} can't be parked and was dropped to make room for {alias}"))
        found = residency.tier(alias)
        back = Ask(left, "activate", park_left=int(found is not Tier.RESIDENT))
        answer = yield from self._brought(
            Ask(
                alias,
                "activate",
                load=found is Tier.DROPPED,
                park_left=park_left,
                keep=keep,
                undo=(back, Ask(alias, "drop")) if found is Tier.DROPPED else (back,),
            )
        )
        if found is not Tier.RESIDENT:
            residency.note(alias, Tier.RESIDENT, answer)
        if park_left:
            residency.note(left, Tier.PARKED, answer, sizes="left")
        else:
            residency.note_lending(left, answer.get("left", {}))
        return answer, parting

    def _brought(self, ask: Ask) -> Change[Any]:
        """The core's answer. Where that fails, a model that was on its way is not any more."""
        try:
            return (yield ask)
        except Exception:
            self._residency.stays(ask.alias)
            raise

    def _figures(self, left: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        residency = self._residency
        after, host = mib(residency.memory), mib(residency.host)
        info, tier = residency.known(left), residency.stands(left)
        freed = info.kv_bytes + (0 if residency.budgets.shared else info.weights_bytes)
        return {
            "switched": True,
            "stall_ms": answer["stall_ms"],
            "stall_s": answer.get("stall_s", {}),
            "tier_left": tier,
            "kv_kept": info.kv_kept,
            "kv_kept_mb": mib(info.kv_kept_bytes),
            "kv_borrowed_mb": mib(info.kv_borrowed_bytes),
            "kv_wait_s": info.kv_wait_s,
            "kv_preempted": info.kv_preempted,
            "kept": len(self._frontends[left].running),
            "memory_after_mb": after,
            "memory_after_unload_mb": after,
            "stash_memory_after_mb": host,
            "host_memory_after_mb": host,
            "freed_memory_mb": mib(freed) if tier is Tier.PARKED else 0.0,
        }

    def preload(self, alias: str) -> Change[None]:
        """Load a model, or bring it back, beside the active one. Raises SwitchFailed, EngineDeadError."""
        residency = self._residency
        if residency.tier(alias) is Tier.RESIDENT:
            return
        with _failing(f"Failed to preload {alias}"):
            yield from self._make_room(alias, spare=None)
            dropped = residency.tier(alias) is Tier.DROPPED
            undo = (Ask(alias, "drop" if dropped else "park"),)
            answer = yield from self._brought(Ask(alias, "preload", load=dropped, undo=undo))
        residency.note(alias, Tier.RESIDENT, answer)

    def begin_return(self, alias: str) -> Change[bool]:
        """Begin to bring a model in beside the active one's steps. Whether there is something to wait for."""
        residency = self._residency
        if residency.tier(alias) is Tier.RESIDENT:
            return False
        with _failing(f"Failed to preload {alias}"):
            yield from self._make_room(alias, spare=None)
            dropped = residency.tier(alias) is Tier.DROPPED
            undo = (Ask(alias, "drop"),) if dropped else ()
            pending: bool = yield Ask(alias, "warm", load=dropped, undo=undo)
        if pending:
            residency.returning(alias)
        return pending

    def _make_room(self, alias: str, *, spare: str | None) -> Change[Move | None]:
        """Move what has to go for ``alias``. Answers with the move that is due to ``spare``, the model being left.

        Without ``spare`` the active model stays where it is. Raises NoRoom.
        """
        parting = None
        moves = self._residency.room_for(alias, beside=None if spare else self.active)
        for move in moves:
            if move.alias == spare:
                parting = move
            else:
                yield from self._go(move, alias, moves)
        return parting

    def _go(self, move: Move, alias: str, moves: Sequence[Move] = ()) -> Change[None]:
        """Take a model to a lower tier so that ``alias`` fits, its requests going back where they have to."""
        residency = self._residency
        if move.hand_back:
            reason = f"{move.alias} was dropped to make room for {alias}; the request was not finished"
            yield HandBack(move.alias, HandedBack(reason))
        if move.tier is Tier.PARKED is residency.stands(move.alias) and not residency.returns(move.alias):
            with _failing(f"{move.alias} can't let its KV cache go"):
                answer = yield Ask(move.alias, "park", keep=Keep(0))
            residency.note(move.alias, Tier.PARKED, answer)
            return
        yield from self.lower(move.alias, move.tier, residency.room_to_keep(move.alias, incoming=alias, moves=moves))

    def lower(self, alias: str, tier: Tier, keep: Keep | None = None) -> Change[None]:
        """Park or drop a model that is not active. One that can't be parked is dropped, if it has no requests.

        Raises SwitchFailed, EngineDeadError.
        """
        residency = self._residency
        there = residency.tier(alias)
        if tier is Tier.PARKED and there is Tier.RESIDENT and not residency.parks(alias):
            tier = Tier.DROPPED
        if there in {Tier.DROPPED, tier} and not residency.returns(alias):
            return
        if there is Tier.DROPPED:  # its load is given up; what waits for it goes on waiting
            with _failing(f"{alias} can't be dropped"):
                residency.note(alias, Tier.DROPPED, (yield Ask(alias, "drop")))
            return
        yield EndStreams(alias, HandedBack(f"{alias} went from memory while it waited for its prompt"))
        with _failing(f"{alias} can't be {tier}"):
            if tier is Tier.PARKED:
                keep = keep or residency.room_to_keep(alias)
                answer = yield Ask(alias, "park", keep=keep, undo=(Ask(alias, "preload"),))
            else:
                self._require_idle(alias)
                yield LetGo(alias)
                answer = yield Ask(alias, "drop")
        residency.note(alias, tier, answer)

    def _require_idle(self, alias: str) -> None:
        """Raises ValueError where a model has unfinished requests, which perhaps only one of several cores knows."""
        if unfinished := len(self._frontends[alias].running):
            raise ValueError(f"the context has {unfinished} unfinished requests")

    def wake(self, alias: str, tags: tuple[str, ...] | None) -> Change[None]:
        """Wake a sleeping model, moving what has to go for it. Raises SwitchFailed, EngineDeadError.

        One that was parked, too, stays so: a switch or a preload brings it back.
        """
        if self._residency.tier(alias) is not Tier.PARKED:
            with _failing(f"{alias} can't be woken"):
                yield from self._make_room(alias, spare=None)
        if (yield Wake(alias, tags)):
            self._residency.woke(alias)

    def remove(self, alias: str) -> Change[None]:
        """Drop a model that is to go for good, and have the core forget what still waits for it.

        Raises RuntimeError, SwitchFailed, EngineDeadError.
        """
        self.require_removable(alias)
        yield from self.lower(alias, Tier.DROPPED)
        self.require_removable(alias)
        yield Ask(alias, "remove")

    def require_removable(self, alias: str) -> None:
        """Raises RuntimeError where a model is active, or has unfinished requests."""
        if alias in {self.active, self.target}:
            raise RuntimeError(f"{alias} can't be removed: it is the active model; switch to another one first")
        if alias in self._frontends and (unfinished := len(self._frontends[alias].running)):
            raise RuntimeError(f"{alias} can't be removed: it has {unfinished} unfinished requests")
