"""The workers' half of a context: a whole vLLM worker per model, with its runner, weights, graphs and KV tensors.

A worker process has one wrapper, which vLLM drives; changing the worker in the wrapper is the switch.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from service import memory
from service.engine.system.deadline import deadline
from service.engine.system.environment import set_environment
from service.engine.versions import held, vllm_kv, vllm_worker
from service.engine.worker.context import Unseated, WorkerContext
from service.engine.worker.slices import Pieces, Sliced
from service.platforms import current
from service.platforms.base import KV_CACHE, WEIGHTS, Asleep

log = logging.getLogger(__name__)

_NONE = -1
"""No context's key."""


class WorkerContexts:
    """All models in this process, by their contexts' keys; one of them sits in the wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.platform = current()
        self.held: list[held.Held] = [
            held.DeviceRandomState(self.platform),
            *(held.Variable(module, name) for module, name in self.platform.module_variables),
        ]
        """What the process holds for the model that runs, beyond vLLM's own."""
        self.variables = {*held.ENVIRONMENT, *self.platform.environment}
        """Environment variables that are a model's own."""
        self.at_start = {**dict.fromkeys(held.ENVIRONMENT), **self.platform.at_start}
        """Those variables where no model has set them: what they are for a model that has no word of its own."""
        self.active = 0
        self.by_key = {0: WorkerContext(wrapper.worker, wrapper.vllm_config, wrapper.mm_receiver_cache)}

    def seat(self, key: int) -> None:
        """Make ``key`` the model that this process runs. Where that fails it runs none, until one is seated again."""
        if key == self.active:
            return
        self._leave()
        with self._or_nobody():
            self._enter(key)

    @contextmanager
    def _or_nobody(self) -> Iterator[None]:
        """Where a model can't be seated inside, none is: whatever is asked of it raises, also ``execute_model``."""
        try:
            yield
        except BaseException as error:
            self.wrapper.worker, self.active = Unseated(str(error)), _NONE
            raise

    @contextmanager
    def seated(self, key: int) -> Iterator[None]:
        """``key`` sits in the wrapper inside, and again whatever did before."""
        before, sitting = self.active, self.wrapper.worker
        self.seat(key)
        try:
            yield
        finally:
            self._seat_again(before, sitting)

    def _seat_again(self, before: int, sitting: Any) -> None:
        if before == _NONE:
            self._leave()
            self.wrapper.worker, self.active = sitting, _NONE
        else:
            self.seat(before)

    def _leave(self) -> None:
        """Take what the seated model has along. Where that can't be done it stays seated, with all that it has."""
        if left := self.by_key.get(self.active):
            left.held = held.take(self.held)
            left.environment = held.environment(self.variables)
            with self._or_nobody():
                self.platform.leave(left.worker)

    def _enter(self, key: int) -> None:
        entered = self.by_key[key]
        self.wrapper.worker = entered.worker
        self.wrapper.vllm_config = entered.vllm_config
        self.wrapper.mm_receiver_cache = entered.mm_receiver_cache
        if entered.held is not None:
            held.put(entered.held)
        self._set_environment({**self.at_start, **entered.environment})
        self.platform.enter(entered.worker)
        self.active = key

    def _set_environment(self, values: dict[str, str | None]) -> None:
        if values != held.environment(values):
            set_environment(values)
            held.forget_environment()

    def load(
        self, key: int, config: Any, environment: dict[str, str | None], within_s: float | None = None
    ) -> dict[str, float]:
        """Build a worker for ``config`` beside the others, its weights loaded, and seat it.

        Answers how many milliseconds the runner and the weights took. On failure, and when it takes longer than
        ``within_s`` seconds, what was there before is seated again and nothing of the new model is left.
        """
        before, sitting = self.active, self.wrapper.worker
        used_before = self.platform.memory_used()
        self._get_ready(environment)
        self._leave()
        try:
            held.put_fresh(self.held)
            self._set_environment({**self.at_start, **environment})
            with deadline(within_s):
                worker, took = self._build(config)
            self.by_key[key] = WorkerContext(worker, config, vllm_worker.mm_receiver_cache(config))
            self.by_key[key].used_before = used_before
            self.by_key[key].environment = held.environment(self.variables)
            self._enter(key)
        except BaseException:
            if (failed := self.by_key.pop(key, None)) is not None:
                self._let_go(failed.worker)
            if before == _NONE:
                held.put_fresh(self.held)
                self.wrapper.worker, self.active = sitting, _NONE
            else:
                with self._or_nobody():
                    self._enter(before)
            self._collect()
            raise
        return took

    def begin(self, key: int, config: Any, environment: dict[str, str | None]) -> None:
        """Begin to load a model in slices, beside the one that is seated. It is ``go_on`` that does it.

        Where it fails, or is not wanted any more, it is to be forgotten.
        """
        self._get_ready(environment)
        coming = WorkerContext(Unseated("it is being loaded"), config, None, held=held.fresh(self.held))
        coming.environment = dict(environment)
        coming.used_before = coming.used_after = self.platform.memory_used()

        def load() -> dict[str, float]:
            with self.platform.aside(self._pattern()):
                coming.worker, took = self._build(config)
            coming.mm_receiver_cache = vllm_worker.mm_receiver_cache(config)
            log.info(
                "A model was loaded in slices; what could not be cut took %.0f ms at the most, up to %s",
                sliced.uncut_s * 1e3,
                sliced.uncut,
            )
            return took

        sliced = coming.sliced = Sliced(load)
        self.by_key[key] = coming

    def begin_call(self, key: int, work: Callable[[], Any]) -> None:
        """Begin to do something else to a model in slices."""
        context = self.by_key[key]

        def call() -> Any:
            with self.platform.aside(context.worker):
                return work()

        context.sliced = Sliced(call)

    def go_on(self, key: int, seconds: float, *, idle: bool, within_s: float | None) -> tuple[Any] | None:
        """A slice of what was begun, for which the seated model waits ``seconds``; ``idle``: it has nothing to do.

        None where it has not ended. Otherwise its answer, which can be asked for again: other workers perhaps need
        longer. Raises what it raised.
        """
        context = self.by_key[key]
        assert context.sliced is not None
        if not context.sliced.ended and context.sliced.waits(seconds if idle else 0):
            context.used_before += self.platform.memory_used() - context.used_after
            with self.seated(key):
                context.sliced.go_on(seconds, within_s)
            context.used_after = self.platform.memory_used()
        return (context.sliced.answer(),) if context.sliced.ended else None

    def _get_ready(self, environment: dict[str, str | None]) -> None:
        """For a load: its variables become a model's own.

        vLLM collects garbage three times while it loads: what was there before need not be searched. In a process of
        the engine what the other models have is searched, a few milliseconds for each (``garbage``).
        """
        new = environment.keys() - self.variables
        self.variables |= new
        self.at_start |= held.environment(new)
        gc.freeze()

    def _build(self, config: Any) -> tuple[Any, dict[str, float]]:
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        pattern = self._pattern()
        with self.platform.loading():
            with set_current_vllm_config(config):
                vllm_worker.make_expert_groups(config)
                worker = type(pattern)(
                    vllm_config=config,
                    local_rank=self.platform.local_rank(pattern),
                    rank=pattern.rank,
                    distributed_init_method=pattern.distributed_init_method,
                    is_driver_worker=pattern.is_driver_worker,
                )
                started = time.perf_counter()
                with self._given_back(worker):
                    self.platform.init_device(worker)
            built = time.perf_counter()
            with self._given_back(worker):
                worker.load_model()
            took = {"runner": (built - started) * 1e3, "weights": (time.perf_counter() - built) * 1e3}
        current_platform.update_block_size_for_backend(config)
        return worker, took

    def _pattern(self) -> Any:
        """A worker of this process, which tells where on this host it is."""
        return next(each.worker for each in self.by_key.values() if not isinstance(each.worker, Unseated))

    @contextmanager
    def _given_back(self, worker: Any) -> Iterator[None]:
        """What a worker that is being built has taken is given back where that fails.

        The frames that it failed in hold tensors, and are cleared.
        """
        try:
            yield
        except BaseException as error:
            for each in _with_causes(error):
                traceback.clear_frames(each.__traceback__)
            self._let_go(worker)
            raise

    def _let_go(self, worker: Any, *first: Callable[[Any], None]) -> None:
        """Cut what holds a model's memory. What goes wrong with one step of that must not keep the others from it."""
        for step in (*first, self.platform.release):
            try:
                step(worker)
            except Exception:
                # As text: frames of the error hold the model, and whoever keeps log records would keep it.
                log.error(  # noqa: TRY400
                    "A model could not be ended as vLLM ends it; its memory is let go of all the same\n%s",
                    traceback.format_exc(),
                )
        worker.model_runner = None

    def sizes(self, key: int) -> dict[str, int]:
        """Bytes of a model's weights, KV cache, overhead and host copies; ``parks``: whether it can be parked.

        ``copies`` are those that it will have on the host once it is parked. ``kv_kept``: what is kept of its KV cache
        while it is parked; ``kv_block``: what that takes of the host for each block, 0 where none can be kept.
        """
        context = self.by_key[key]
        if context.weights is None:
            context.weights = self.platform.weights_bytes(context.worker)
        weights, kv = context.weights, self._own_kv_bytes(context)
        if context.overhead is None:
            taken = self.platform.memory_used() - context.used_before
            context.overhead = max(0, taken - weights - kv) if self.platform.weights_move else 0
        return {
            "weights": weights,
            "kv": 0 if KV_CACHE in context.asleep.away | context.emptied else kv,
            "kv_kept": context.asleep.kept_bytes,
            "kv_block": self.platform.block_bytes(vllm_worker.kv_regions(context.worker)),
            "overhead": context.overhead,
            "host": context.asleep.host_bytes,
            "copies": self.platform.copies_bytes(context.worker, context.asleep),
            "parks": self.platform.parks(context.worker),
        }

    def _own_kv_bytes(self, context: WorkerContext) -> int:
        """Without what it is laid out for beyond that, which is lent to it if it is there at all."""
        kv, config = self.platform.kv_bytes(context.worker), vllm_worker.kv_cache_config(context.worker)
        floor = vllm_kv.floor_of(config)
        return kv if floor is None else kv * floor // config.num_blocks

    def give_back(self, key: int, blocks: Sequence[int]) -> None:
        """Give the system what a model's KV cache has beside ``blocks``."""
        worker = self.by_key[key].worker
        self.platform.give_back(worker, vllm_worker.kv_regions(worker), blocks)

    def park(self, key: int, level: int, blocks: Sequence[int] = ()) -> None:
        """Give a model's KV cache back, but for the content of ``blocks``, and move its weights to the host.

        Level 2 lets go of the weights altogether: waking loads them again. Where parking fails, what had gone is
        brought back.
        """
        context = self._settled(key)
        if context.emptied:
            return
        with self.seated(key):
            if level > 1:
                context.kv_config = vllm_worker.kv_cache_config(context.worker)
                context.emptied, context.weights_away, context.weights = {WEIGHTS, KV_CACHE}, False, None
                self.platform.empty(context.worker, context.asleep)
                held.forget_modules()
                self._collect()
                return
            try:
                context.asleep.regions = vllm_worker.kv_regions(context.worker)
                self.platform.park(context.worker, context.asleep, blocks)
            except BaseException:
                self.platform.wake(context.worker, context.asleep, frozenset({WEIGHTS, KV_CACHE}))
                raise
            context.weights_away = self.platform.weights_move

    def wake_aside(self, key: int) -> bool:
        """Begin to bring a parked model back while another one runs; False where that can't be done beside it.

        Whatever is done to the model afterwards waits until it is back. Where the platform has no thread for it, it is
        ``go_on`` that does it, between the steps of the other one.
        """
        context = self.by_key[key]
        if context.emptied:
            return False

        def bring_back() -> None:
            with self.platform.aside(context.worker):
                self._bring_back(context, frozenset({WEIGHTS, KV_CACHE}))

        if context.waking is not None:
            return True
        if self.platform.wakes_aside:
            executor = ThreadPoolExecutor(1, thread_name_prefix=f"wake-{key}")
            context.waking = executor.submit(bring_back)
            executor.shutdown(wait=False)
        else:
            context.waking = context.sliced = Pieces(self._way_back(key, context))
        return True

    def _way_back(self, key: int, context: WorkerContext) -> Generator[None, None, None]:
        """A parked model's way back in pieces; where one fails, what came back goes again."""
        blocks = context.asleep.blocks
        try:
            yield from self.platform.ahead(context.worker, context.asleep)
        except Exception:
            with self.seated(key):
                self.platform.park(context.worker, context.asleep, blocks)
            raise
        for tag in (WEIGHTS, KV_CACHE):
            with self.seated(key):
                self._bring_back(context, frozenset({tag}))
            yield

    def awake(self, key: int) -> bool:
        """Whether what ``wake_aside`` began is done, well or badly."""
        waking = self.by_key[key].waking
        return waking is None or waking.done()

    def _settled(self, key: int) -> WorkerContext:
        """A model with nothing under way. Raises what went wrong while it was brought back."""
        context = self.by_key[key]
        waking, context.waking = context.waking, None
        if waking is not None:
            waking.result()
            context.weights_away = False
        return context

    def wake(self, key: int, tags: frozenset[str]) -> None:
        """Bring a parked model back, or the parts of it that ``tags`` name."""
        context = self._settled(key)
        with self.seated(key):
            if WEIGHTS in context.emptied and WEIGHTS in tags:
                context.worker, _ = self._build(vllm_worker.fresh(context.vllm_config))
                context.asleep, context.weights = Asleep(), None
                context.emptied.discard(WEIGHTS)
                self.wrapper.worker = context.worker
            if not context.emptied:
                self._bring_back(context, tags)
                context.weights_away &= WEIGHTS not in tags
            if KV_CACHE in context.emptied and KV_CACHE in tags:
                self._rebuild_kv_cache(context)
                context.emptied.discard(KV_CACHE)

    def _bring_back(self, context: WorkerContext, tags: frozenset[str]) -> None:
        """Where it fails, what came back goes again, and it can be brought back another time."""
        blocks = context.asleep.blocks
        try:
            self.platform.wake(context.worker, context.asleep, tags)
        except BaseException:
            self.platform.park(context.worker, context.asleep, blocks)
            raise

    def start_over(self, key: int) -> set[str]:
        """Forget a step that failed. Answers with the requests that the model's runner knows, to be told their end.

        Raises what the device raises, if it can't be worked with any more.
        """
        with self.seated(key):
            self.platform.synchronize()
            return vllm_worker.forget_step(self.by_key[key].worker)

    def require_weights(self, key: int) -> None:
        """Raises RuntimeError where a model's weights are not on the device: nothing is there where they were."""
        context = self._settled(key)
        if context.weights_away or WEIGHTS in context.emptied:
            raise RuntimeError(
                "the model's weights are not on the device: switch to it, preload it, or wake it up where it sleeps"
            )

    def weights_change(self, key: int) -> None:
        """Copy the weights to the host anew when they go there the next time."""
        context = self._settled(key)
        context.weights = None
        if not context.weights_away:
            context.asleep.host = {}

    def _rebuild_kv_cache(self, context: WorkerContext) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(context.vllm_config), vllm_worker.making_kv_cache(context.kv_config):
            context.worker.initialize_from_config(context.kv_config)
        context.worker.compile_or_warm_up_model()

    def forget(self, key: int) -> None:
        """Let go of all that a model has here. It must not be the seated one."""
        self._release(key)
        self._collect()

    def _collect(self) -> None:
        """Have what was let go of collected, and its memory given back."""
        _collect_all()
        self.platform.collected()

    def forget_others(self) -> None:
        """Let go of every model but the seated one, which vLLM ends with the process; garbage is left to its end.

        So is one that is being loaded, which may be anywhere.
        """
        for key, context in tuple(self.by_key.items()):
            if key != self.active and (not isinstance(context.sliced, Sliced) or context.sliced.ended):
                self._release(key)

    def _release(self, key: int) -> None:
        context = self.by_key[key]
        if isinstance(context.waking, Future):
            wait((context.waking,))
        try:
            with self.seated(key):
                if context.sliced is not None:
                    context.sliced.give_up()
                self._let_go(context.worker, vllm_worker.end_transfers)
        except BaseException:  # it could not be seated, or the other one not again; whom to seat is told anew
            self._let_go(context.worker)
            raise
        finally:
            del self.by_key[key]


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _collect_all() -> None:
    """Collect garbage among what a load may have frozen, too, and give free pages of the heap back to the system.

    By itself glibc kept a dropped model of 22 MB three times over, until something small moved.
    """
    gc.unfreeze()  # nothing that is frozen is found by what forgets, either
    held.forget_tracing()
    gc.collect()
    memory.give_back()
