"""Where each model's context is, how big it is, and what has to go so that another one can come."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from schemas.contexts import ContextInfo, KvKept, Tier
from service.engine.models.checkpoint import checkpoint_bytes
from service.engine.models.switching import mib
from service.engine.versions import vllm_kv
from service.engine.versions.vllm_kv import Plan
from service.errors import ConfigError
from service.scheduling.memory import Budgets, Holding, Keep, Move, make_room, room_to_keep, share_of

_FOR_BUFFERS = 32
_BUFFERS = 1 << 20
"""Beside its weights a model has tables of rotations and the like: one part in so many, and so many bytes a worker."""


class ModelFrontend(Protocol):
    """What of a model's frontend matters to where its context is."""

    alias: str
    registry: Any

    @property
    def running(self) -> frozenset[str]:
        """Internal ids of the requests that have not ended."""
        ...

    def adopt(self, settled: dict[str, Any]) -> None:
        """Take over what loading settled: the number of blocks, perhaps a shorter context."""
        ...


class Residency:
    """The contexts' tiers as the frontend knows them; the core is asked to change them, never read back."""

    def __init__(self, frontends: Mapping[str, ModelFrontend], budgets: Budgets) -> None:
        self._frontends = frontends
        self.budgets = budgets
        self._infos: dict[str, ContextInfo] = {}
        self._used: dict[str, float] = {}
        self._next_use: dict[str, float] = {}
        self._bring_back_s: dict[str, float] = {}
        self._overhead: dict[str, int] = {}
        """What each has on the device beside weights and KV cache; known once it was loaded."""
        self._copies: dict[str, int] = {}
        """What each takes of the host once it is parked; known once it was loaded."""
        self._unparkable: set[str] = set()
        self._ranks: dict[str, int] = {}
        """In how many cores each is; what a rule says of all of them is divided."""
        self._workers: dict[str, int] = {}
        """How many workers each has in a core."""
        self._returning: set[str] = set()
        self._asleep: dict[str, Tier] = {}
        """Contexts that were put to sleep and not woken, with the tier that this comes to."""
        self._paused: set[str] = set()
        """Those, and the ones that were only paused: nothing of them is scheduled."""
        self.memory: int = 0
        """Bytes in use on the device, as the core last said."""

    def add(self, alias: str, config: Any) -> None:
        """A model that is not loaded, its size guessed from its checkpoint."""
        self._infos[alias] = ContextInfo(
            alias=alias,
            tier=Tier.DROPPED,
            weights_bytes=weights_of(config),
            kv_bytes=(config.cache_config.kv_cache_memory_bytes or 0) * workers_of(config),
            max_model_len=config.model_config.max_model_len,
        )
        self._ranks[alias] = config.parallel_config.data_parallel_size
        self._workers[alias] = config.parallel_config.world_size

    def remove(self, alias: str) -> None:
        """Nothing is known of a model of that name any more; one that is added under it is another one."""
        known: tuple[dict[str, Any], ...] = (self._infos, self._used, self._next_use, self._bring_back_s)
        for each in (*known, self._overhead, self._copies, self._ranks, self._workers, self._asleep):
            each.pop(alias, None)
        for marked in (self._unparkable, self._returning, self._paused):
            marked.discard(alias)

    def parks(self, alias: str) -> bool:
        """Whether a model can be parked, as far as is known: those that were never loaded are taken for such."""
        return alias not in self._unparkable

    def tier(self, alias: str) -> Tier:
        """Where the core holds a context; one that sleeps comes back by waking only."""
        return self._infos[alias].tier

    def known(self, alias: str) -> ContextInfo:
        """What was last said of a context; how it stands and what it has to do, ``info`` adds."""
        return self._infos[alias]

    def info(self, alias: str) -> ContextInfo:
        """A context as it stands, but for which one is active."""
        found = {"tier": self.stands(alias), "asleep": alias in self._asleep}
        return self._infos[alias].model_copy(update={**found, "unfinished": len(self._frontends[alias].running)})

    def infos(self) -> tuple[ContextInfo, ...]:
        return tuple(self.info(alias) for alias in self._infos)

    def tiers(self) -> dict[str, Tier]:
        """The tier of every context, as ``infos`` has it."""
        return {alias: self.stands(alias) for alias in self._infos}

    def stands(self, alias: str) -> Tier:
        """Where a context is, or its memory while it sleeps."""
        return self._asleep.get(alias, self._infos[alias].tier)

    def _learn(self, alias: str, **found: Any) -> None:
        """Keep what was found of a context. With most switches it is what was known."""
        known = self._infos[alias]
        if any(getattr(known, name) != value for name, value in found.items()):
            self._infos[alias] = known.model_copy(update=found)

    @property
    def host(self) -> int:
        """Bytes of host memory that hold copies of contexts which are not on the device, or were not."""
        return sum(info.host_bytes for info in self._infos.values())

    def pin(self, alias: str, pinned: bool) -> None:
        self._learn(alias, pinned=pinned)

    def slept(self, alias: str, level: int) -> None:
        """The model gave its memory back without being parked or dropped. Level 0 only pauses it.

        So does level 1 where it was parked before: it has on the host what it had. What level 2 let go of is gone.
        """
        self._paused.add(alias)
        if level == 0 or self._asleep.get(alias) is Tier.DROPPED:
            return
        known = self._infos[alias]
        self._asleep[alias] = Tier.PARKED if level == 1 else Tier.DROPPED
        if level == 1 and known.tier is Tier.PARKED:
            return
        host = known.weights_bytes if level == 1 and not self.budgets.shared else 0
        self._learn(alias, host_bytes=host, kv_kept_bytes=0, kv_kept=None)

    def woke(self, alias: str) -> None:
        self._asleep.pop(alias, None)
        self._paused.discard(alias)

    def schedules(self, alias: str) -> bool:
        """Whether requests of the model can go on once it is active: it was not put to sleep, not even at level 0."""
        return alias not in self._paused

    def asleep(self) -> tuple[str, ...]:
        return tuple(self._asleep)

    def used(self, alias: str) -> None:
        """The model was made active just now."""
        self._used[alias] = time.monotonic()

    def expect(self, order: Sequence[str]) -> None:
        """Who will be made active next, soonest first: what has to go for another one is chosen by it."""
        self._next_use = {alias: float(rank) for rank, alias in enumerate(order)}

    def returning(self, alias: str) -> None:
        """A model is on its way beside the active one: it takes its room on the device already."""
        self._returning.add(alias)

    def stays(self, alias: str) -> None:
        """It did not get there."""
        self._returning.discard(alias)

    def returns(self, alias: str) -> bool:
        return alias in self._returning

    def note(self, alias: str, tier: Tier, answer: Mapping[str, Any], *, sizes: str = "sizes") -> None:
        """Take over what the core answered about a context that it moved."""
        found = answer.get(sizes) or {}
        known = self._infos[alias]
        arrived = alias in self._returning
        self._returning.discard(alias)
        if tier is Tier.DROPPED:
            self.woke(alias)
        elif alias in self._asleep and tier is not known.tier:  # its memory was moved; it is scheduled once it wakes
            self._asleep[alias] = tier
        self._overhead[alias] = max(found.get("overhead", 0), self._overhead.get(alias, 0))
        self._copies[alias] = found.get("copies", self._copies.get(alias, 0))
        if "parks" in found:
            (self._unparkable.discard if found["parks"] else self._unparkable.add)(alias)
        self._learn(
            alias,
            tier=tier,
            weights_bytes=self._weights(found.get("weights", 0), known.weights_bytes),
            kv_bytes=found["kv"] if tier is Tier.RESIDENT and found else known.kv_bytes,
            host_bytes=found.get("host", 0),
            kv_kept_bytes=found.get("kv_kept", 0),
            kv_kept=_what_was_kept(found) if tier is Tier.PARKED else None,
            stall_s=answer["stall_s"] if "stall_s" in answer and sizes == "sizes" else known.stall_s,
        )
        if tier is Tier.RESIDENT and known.tier is not Tier.RESIDENT and "stall_ms" in answer and not arrived:
            self._bring_back_s[alias] = answer["stall_ms"] / 1e3
        if "memory" in answer:
            self.memory = sum(answer["memory"])
        if sizes == "left":
            self.note_lending(alias, found)
        if "settled" in answer:
            self._frontends[alias].adopt(answer["settled"])
            self._learn(alias, max_model_len=answer["settled"]["max_model_len"])

    def note_lending(self, alias: str, found: Mapping[str, Any]) -> None:
        """Take over what the core said of a model that it left: what it had borrowed, and had waited for."""
        self._learn(
            alias,
            kv_borrowed_bytes=found.get("kv_borrowed", 0) * self._workers[alias],
            kv_wait_s=found.get("kv_wait_s", 0.0),
            kv_preempted=found.get("kv_preempted", 0),
        )

    def _weights(self, found: int, known: int) -> int:
        """What was measured, once it was: a checkpoint's files may hold more, or less, than a device.

        Where host and device are one, weights are packed where they can't be counted: the files say it better.
        """
        return max(found, known) if self.budgets.shared else found or known

    def room_for(self, alias: str, *, beside: str | None = None) -> tuple[Move, ...]:
        """What has to go so that ``alias`` can be resident; ``beside`` stays where it is. Raises NoRoom."""
        if self.stands(alias) is Tier.RESIDENT:
            return ()
        holdings = [self._holding(name) for name in self._infos]
        return make_room(holdings, incoming=self._holding(alias), budgets=self.budgets, beside=beside)

    def room_to_keep(self, alias: str, *, incoming: str | None = None, moves: Sequence[Move] = ()) -> Keep:
        """What each of its cores may keep of a model's KV cache while it is parked so that ``incoming`` can come."""
        keep = room_to_keep(
            [self._holding(name) for name in self._infos],
            alias,
            budgets=self.budgets,
            incoming=None if incoming is None else self._holding(incoming),
            moves=moves,
        )
        return keep if keep.most is None else Keep(keep.most // self._ranks[alias], keep.cached)

    def _holding(self, alias: str) -> Holding:
        info = self._infos[alias]
        return Holding(
            alias,
            Tier.RESIDENT if alias in self._returning else self.stands(alias),
            info.weights_bytes,
            info.kv_bytes,
            self._used.get(alias, 0.0),
            len(self._frontends[alias].running),
            info.pinned,
            self._next_use.get(alias, math.inf),
            self._bring_back_s.get(alias, 1.0),
            overhead=self._overhead.get(alias, 0),
            host=info.host_bytes,
            copies=self._copies.get(alias, 0),
            kept=info.kv_kept_bytes,
            parks=self.parks(alias),
        )


def _what_was_kept(found: Mapping[str, int]) -> KvKept:
    if found.get("preempted"):
        return KvKept.NONE
    return KvKept.IN_USE if found.get("evicted") else KvKept.ALL


def give_kv_shares(
    configs: Mapping[str, Any], budgets: Budgets, memory: Mapping[str, int], *, lend: bool = False
) -> dict[str, ConfigError]:
    """Settle the KV cache of every model, whose workers would each take most of a device if nobody said anything.

    ``memory`` are the bytes that an alias may take for weights and KV cache together, in all of its workers. The
    others that say nothing share what is left; where all models fit at once, and ``lend``, they lend each other what
    they don't use of it. Answers with the aliases whose bytes can't be what is asked.
    """
    refused = {}
    for alias, allowed in memory.items():
        try:
            _give(configs[alias], kv_within(alias, configs[alias], allowed))
        except ConfigError as error:
            refused[alias] = error
    # Where only the number of blocks is said, vLLM would measure, and let go of other models' graphs as it does.
    silent = [config for config in configs.values() if config.cache_config.kv_cache_memory_bytes is None]
    if silent and budgets.device is not None:
        lend = lend and len(silent) > 1 and not any(map(vllm_kv.is_fixed, silent))
        sizes = [_expected(config) if lend else weights_of(config) for config in configs.values()]
        taken = sum((each.cache_config.kv_cache_memory_bytes or 0) * workers_of(each) for each in configs.values())
        share = share_of(budgets, weights=sizes, models=len(silent), taken=taken)
        for config in silent:
            _give(config, share)
        if lend and share * len(silent) + sum(sizes) + taken <= (budgets.to_share or 0):
            _let_lend(configs.values(), silent, share)
    return refused


def _let_lend(configs: Iterable[Any], silent: Sequence[Any], share: int) -> None:
    """Say in all configurations that they were planned together, and in those that share what they may borrow."""
    for config in configs:
        workers = workers_of(config)
        spare = (len(silent) - 1) * share // workers if any(each is config for each in silent) else 0
        plan = Plan(weights=_expected(config), total=len(silent) * (share // workers), spare=spare)
        vllm_kv.set_plan(config, plan)


def _expected(config: Any) -> int:
    """What a model's weights are taken for where KV memory is to be lent: with the buffers that no checkpoint has.

    Where they turn out to be more, not all models fit at once, and nothing is lent.
    """
    size = weights_of(config)
    return size + size // _FOR_BUFFERS + _BUFFERS * workers_of(config)


def said_utilization(config: Any) -> float | None:
    """A model's gpu_memory_utilization, where it is not vLLM's default."""
    from vllm.config import CacheConfig

    said: float = config.cache_config.gpu_memory_utilization
    return None if said == CacheConfig.gpu_memory_utilization else said


def require_utilization(alias: str, config: Any, budgets: Budgets) -> None:
    """Raises ConfigError where a model's gpu_memory_utilization is not what the engine as a whole was given."""
    said = said_utilization(config)
    if said in {None, budgets.utilization}:
        return
    if budgets.utilization is None:
        whole = "device_memory_bytes says what the whole engine may take"
    else:
        whole = f"it is the whole engine's share of the device, which was said as {budgets.utilization:g}"
    raise ConfigError(f"{alias}: gpu_memory_utilization is {said:g}, but {whole}; give an alias its part with memory")


def kv_within(alias: str, config: Any, allowed: int) -> int:
    """What the bytes that a model may take leave for its KV cache. Raises ConfigError: nothing, or not known."""
    if _says_kv(config):
        raise ConfigError(f"{alias}: memory decides the size of the KV cache; remove what else says it")
    if not all(_checkpoints(config)):
        raise ConfigError(
            f"{alias}: memory can't be divided before its weights are here, which nothing tells the size of: "
            "download them first, or say kv_cache_memory_bytes instead"
        )
    if allowed <= weights_of(config):
        raise ConfigError(
            f"{alias}: memory is {mib(allowed):.1f} MiB, of which its weights take {mib(weights_of(config)):.1f} MiB"
        )
    return allowed - weights_of(config)


def _give(config: Any, kv: int) -> None:
    """Give a model ``kv`` bytes of KV cache, divided among its workers."""
    config.cache_config.kv_cache_memory_bytes = kv // workers_of(config)


def workers_of(config: Any) -> int:
    """How many workers hold a model."""
    return config.parallel_config.world_size * config.parallel_config.data_parallel_size


def weights_of(config: Any) -> int:
    """Bytes of a model's weights in all of its workers, by its checkpoints: split by some, repeated by others."""
    return sum(_checkpoints(config)) * config.parallel_config.data_parallel_size


def _checkpoints(config: Any) -> list[int]:
    """Bytes of a model's checkpoint, and of its drafter's, where that has one of its own; 0 for one of unknown size."""
    models = [config.model_config]
    if config.speculative_config is not None:
        models.append(config.speculative_config.draft_model_config)
    named = {(each.model, each.revision) for each in models if each is not None}
    return [checkpoint_bytes(model, revision) for model, revision in named]


def _says_kv(config: Any) -> bool:
    cache = config.cache_config
    return cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
