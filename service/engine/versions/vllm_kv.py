"""What vLLM is asked so that models can lend each other blocks of their KV caches: sizes, pools and preemption.

A model's cache is laid out for more blocks than are its own; those that it may not use just now are *withheld*: they
are in no queue of vLLM's pool, as if they were not there. That needs one allocation, whose blocks can be told apart, as
0.32 has it: in 0.26 each layer has a tensor of its own, and nothing is lent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PLAN, _FLOOR, _BLOCK = "gearshift_kv_plan", "gearshift_kv_floor", "gearshift_kv_block"


@dataclass(frozen=True, slots=True)
class Plan:
    """That a model was planned together with others whose KV caches all fit on the device at once.

    In bytes of one worker: ``total`` is what they may use together, ``spare`` what this one may have beyond its own. In
    bytes of all workers: ``weights`` is what its weights were taken for.
    """

    weights: int
    total: int
    spare: int = 0


def set_plan(config: Any, plan: Plan | None) -> None:
    """Say it in a model's configuration, which goes to the core and the workers."""
    setattr(config.cache_config, _PLAN, plan)


def plan_of(config: Any) -> Plan | None:
    plan: Plan | None = getattr(config.cache_config, _PLAN, None)
    return plan


def get_kv_cache_configs(original: Callable[..., Any], config: Any, specs: Any, available: Sequence[int]) -> Any:
    """Replaces vLLM's own: a cache that can borrow is laid out for what it may have at the most.

    Whether a model's context fits is asked of its own part alone, as ever.
    """
    own = original(config, specs, available)
    plan = plan_of(config)
    if plan is None or not plan.spare or not all(map(is_one_allocation, own)) or is_fixed(config):
        return own
    larger = original(config, specs, [each + plan.spare for each in available])
    block = max(-(-each.kv_cache_tensors[0].size // each.num_blocks) for each in larger)
    for each in larger:
        setattr(each, _FLOOR, own[0].num_blocks)
        setattr(each, _BLOCK, block)
    return larger


def is_one_allocation(config: Any) -> bool:
    """Whether all layers' blocks lie in one allocation of the device's, where the layout says (0.32)."""
    tensors = config.kv_cache_tensors
    return bool(tensors) and all(not getattr(each, "host_resident", True) for each in tensors)


def is_fixed(config: Any) -> bool:
    """Whether somebody else has a say: a number of blocks that was given, a connector that has registered addresses."""
    return config.cache_config.num_gpu_blocks_override is not None or config.kv_transfer_config is not None


def floor_of(kv_config: Any) -> int | None:
    """Blocks of a KV cache that are the model's own; None where it neither lends nor borrows."""
    floor: int | None = getattr(kv_config, _FLOOR, None)
    return floor


def block_bytes(kv_config: Any) -> int:
    """What a block of one that lends takes, in all layers of one worker."""
    block: int = getattr(kv_config, _BLOCK)
    return block


class Pool:
    """The blocks of a model in the core. All counts are of those that it may use, without the null block."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._withheld: list[Any] = []
        manager, config = scheduler.kv_cache_manager, scheduler.kv_cache_manager.kv_cache_config
        manager.watermark_blocks = manager.watermark_blocks * (floor_of(config) or 0) // config.num_blocks
        _beginning_anew(scheduler)

    @property
    def has(self) -> int:
        """How many it may use, the null block included."""
        return len(self._pool.blocks) - len(self._withheld)

    @property
    def ids(self) -> list[int]:
        """Those."""
        withheld = {block.block_id for block in self._withheld}
        return [block.block_id for block in self._pool.blocks if block.block_id not in withheld]

    def free(self) -> tuple[int, int]:
        """How many have no content, and how many are known to the prefix cache only."""
        blocks = self._pool.free_block_queue.get_all_free_blocks()
        cached = sum(block.block_hash is not None for block in blocks)
        return len(blocks) - cached, cached

    def withhold_all(self) -> None:
        """Right after the core was built, when all are free."""
        self._withheld = self._pool.free_block_queue.get_all_free_blocks()[::-1]
        for block in self._withheld:
            self._pool.free_block_queue.remove(block)
        self._count()

    def withhold(self, blocks: int) -> int:
        """Take free ones away, those without content first; the prefix cache forgets the others. How many it were."""
        pool = self._pool
        free = pool.free_block_queue.get_all_free_blocks()
        chosen = [block for block in free if block.block_hash is None][:blocks]
        chosen += [block for block in free if block.block_hash is not None][: blocks - len(chosen)]
        for block in chosen:
            pool.free_block_queue.remove(block)
            pool._maybe_evict_cached_block(block)
        pool._notify_reuse(chosen)
        self._withheld += chosen
        self._count()
        return len(chosen)

    def give(self, blocks: int) -> None:
        """Let it use so many more."""
        given = [self._withheld.pop() for _ in range(blocks)]
        self._pool.free_block_queue.prepend_n(given)
        self._count()

    def preempt(self, blocks: int) -> int:
        """Preempt requests until so many blocks are free. Answers with how many requests.

        First sessions between two parts, for whose next token nobody waits yet, in their order; then what runs, the
        last first. For a model that does not run, with no step under way. They are prefilled again.
        """
        scheduler, preempted = self._scheduler, 0
        waiting = [request for request in scheduler.kv_holding_waiting if _has_blocks(scheduler, request)]
        while (waiting or scheduler.running) and self._pool.get_num_free_blocks() < blocks:
            if waiting:
                _preempt_waiting(scheduler, waiting.pop(0))
            else:
                _preempt(scheduler, scheduler.running.pop())
            preempted += 1
        return preempted

    def _count(self) -> None:
        """vLLM reckons with it what part of the cache is in use, and whether it is empty."""
        self._pool.num_gpu_blocks = self.has


def allocating_with(scheduler: Any, borrow: Callable[[Callable[[], int | None], Callable[[], Any]], Any]) -> None:
    """Have ``borrow`` called wherever a model's scheduler finds no blocks.

    It is given what says how many are missing at least, and what tries again. None are missing where no number of them
    would do: a recurrent state of this step can't be gone on from before the next one, of which vLLM says that more
    blocks are needed than there are. That can't be told from a need below the model's own blocks, which it may have.
    """
    manager = scheduler.kv_cache_manager
    allocate, needs = manager.allocate_slots, manager.coordinator.get_num_blocks_to_allocate
    pool, floor = manager.block_pool, floor_of(manager.kv_cache_config) or 0
    needed = 0

    def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
        nonlocal needed
        needed = needs(*args, **kwargs)
        return needed

    def missing() -> int | None:
        if needed > max(floor, pool.num_gpu_blocks):
            return None
        return max(1, needed - int(pool.get_num_free_blocks()))

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        found = allocate(*args, **kwargs)
        return borrow(missing, lambda: allocate(*args, **kwargs)) if found is None else found

    manager.coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
    manager.allocate_slots = allocate_slots


def _preempt(scheduler: Any, request: Any) -> None:
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _preempt_waiting(scheduler: Any, session: Any) -> None:
    """As vLLM preempts what runs, but that it goes on waiting for what it waited for.

    By how many tokens were computed vLLM knows which ones a session keeps when its next part comes: so that stays.
    """
    from vllm.v1.request import RequestStatus

    status, computed = session.status, session.num_computed_tokens
    scheduler.kv_holding_waiting.remove_request(session)
    session.status = RequestStatus.RUNNING
    _preempt(scheduler, session)
    session.status = status
    if status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        session.num_computed_tokens = computed


def _beginning_anew(scheduler: Any) -> None:
    """A session that was preempted between two parts is prefilled from its beginning when the next one comes."""
    update = scheduler._update_request_as_session

    def update_request_as_session(session: Any, part: Any) -> None:
        update(session, part)
        if not _has_blocks(scheduler, session):
            session.num_computed_tokens = 0

    scheduler._update_request_as_session = update_request_as_session


def _has_blocks(scheduler: Any, request: Any) -> bool:
    return any(scheduler.kv_cache_manager.get_blocks(request.request_id).blocks)
