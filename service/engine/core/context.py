"""A context in the engine core: one model's config, scheduler, KV-cache manager and step function.

Each context is an engine core of its own whose attributes are kept in its own ``__dict__``; the live core, whose loop
runs, *shares* the dictionary of the active one. So the switch in the core is one assignment, vLLM's methods run on any
context, and bound methods that a context keeps (its step function) stay right. What belongs to the process (queues,
sockets, the shutdown state) is carried over at the switch.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from service.engine.system import garbage
from service.engine.system.environment import environment_of
from service.engine.versions import checkpoints, held, vllm_core

if TYPE_CHECKING:  # it imports torch, which who only asks for a core's class does without
    from service.engine.core.coming import Return


class StepFailed(BaseException):
    """A step failed that a switch waited for, and the workers can't go on: the end of the engine, not of the switch.

    No exception of vLLM's handlers, which would answer the switch and go on.
    """


_MOST_MEDIA = 4 << 30
"""Bytes of what cancelled requests brought that are kept for one model: as many as a frontend, by vLLM's default,
remembers to have sent; what is older it sends again."""


@dataclass(frozen=True, slots=True)
class Media:
    """What a request brought that was cancelled before its model was there. Its frontend will not send that again."""

    features: list[Any]
    size: int

    @classmethod
    def of(cls, request: Any) -> "Media":
        features = request.mm_features or []
        return cls(features, vllm_core.media_bytes(features))

    def receive(self, core: Any) -> None:
        """Take it in as vLLM does with a request's."""
        if core.mm_receiver_cache is not None:
            core.mm_receiver_cache.get_and_update_features(self.features)


@dataclass(slots=True)
class Context:
    """One model in this core. ``core`` is None as long as the model is not loaded.

    The key is the index of the client that its frontend is: a request carries its context by ``client_index``.
    """

    key: int
    core: Any = None
    held: list[Any] = field(default_factory=list)
    """Requests that came before their model: EngineCoreRequest, or the Media of one that is not wanted any more."""
    asked: list[Future[Any]] = field(default_factory=list)
    """Calls that wait for the model to be loaded."""
    sizes: dict[str, int] = field(default_factory=dict)
    parked: bool = False
    arriving: bool = False
    """The workers are bringing it back while another one runs; parked until that is settled."""
    returning: "Return | None" = None
    """How they do that between the steps of the other one, where they do."""
    stall_s: dict[str, float] | None = None
    """What bringing it in beside the active one made that one wait for, by phase; until a switch tells of it."""
    unheard: set[str] = field(default_factory=set)
    """Requests that ended while its workers could not be told."""

    @property
    def loaded(self) -> bool:
        return self.core is not None

    @property
    def resident(self) -> bool:
        return self.loaded and not self.parked

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, also while the scheduler is paused."""
        waiting = sum(not isinstance(request, Media) for request in self.held)
        return waiting + (len(self.core.scheduler.requests) if self.core is not None else 0)

    def cancel_held(self, ids: set[str]) -> None:
        """Forget requests that came before their model, but for what the latest of them brought along."""
        room, kept = _MOST_MEDIA, []
        for request in reversed(self.held):
            if not isinstance(request, Media) and request.request_id not in ids:
                kept.append(request)
                continue
            media = request if isinstance(request, Media) else Media.of(request)
            room -= media.size
            if media.features and room >= 0:
                kept.append(media)
        self.held = kept[::-1]

    def end_requests(self) -> list[str]:
        """End its requests, whom its workers can't run. A core that has nothing else to do then is idle."""
        from vllm.v1.request import RequestStatus

        scheduler = self.core.scheduler
        ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
        self.unheard |= scheduler.finished_req_ids
        scheduler.finished_req_ids = set()
        return [request.request_id for request in ended]

    def complete_pauses(self) -> None:
        """Complete pauses, and what goes to sleep, that have nothing left to wait for: vLLM's loop, which would do it
        once a step has told the workers who ended, runs another model's core next."""
        core = self.core
        if core is not None and core._idle_state_callbacks and not core.scheduler.has_unfinished_requests():
            core._notify_idle_state_callbacks()

    def tell_ended(self) -> None:
        """Its workers can be told again."""
        self.core.scheduler.finished_req_ids |= self.unheard
        self.unheard = set()

    def arrive(self) -> None:
        """Nothing is brought back beside another model any more; ``stall_s`` is what that one has waited for it."""
        returning, self.returning, self.arriving = self.returning, None, False
        if returning is not None:
            self.stall_s = returning.stall_s
            returning.give_up(RuntimeError("it is not brought back beside another model any more"))

    def bury(self) -> None:
        """Let go of what the model has in this process."""
        core, self.core, self.sizes, self.unheard = self.core, None, {}, set()
        self.arrive()
        self.parked, self.stall_s = False, None
        if core is not None:
            end(core)
            vars(core).clear()
        garbage.collect()


