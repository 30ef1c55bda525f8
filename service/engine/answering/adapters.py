"""Which LoRA adapters each alias has, by name, and where they may be loaded from."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from schemas.errors import nearest
from service.engine.answering.answers import Answers
from service.errors import LoraRefused, UnknownModel

log = structlog.get_logger(__name__)


class Adapters:
    """What is wanted of adapters, per alias; it is done on the handlers of a model as soon as there are any."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._paths: dict[str, dict[str, str]] = {}
        self._pinned: dict[str, set[str]] = {}
        self._behind: set[str] = set()
        """The aliases that were away while something was wanted of their adapters."""

    def open(self, alias: str, loras: Mapping[str, str]) -> None:
        """An alias is there, with the adapters that models.yaml gives it."""
        self._paths[alias], self._pinned[alias] = dict(loras), set()

    def close(self, alias: str) -> None:
        """An alias is no more."""
        del self._paths[alias], self._pinned[alias]
        self._behind.discard(alias)

    def of(self, alias: str) -> tuple[str, ...]:
        return tuple(self._paths[alias])

    def behind(self, alias: str) -> bool:
        """Whether a model that is back is to be given what was wanted while it was away."""
        return alias in self._behind

    async def restore(self, alias: str, answers: Answers | None) -> None:
        """Give a model that was loaded, or is back, what it had, and what was wanted meanwhile; None: once it is.

        An adapter that can't be loaded is told in the log: its model serves, and its own requests fail.
        """
        if answers is None:
            self._behind.add(alias)
            return
        self._behind.discard(alias)
        wanted = dict(self._paths[alias])
        for name, found in answers.loras.items():
            try:
                if name not in wanted or _place(self._root, wanted[name]) != found:
                    await answers.remove_lora(name)
            except LoraRefused as refused:
                log.warning("engine.adapter_kept", alias=alias, adapter=name, reason=str(refused))
        for name, path in wanted.items():
            try:
                await self._load(name, path, answers, pinned=name in self._pinned[alias])
            except LoraRefused as refused:
                log.warning("engine.adapter_lost", alias=alias, adapter=name, reason=str(refused))

    async def _load(self, name: str, path: str, answers: Answers, *, pinned: bool) -> None:
        if name in answers.loras:
            await answers.load_lora(name)
        else:
            await answers.add_lora(name, resolved(self._root, path))
        if pinned:
            await answers.pin_lora(name)

    async def add(self, alias: str, name: str, path: str, answers: Answers | None) -> None:
        """Raises LoraRefused (no adapter there, not below ``lora_root``, the model takes none, the name is taken), and
        UnknownModel where the model goes meanwhile.
        """
        self._require_free(alias, name, away=answers is None)
        found = resolved(self._root, path)
        if answers is not None:
            await answers.add_lora(name, found)
        if alias not in self._paths:
            raise UnknownModel(f"{alias} was removed while {name} was loaded into it")
        self._want(alias, answers)
        self._paths[alias][name] = path

    async def remove(self, alias: str, name: str, answers: Answers | None) -> None:
        self._require(alias, name)
        if answers is not None and name in answers.loras:
            await answers.remove_lora(name)
        self._want(alias, answers)
        del self._paths[alias][name]
        self._pinned[alias].discard(name)

    async def pin(self, alias: str, name: str, answers: Answers | None, room: tuple[int, int]) -> None:
        """``room`` is for how many adapters at once, and for how many in memory. Raises UnknownModel, LoraRefused."""
        self._require(alias, name)
        (running, held), others = room, len(self._pinned[alias] - {name})
        if running + others >= held:
            raise LoraRefused(
                f"{name} can't be pinned: {alias} has memory for {held} adapters (max_cpu_loras), of which a batch may "
                f"need {running} (max_loras) and {others} are pinned; set max_cpu_loras to {running + others + 1}"
            )
        if answers is not None:
            await self._load(name, self._paths[alias][name], answers, pinned=True)
        self._want(alias, answers)
        self._pinned[alias].add(name)

    def _want(self, alias: str, answers: Answers | None) -> None:
        if answers is None:
            self._behind.add(alias)

    def _require_free(self, alias: str, name: str, *, away: bool) -> None:
        """A name means one thing: a request for it must not be answered by whoever comes first.

        The registry of a model that is there refuses what it has; what could not be loaded may be added again.
        """
        if name in self._paths:
            raise LoraRefused(f"{name} is a model; an adapter needs a name of its own")
        for other, adapters in self._paths.items():
            if (away or other != alias) and name in adapters:
                raise LoraRefused(f"{name} is an adapter of {other}; give this one another name")

    def _require(self, alias: str, name: str) -> None:
        if name not in self._paths[alias]:
            raise UnknownModel(f"no LoRA {name!r} on {alias}{nearest(name, self._paths[alias])}")


def resolved(root: Path | None, path: str) -> Path:
    """The folder of an adapter. Raises LoraRefused where it is not there, or not below ``root``."""
    found = _place(root, path)
    try:
        there = found.is_dir()
    except OSError as error:
        raise LoraRefused(f"no adapter at {path} below lora_root: {error}") from error
    if not there:
        raise LoraRefused(f"no adapter at {path} below lora_root")
    return found


def _place(root: Path | None, path: str) -> Path:
    """Where an adapter is to be. Raises LoraRefused where that is not below ``root``."""
    if root is None:
        raise LoraRefused("no adapter can be loaded: lora_root is not set")
    try:
        place = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise LoraRefused(f"{path!r} is no path below lora_root: {error}") from error
    if not place.is_relative_to(root.resolve()):
        raise LoraRefused(f"{path} is not below lora_root")
    return place
