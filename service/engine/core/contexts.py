"""All contexts of an engine core: the ways between them, and what their frontends and executors ask of them."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import cloudpickle

from service.engine.core.coming import Coming, Load, Return, built_here
from service.engine.core.context import (
    Context,
    LiveCore,
    Media,
    end,
    ended_by_error,
    has_environment,
    in_own_process,
    read_tokenizer,
    reading_environment,
)
from service.engine.core.laps import Due, Laps, longest
from service.engine.core.lending import Lending
from service.engine.core.replies import Replies
from service.engine.core.seating import NOBODY, Seating, WorkerFailed, checked
from service.engine.system import ending, envelope
from service.engine.system.ending import end_with
from service.engine.versions import vllm_core, vllm_kv
from service.engine.worker import calls
from service.platforms import current
from service.platforms.base import KV_CACHE, WEIGHTS

log = logging.getLogger(__name__)

_SIZES = ("weights", "kv", "kv_kept", "overhead", "host", "copies")

_ANSWERING_S = 30.0
"""How long a worker may take to say what it knows after a step that failed: less than people wait for a dead engine."""

Loading = tuple[Any, dict[str, str | None]]
"""What loading a model takes: its config, and the environment that its workers want for it."""


class Contexts:
    """All contexts of an engine core; one of them is active."""

    def __init__(self, core: Any) -> None:
        self.live = LiveCore(core)
        self.executor = core.model_executor
        """vLLM's own executor; every context has a view of it."""
        core.model_executor = vllm_core.view_of(self.executor, core.vllm_config, self, 0)
        self.active = Context(key=0, core=self.live.twin())
        self.by_key: dict[int, Context] = {0: self.active}
        self._warming: Future[None] | None = None
        """Who waits for the load that is under way, or comes next, to begin with its warm-up."""
        self._due = self._within(None)
        """When the load is given up for which everything waits."""
        self._coming: dict[int, Load] = {}
        """What is loaded beside the active one, by their keys, until ``activate`` or ``preload`` settles it."""
        self._reading: dict[int, threading.Thread] = {}
        """Who reads each one's tokenizer, or did so last, by their keys."""
        self._awake = False
        """Whether the core's loop will look here again, though nobody asks for anything."""
        self._seating = Seating(self.executor)
        self._lending = Lending(vllm_kv.plan_of(core.vllm_config), self._give_back)
        self.replies: Replies | None = None
        """The short way to the callers, where there is one."""
        self.commands: dict[str, Callable[..., Any]] = {
            "attach": self.attach,
            "activate": self.activate,
            "preload": self.preload,
            "warming": self.warming,
            "warm": self.warm,
            "warmed": self.warmed,
            "park": self.park,
            "drop": self.drop,
            "remove": self.remove,
            "rpc": self.rpc,
            "describe": self.describe,
        }

    def of(self, key: int) -> Context:
        """The context of a client, loaded or not."""
        return self.by_key.setdefault(key, Context(key))

    # --- what the frontends ask -----------------------------------------------------------------------------------

    def attach(self, replies: str | None = None) -> dict[str, Any]:
        """The workers' process ids, and what the first model's loading settled.

        ``replies`` is where answers of switches go to where this process can reach it.
        """
        if replies is not None:
            with suppress(OSError):  # on another host
                self.replies = Replies(replies)
        if in_own_process(self.live.core):
            end_with(ending.forked_for or os.getppid())
        pids = self._workers(calls.attach)
        self._join(self.active)
        self._lending.runs(self.active.key)
        settled = vllm_core.settled(self.active.core)
        memory = self._workers(calls.memory)
        return {"pids": pids, "settled": settled, "sizes": self.active.sizes, "memory": memory}

    def activate(
        self,
        key: int,
        loading: Loading | None,
        park_left: int,
        within_s: float | None = None,
        most: int | None = None,
        cached: bool = False,
    ) -> dict[str, Any]:
        """Make a context the one whose steps are run; the others' requests stay where they are.

        One that is not loaded is loaded from ``loading``, its config and the environment that its loading wants, and
        given up after ``within_s`` seconds; a parked one is brought back. ``park_left`` makes room first by putting
        the active one to sleep at that level, where ``park`` says what it keeps; at 2 it must have no requests. When
        anything fails the active one goes on as if nothing had been asked.

        Where the target is resident its workers are told before its next step and not waited for here; nothing is
        known of their memory then. Where they can't seat it, its requests end with an error (see ``fail``).
        """
        laps = Laps()
        target, left = self.of(key), self.active
        if target is left:
            return laps.answer(memory=self._workers(calls.memory))
        self.live.quiesce()
        left.complete_pauses()
        laps.lap("quiesce")
        try:
            if park_left:
                self._park(left, park_left, most, cached)
                laps.lap("park")
            known: dict[str, Any] = {}
            if not target.resident:
                with self._whole(target):
                    self._bring(target, loading, laps, within_s)
                    self._seating.settle(key)
                    known |= {"memory": self._workers(calls.memory), "sizes": target.sizes}
            elif not vllm_core.workers_apart(self.executor):
                self._seating.settle(key)
            elif target.core.scheduler.has_requests():
                self._seating.tell(key)  # a step comes next: they seat it meanwhile
        except BaseException:
            with suppress(WorkerFailed):  # it is tried again before its next step
                self.ready()
            raise
        self.live.share(target)
        self.active = target
        self._lending.runs(key)
        laps.lap("swap")
        if target.stall_s is not None:
            known["stall_s"], target.stall_s = target.stall_s, None
        left.sizes.update(self._lending.figures(left.key))
        answer = laps.answer(left=left.sizes, **known)
        if loading is not None:
            answer["settled"] = vllm_core.settled(target.core)
            self._release_held(target)
        return answer

    def preload(self, key: int, loading: Loading | None, within_s: float | None = None) -> dict[str, Any]:
        """Load a context, or bring it back, while another one is active; the active one waits meanwhile."""
        laps = Laps()
        target = self.of(key)
        self.live.quiesce()
        laps.lap("quiesce")
        with self._whole(target):
            self._bring(target, loading, laps, within_s)
            target.stall_s = longest([laps.seconds, target.stall_s or {}])
            target.stall_s.pop("quiesce", None)
            answer = laps.answer(memory=self._workers(calls.memory), sizes=target.sizes, stall_s=target.stall_s)
        if loading is not None:
            answer["settled"] = vllm_core.settled(target.core)
            self._release_held(target)
        return answer

    def warming(self) -> Future[None]:
        """Done when the next load begins to warm its model up, or ends: from then on it may take longer.

        Nothing else is heard of it meanwhile, so that whoever waits can't tell a slow one from a stuck one.
        """
        self._warming_begins()
        self._warming = Future()
        return self._warming

    def warm(self, key: int, loading: Loading | None = None, within_s: float | None = None) -> bool:
        """Begin to bring a context in while the active one runs; False where there is nothing to wait for.

        A parked one is brought back. One that is not loaded is loaded from ``loading`` in slices, where that can be,
        and given up after ``within_s`` seconds. It counts as what it was until ``activate`` or ``preload`` settles it,
        which takes no time once it is ``warmed``.
        """
        target = self.of(key)
        if not target.loaded:
            return loading is not None and self._begin(key, loading, within_s)
        if target.parked and target is not self.active:
            target.arriving = all(self._workers(calls.wake_aside, key))
            if target.arriving and target.returning is None and not current().wakes_aside:
                target.returning = Return(key, self._within(None), workers=self._workers)
                self._stay_awake()
        return target.arriving

    def warmed(self, key: int) -> bool | Future[bool]:
        """Whether what ``warm`` began is done; the answer of one in slices comes when it has ended. Whoever hears False
        asks again.

        Raises what went wrong with a load; nothing is left of it then. What went wrong with a parked model is told by
        ``activate`` or ``preload``.
        """
        if (coming := self._coming.get(key)) is not None:
            if coming.error is not None:
                self._coming.pop(key).settle()
            return coming.over
        target = self.of(key)
        if target.returning is not None:
            return target.returning.ended or target.returning.over
        return not target.arriving or all(self._workers(calls.awake, key))

    def park(self, key: int, most: int | None = None, cached: bool = False) -> dict[str, Any]:
        """Give a context's KV cache back and its weights to the host. Its requests stay.

        Of the cache at most ``most`` bytes are kept: what its requests have, who are prefilled again where that is
        more, and where ``cached`` as much of the prefix cache as there is room for. One that is parked and has kept
        more lets it go. Raises ValueError where it is active or not loaded.
        """
        laps = Laps()
        target = self.of(key)
        if target is self.active or not target.loaded:
            raise ValueError("the active context can't be parked" if target.loaded else "the model is not loaded")
        self._park(target, 1, most, cached)
        laps.lap("park")
        target.stall_s = None
        return laps.answer(memory=self._workers(calls.memory), sizes=target.sizes, stall_s=laps.seconds)

    def drop(self, key: int) -> dict[str, Any]:
        """Let go of everything a context has. Raises ValueError where it is active or has unfinished requests.

        Of one that is on its way the load is given up, and the requests that wait for it go on waiting.
        """
        laps = Laps()
        target = self.of(key)
        if (coming := self._coming.pop(key, None)) is not None:
            coming.give_up(RuntimeError("the model is not wanted any more"))
            target.core = coming.core
            self._abandon(target)
            return laps.answer(memory=self._workers(calls.memory), sizes={})
        if target is self.active:
            raise ValueError("the active context can't be dropped")
        if target.unfinished:
            raise ValueError(f"the context has {target.unfinished} unfinished requests")
        if target.loaded:
            self._vacate(target)
            try:
                self._workers(calls.forget, key)
            except WorkerFailed:
                log.exception("A model was dropped, though not as it should be")
            self._bury(target)
        laps.lap("drop")
        return laps.answer(memory=self._workers(calls.memory), sizes={}, stall_s=laps.seconds)

    def remove(self, key: int) -> None:
        """Forget what waits for a model that was dropped for good: its slot is the next one's."""
        target = self.of(key)
        target.held.clear()
        asked, target.asked = target.asked, []
        for future in asked:
            future.set_exception(LookupError("the model was removed"))

    def rpc(self, key: int, sealed: bytes) -> dict[str, list[bytes]]:
        """Run what an envelope holds in each worker, on one model; only the workers open it."""
        if not self.of(key).loaded:
            raise LookupError("the model is not loaded")
        return {"sealed": [envelope.seal(self._workers(calls.run, key, sealed), key=envelope.launch_key())]}

    def describe(self) -> dict[str, Any]:
        """Which contexts are there, how big they are, how many requests they hold."""
        return {
            "active": self.active.key,
            "contexts": [
                {"key": context.key, "loaded": context.loaded, "unfinished": context.unfinished, **context.sizes}
                for context in self.by_key.values()
            ],
        }

    # --- what the contexts' executors ask -------------------------------------------------------------------------

    def relay(self, key: int, method: Any, timeout: float | None, args: Any, kwargs: dict[str, Any], **how: Any) -> Any:
        """Call the workers on a model that is not the active one. Raises WorkerFailed."""
        if callable(method):
            method = cloudpickle.dumps(method)
        rank = how.get("unique_reply_rank")
        one = how.get("single_value", False) or rank is not None
        reply = {} if rank is None else {"unique_reply_rank": rank}
        if (coming := built_here()) is not None:
            answers = coming.ask(method, args, kwargs)
            return answers[rank or 0] if one else answers
        due = self._coming[key].due if key in self._coming else self._due
        with due.warming_up(method):
            call = (key, method, args, kwargs, due.left())
            answers = self._workers(calls.call, *call, timeout=timeout, **reply)
        return answers[0] if one else answers

    def nap(self, key: int, method: str, *, level: int = 1, tags: list[str] | None = None) -> list[Any]:
        """What ``sleep`` and ``wake_up`` do to a context's memory; pausing and resuming is vLLM's.

        One that is parked has given its memory back, and has it again by ``activate`` or ``preload`` only: whoever
        counts what is on the device knows of these.
        """
        parked = self.of(key).parked
        if method == "wake_up":
            return [] if parked else self._workers(calls.wake, key, frozenset(tags or (WEIGHTS, KV_CACHE)))
        if parked and level == 1:
            return []
        try:
            _require_none(self.of(key), level)
            return self._workers(calls.park, key, level)
        except (ValueError, WorkerFailed) as error:
            core = self.of(key).core
            if not core.model_executor.is_sleeping:
                if isinstance(error, WorkerFailed):
                    with suppress(WorkerFailed):  # those workers that could park it bring it back
                        self._workers(calls.wake, key, frozenset({WEIGHTS, KV_CACHE}))
                core.resume_scheduler()
            raise

    def ready(self) -> None:
        """Before the workers are asked to run the active model: it is there, and seated. Raises WorkerFailed.

        A fault that passes costs a round trip: it is tried twice.
        """
        try:
            self._make_ready()
        except WorkerFailed:
            self._make_ready()

    def fail(self, error: WorkerFailed) -> Any:
        """End the active model's requests with an error, since the workers can't run it. Answers with the outputs.

        The engine lives: other models can be switched to, and this one is tried again with its next request. The
        requests that ended are told to its workers when they run it again.
        """
        log.error("The workers can't run the active model, so its requests end: %s", error)
        return {self.active.key: ended_by_error(self.active.end_requests())}

    def start_over(self, error: Exception) -> Any:
        """End the active model's requests with an error, since a step of it raised. Answers with the outputs.

        What the step left half done is forgotten, and the model is tried again with its next request; the others
        serve on. Raises ``error`` where a worker does not answer any more: that is the end of the engine.
        """
        log.error("A step of the active model failed, so its requests end", exc_info=error)
        try:
            known = self._workers(calls.start_over, self.active.key, timeout=_ANSWERING_S)
            self.live.forget_steps()
            ended = self.active.end_requests()
            self.live.forget_cache()
        except Exception:
            log.exception("The workers can't go on after the step that failed")
            raise error from None
        self.active.unheard = set().union(*known)
        return {self.active.key: ended_by_error(ended)}

    def weights_change(self, key: int) -> None:
        """A context's weights are about to change; what the host has of them won't be what they are."""
        self._workers(calls.weights_change, key)

    # --- what the core's loop does in between ---------------------------------------------------------------------

    def go_on(self, *, idle: bool = False) -> None:
        """A slice of what is brought in, one model after another; a long one where the active one is ``idle``."""
        if self._go_on(idle=idle):
            self._stay_awake()

    def woken(self) -> None:
        """The loop looks here: with nothing else to do it goes on with what is being loaded, otherwise steps do."""
        self._awake = False
        if not self.live.core.has_work():
            self.go_on(idle=True)

    def _stay_awake(self) -> None:
        """Without a request the loop waits for one, unless something is in its queue: vLLM's own word to wake up."""
        from vllm.v1.engine import EngineCoreRequestType

        if not self._awake:
            self._awake = True
            self.live.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    # --- how it is done -------------------------------------------------------------------------------------------

    def _go_on(self, *, idle: bool) -> bool:
        """False: nothing is being brought in in slices."""
        returning = (each.returning for each in self.by_key.values() if each.returning is not None)
        on_the_way: Iterator[Coming] = chain(self._coming.values(), returning)
        coming = next((each for each in on_the_way if not each.ended), None)
        if coming is None:
            return False
        coming.go_on(idle=idle)
        if coming.error is not None:
            log.error("A model could not be brought in beside the active one: %s", coming.error)
            if isinstance(coming, Load):
                self._abandon(self.of(coming.key))
        return True

    def _warming_begins(self) -> None:
        told, self._warming = self._warming, None
        if told is not None:
            told.set_result(None)

    def _within(self, seconds: float | None) -> Due:
        return Due(seconds, self.executor.parallel_config.world_size, warming=self._warming_begins)

    def _begin(self, key: int, loading: Loading, within_s: float | None) -> bool:
        """Begin to load a model in slices; False where its load can't be cut."""
        config, environment = loading
        if key in self._coming and self._coming[key].error is None:
            return True
        if not (current().slices and vllm_core.slices(self.executor, config)):
            return False
        self._make_apart(config)
        vllm_core.take_place(config, self.live.core.vllm_config)
        self._coming[key] = Load(
            key,
            loading,
            self._within(within_s),
            workers=self._workers,
            build=self._building(key, config, environment),
            end=end,
            aside=has_environment(environment),
        )
        self._stay_awake()
        return True

    def _building(self, key: int, config: Any, environment: dict[str, str | None]) -> Callable[[], Any]:
        """What builds a model's core once the workers have loaded it; they do so while its tokenizer is read."""
        self._reading[key] = reading = read_tokenizer(config, after=self._reading.get(key))

        def build() -> Any:
            reading.join()
            view = vllm_core.view_of(self.executor, config, self, key)
            with reading_environment(environment):
                return self.live.build(config, view)

        return build

    def _make_ready(self) -> None:
        if self.active.parked:  # a switch that made room failed, and this one could not be brought back at once
            self._wake(self.active)
        self._seating.settle(self.active.key)
        self.active.tell_ended()

    def _vacate(self, context: Context) -> None:
        """A context that is about to go is not seated, unless it is the active one."""
        if self._seating.key in {context.key, NOBODY}:
            with suppress(WorkerFailed):  # then none is
                self._seating.settle(self.active.key)

    def _workers(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **how: Any) -> list[Any]:
        """Their answers; where something went wrong, it is not known what they have seated. Raises WorkerFailed."""
        try:
            answers = self.executor.collective_rpc(function, timeout, args, None, **how)
            return checked([answers] if how else answers)
        except BaseException:
            self._seating.lost()
            raise

    @contextmanager
    def _whole(self, target: Context) -> Iterator[None]:
        """Where anything fails inside, a load is undone, also one that was done: its frontend hears of none."""
        loaded = target.loaded
        try:
            yield
        except BaseException:
            if not loaded:
                self._abandon(target)
            raise

    def _bring(self, target: Context, loading: Loading | None, laps: Laps, within_s: float | None) -> None:
        """Make a context resident, however far away it is. Where that fails ``_whole`` undoes a load."""
        if target.loaded:
            if target.parked:
                self._wake(target)
                laps.lap("wake")
            return
        coming = self._coming.get(target.key)
        if coming is not None and coming.error is None:
            try:
                target.core = coming.settle()
                target.stall_s = coming.stall_s
            finally:
                del self._coming[target.key]
            laps.lap("load")
            self._settle(target)
            return
        self._coming.pop(target.key, None)
        if loading is None:
            raise LookupError("the model is not loaded, and no configuration came along")
        config, environment = loading
        while not has_environment(environment) and self._go_on(idle=True):
            pass  # a thread that builds a core reads the process's variables, which are about to change
        self._make_apart(config)
        vllm_core.take_place(config, self.live.core.vllm_config)
        self._due = self._within(within_s)
        self._seating.lost()  # they seat what they load
        build = self._building(target.key, config, environment)
        try:
            took = self._workers(calls.load, target.key, config, environment, within_s)
            laps.lap("load", of_that=max(took, key=lambda parts: sum(parts.values())))
            target.core = build()
            laps.lap("build")
        finally:
            self._due = self._within(None)
            self._warming_begins()
        self._settle(target)

    def _settle(self, target: Context) -> None:
        self.live.adopt(target.core)
        self._join(target)

    def _park(self, context: Context, level: int, most: int | None, cached: bool) -> None:
        """Raises ValueError where it can't be parked: nothing has changed then. Raises WorkerFailed, and it is back."""
        there = context.parked and not context.arriving
        if there and (most is None or context.sizes["kv_kept"] <= most):
            return
        if level == 1 and not context.sizes.get("parks", True):
            raise ValueError("a model with graphs of fixed addresses can't be parked on this device")
        _require_none(context, level)
        self._vacate(context)
        blocks, left_out = self._blocks_to_keep(context, most, cached)
        context.arrive()
        context.parked = True
        try:
            sizes = self._workers(calls.park, context.key, level, blocks)
        except WorkerFailed:
            if not there:
                with suppress(WorkerFailed):  # those workers that could park it bring it back; or when it runs
                    self._wake(context)
            raise
        self._measure(context, sizes).update(left_out)

    def _blocks_to_keep(self, context: Context, most: int | None, cached: bool) -> tuple[list[int], dict[str, int]]:
        """The blocks of the KV cache that are to outlive parking; and how many requests were preempted, and how many
        blocks of the prefix cache evicted, because they can't.
        """
        scheduler, size = context.core.scheduler, context.sizes["kv_block"]
        in_use, idle = vllm_core.filled_blocks(scheduler)
        room = len(in_use) + len(idle)
        if not size or vllm_core.moves_blocks(scheduler):
            room = 0
        elif most is not None:
            room = most // size
            if self._lending.preempt(context.key, room):
                in_use, idle = vllm_core.filled_blocks(scheduler)
        if len(in_use) > room:
            preempted = len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
            return [], {"preempted": preempted, "evicted": len(idle)}
        evicted = idle[: max(0, len(idle) - (room - len(in_use)))] if cached else idle
        vllm_core.forget_blocks(scheduler, evicted)
        return in_use + idle[len(evicted) :], {"evicted": len(evicted)}

    def _wake(self, context: Context) -> None:
        context.arrive()
        try:
            sizes = self._workers(calls.wake, context.key, frozenset({WEIGHTS, KV_CACHE}))
        except WorkerFailed:
            with suppress(WorkerFailed):  # those that could bring it back let it go again, with what was kept
                in_use, idle = vllm_core.filled_blocks(context.core.scheduler)
                self._workers(calls.park, context.key, 1, in_use + idle)
            raise
        context.parked = False
        self._measure(context, sizes)

    def _measure(self, context: Context, answers: Sequence[Mapping[str, int]] = ()) -> dict[str, int]:
        """A context's sizes are what its workers answer, or have answered."""
        per_worker = answers or self._workers(calls.sizes, context.key)
        context.sizes = {name: sum(sizes[name] for sizes in per_worker) for name in _SIZES}
        context.sizes["parks"] = all(sizes["parks"] for sizes in per_worker)
        blocks = [sizes["kv_block"] for sizes in per_worker]
        context.sizes["kv_block"] = sum(blocks) if all(blocks) else 0
        return context.sizes

    def _bury(self, context: Context) -> None:
        context.bury()
        self._lending.leave(context.key)

    def _join(self, context: Context) -> None:
        """A model is loaded. One that takes more than was planned has taken it from what is lent."""
        self._lending.join(context)
        sizes, plan = self._measure(context), vllm_kv.plan_of(context.core.vllm_config)
        taken = sizes["weights"] + sizes["overhead"]
        if plan is not None and taken > plan.weights:
            log.warning(
                "A model takes %d bytes beside its KV cache, %d were planned: none is lent", taken, plan.weights
            )
            self._lending.end()

    def _make_apart(self, config: Any) -> None:
        """Before a model is loaded: one that was not planned with the others takes room that they may have lent."""
        if vllm_kv.plan_of(config) is None:
            self.live.quiesce()
            self._lending.end()

    def _give_back(self, key: int, blocks: list[int]) -> None:
        self._workers(calls.give_back, key, blocks)

    def _release_held(self, context: Context) -> None:
        held, context.held = context.held, []
        for request in held:
            try:
                if isinstance(request, Media):
                    request.receive(context.core)
                else:
                    self.live.core.add_request(request, request.current_wave)
            except Exception:  # it must not undo the load that it waited for
                log.exception("What waited for its model can't be taken in")
                if not isinstance(request, Media):
                    self.live.core.output_queue.put_nowait((context.key, ended_by_error([request.request_id])))
        asked, context.asked = context.asked, []
        for future in asked:
            future.set_result(context.core.get_supported_tasks())

    def _abandon(self, context: Context) -> None:
        """Undo a load that failed half way, in the workers and here."""
        self._seating.lost()
        self.executor.collective_rpc(calls.seat, args=(self.active.key,))
        self.executor.collective_rpc(calls.forget, args=(context.key,))
        self._bury(context)


def _require_none(context: Context, level: int) -> None:
    """Raises ValueError where weights are to go that requests still need."""
    if level > 1 and (requests := context.core.scheduler.requests):
        raise ValueError(f"{len(requests)} requests are unfinished: their state can't outlive the weights")
