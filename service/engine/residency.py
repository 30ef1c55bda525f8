"""Where each model's context is, how big it is, and what has to go so that another one can come."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from schemas.contexts import ContextInfo, Tier
from service.scheduling.memory import Budgets, Holding, Move, make_room, share_of


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
        self._returning: set[str] = set()
        self.memory: int = 0
        """Bytes in use on the device, as the core last said."""

    def add(self, alias: str, config: Any) -> None:
        """A model that is not loaded, its size guessed from its checkpoint."""
        self._infos[alias] = ContextInfo(
            alias=alias,
            tier=Tier.DROPPED,
            weights_bytes=checkpoint_bytes(config.model_config.model),
            kv_bytes=config.cache_config.kv_cache_memory_bytes or 0,
        )

    def remove(self, alias: str) -> None:
        self._infos.pop(alias, None)

    def tier(self, alias: str) -> Tier:
        return self._infos[alias].tier

    def info(self, alias: str) -> ContextInfo:
        """A context as it stands, but for which one is active."""
        return self._infos[alias].model_copy(update={"unfinished": len(self._frontends[alias].running)})

    def infos(self) -> tuple[ContextInfo, ...]:
        return tuple(self.info(alias) for alias in self._infos)

    def pin(self, alias: str, pinned: bool) -> None:
        self._infos[alias] = self._infos[alias].model_copy(update={"pinned": pinned})

    def used(self, alias: str) -> None:
        """The model was made active just now."""
        self._used[alias] = time.monotonic()

    def expect(self, order: Sequence[str]) -> None:
        """Who will be made active next, soonest first: what has to go for another one is chosen by it."""
        self._next_use = {alias: float(rank) for rank, alias in enumerate(order)}

    def returning(self, alias: str) -> None:
        """A parked model is on its way back beside the active one: it takes its room on the device already."""
        self._returning.add(alias)

    def returns(self, alias: str) -> bool:
        return alias in self._returning

    def note(self, alias: str, tier: Tier, answer: Mapping[str, Any], *, sizes: str = "sizes") -> None:
        """Take over what the core answered about a context that it moved."""
        found = answer.get(sizes) or {}
        known = self._infos[alias]
        self._returning.discard(alias)
        self._infos[alias] = known.model_copy(
            update={
                "tier": tier,
                # On CPU weights are packed where they can't be counted: the checkpoint's size is the better figure.
                "weights_bytes": max(found.get("weights", 0), known.weights_bytes),
                "kv_bytes": found["kv"] if tier is Tier.RESIDENT and found else known.kv_bytes,
                "host_bytes": found.get("host", 0),
            }
        )
        if tier is Tier.RESIDENT and known.tier is not Tier.RESIDENT and "stall_ms" in answer:
            self._bring_back_s[alias] = answer["stall_ms"] / 1e3
        if "memory" in answer:
            self.memory = sum(answer["memory"])
        if "settled" in answer:
            self._frontends[alias].adopt(answer["settled"])

    def room_for(self, alias: str, *, beside: str | None = None) -> tuple[Move, ...]:
        """What has to go so that ``alias`` can be resident; ``beside`` stays where it is. Raises NoRoom."""
        if self.tier(alias) is Tier.RESIDENT:
            return ()
        holdings = [self._holding(name) for name in self._infos]
        return make_room(holdings, incoming=self._holding(alias), budgets=self.budgets, beside=beside)

    def _holding(self, alias: str) -> Holding:
        info = self.info(alias)
        return Holding(
            alias,
            Tier.RESIDENT if alias in self._returning else info.tier,
            info.weights_bytes,
            info.kv_bytes,
            self._used.get(alias, 0.0),
            info.unfinished,
            info.pinned,
            self._next_use.get(alias, math.inf),
            self._bring_back_s.get(alias, 1.0),
        )


def give_kv_shares(configs: Mapping[str, Any], budgets: Budgets) -> None:
    """Divide the device among the models that say nothing of their KV cache; vLLM would give it all to each."""
    sizes = [checkpoint_bytes(config.model_config.model) for config in configs.values()]
    silent = [config for config in configs.values() if not _says_kv(config)]
    if not silent or budgets.device is None:
        return
    share = share_of(budgets, weights=sizes, largest=max(sizes), models=len(configs))
    for config in silent:
        config.cache_config.kv_cache_memory_bytes = share


def _says_kv(config: Any) -> bool:
    cache = config.cache_config
    return cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None


def checkpoint_bytes(model: str) -> int:
    """Bytes of a local checkpoint's weights; 0 for one that is not here."""
    return sum(path.stat().st_size for path in _weight_files(model))


def read_ahead(model: str) -> None:
    """Read a local checkpoint's weights, so that the system has them in memory when they are loaded."""
    buffer = bytearray(8 << 20)
    for path in _weight_files(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _weight_files(model: str) -> list[Path]:
    folder = Path(model)
    return list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