class LiveCore:
    """The core whose loop runs: it builds contexts beside the one that it shares, and is given another one."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._process_names: frozenset[str] = frozenset()
        """Attributes of the live core that belong to the process; known once a second model is there."""
        # A client that balances between several cores counts by what each says has finished.
        self._tells_finished = core.scheduler.finished_req_ids_dict is not None

    def twin(self) -> Any:
        """A core that shares the live one's attributes."""
        twin = object.__new__(type(self.core))
        twin.__dict__ = self.core.__dict__
        return twin

    def build(self, config: Any, executor: Any) -> Any:
        """A core for one more model, whose weights the workers hold; ``executor`` is its view of them.

        In a thread of its own, too: what belongs to the process it gets by ``adopt``.
        """
        from vllm.v1.engine.core import EngineCore

        built = object.__new__(type(self.core))
        with vllm_core.keeping_none_hash():
            EngineCore.__init__(built, config, lambda _: executor, self.core.log_stats, None, self._tells_finished)
        try:
            assert executor.supported_tasks  # asked while the workers hold this model, and kept
        except BaseException:
            end(built)
            raise
        del built.aborts_queue
        return built

    def adopt(self, built: Any) -> None:
        """Give a core that was built what belongs to the process, by whichever one is live now."""
        live = vars(self.core)
        self._process_names = frozenset(live) - frozenset(vars(built))
        vars(built).update({name: live[name] for name in self._process_names})

    def quiesce(self) -> None:
        """Finish what is on the device and hand its tokens out; afterwards no step is under way. Raises StepFailed.

        Without the pause a core that schedules ahead would go on until all requests end.
        """
        core = self.core
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        paused = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                outputs, executed = core.step_fn()
                for output in (outputs or {}).items():
                    core.output_queue.put_nowait(output)
                core.post_step(executed)
        except Exception as error:
            raise StepFailed from error
        finally:
            core.scheduler.set_pause_state(paused)

    def forget_steps(self) -> None:
        """After a step that failed, and that the workers have forgotten: let go of those behind it."""
        core = self.core
        if core.batch_queue:
            core.batch_queue.clear()
        if hasattr(core.scheduler, "sched_step_seq"):  # 0.32: blocks may wait for steps that were sent to be done
            core.scheduler.processed_step_seq = core.scheduler.sched_step_seq
            core.scheduler._drain_deferred_frees()

    def forget_cache(self) -> None:
        """Once no request has any of it: blocks of the prefix cache are known by what was to be computed into them."""
        core = self.core
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
        core.scheduler.reset_encoder_cache()

    def share(self, target: Context) -> None:
        """Run ``target`` from the next step on."""
        live, left = self.core, vars(self.core)
        attributes = vars(target.core)
        attributes.update({name: left[name] for name in self._process_names})
        live.__dict__ = attributes
        # A signal may have asked for shutdown between the copy and the assignment.
        if "shutdown_state" in left:
            live.shutdown_state = max(live.shutdown_state, left["shutdown_state"])


def read_tokenizer(config: Any, *, after: threading.Thread | None) -> threading.Thread:
    """Begin to read a model's tokenizer, which vLLM keeps: building the core asks for it, once this has ended.

    What was read before is forgotten: it may be another one by now, also what ``after`` still reads, for a load of the
    same model that was given up.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    checkpoints.forget()

    def read() -> None:
        if after is not None:
            after.join()
            checkpoints.forget()
        with suppress(Exception):  # the building of the core meets it again, and tells
            cached_tokenizer_from_config(model_config=config.model_config)

    reading = threading.Thread(target=read, name="gearshift-tokenizer", daemon=True)
    reading.start()
    return reading


def has_environment(values: Mapping[str, str | None]) -> bool:
    """Whether variables are what they should be."""
    return all(os.environ.get(name) == value for name, value in values.items())


@contextmanager
def reading_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """vLLM reads these variables meanwhile, which belong to one model."""
    if has_environment(values):
        yield
        return
    try:
        with environment_of(values):
            held.forget_environment()
            yield
    finally:
        held.forget_environment()


@contextmanager
def ending_by_failed_steps() -> Iterator[None]:
    """A step that failed inside is an error of vLLM's own kinds again, where nobody answers it and goes on."""
    try:
        yield
    except StepFailed as failure:
        raise RuntimeError("a step failed that a switch waited for") from failure.__cause__


def ended_by_error(request_ids: list[str]) -> Any:
    """What a client is told of its requests that ended with an error of the engine's."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    ended = [EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR) for request_id in request_ids]
    return EngineCoreOutputs(finished_requests=set(request_ids), outputs=ended)


def in_own_process(core: Any) -> bool:
    """Whether a core has a process to itself, and is not called by its frontend as an object."""
    return "input_queue" in vars(core)


def end(core: Any) -> None:
    """What vLLM ends of a model in the core when the process does."""
    core.structured_output_manager.clear_backend()
    core.scheduler.shutdown()
