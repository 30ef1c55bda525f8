"""Which LoRA adapters each alias has, by name, and where they may be loaded from."""

from collections.abc import Mapping
from pathlib import Path

from service.engine.answers import Answers
from service.errors import LoraRefused, UnknownModel, nearest


class Adapters:
    """What is wanted of adapters, per alias; it is done on the handlers of a model as soon as there are any."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._paths: dict[str, dict[str, str]] = {}
        self._pinned: dict[str, set[str]] = {}

    def open(self, alias: str, loras: Mapping[str, str]) -> None:
        """An alias is there, with the adapters that models.yaml gives it."""
        self._paths[alias], self._pinned[alias] = dict(loras), set()

    def close(self, alias: str) -> None:
        """An alias is no more."""
        del self._paths[alias], self._pinned[alias]

    def of(self, alias: str) -> tuple[str, ...]:
        return tuple(self._paths[alias])

    async def load_all(self, alias: str, answers: Answers) -> None:
        """Give a model that was just loaded what it is to have. Raises LoraRefused."""
        for name, path in self._paths[alias].items():
            await answers.add_lora(name, self._resolved(path))
        for name in self._pinned[alias]:
            await answers.pin_lora(name)

    async def restore(self, alias: str, answers: Answers) -> None:
        """Give a model that was loaded anew what it had, and what was wanted meanwhile. Raises LoraRefused."""
        wanted = {name: self._resolved(path) for name, path in self._paths[alias].items()}
        for name, path in answers.loras.items():
            if wanted.get(name) != path:
                await answers.remove_lora(name)
        for name, path in wanted.items():
            if name in answers.loras:
                await answers.load_lora(name)
            else:
                await answers.add_lora(name, path)
        for name in self._pinned[alias]:
            await answers.pin_lora(name)

    async def add(self, alias: str, name: str, path: str, answers: Answers | None) -> None:
        """Raises LoraRefused (no adapter there, not below ``lora_root``, the model takes none, the name is taken)."""
        self._require_free(alias, name)
        resolved = self._resolved(path)
        if answers is not None:
            await answers.add_lora(name, resolved)
        self._paths[alias][name] = path

    async def remove(self, alias: str, name: str, answers: Answers | None) -> None:
        self._require(alias, name)
        if answers is not None:
            await answers.remove_lora(name)
        del self._paths[alias][name]
        self._pinned[alias].discard(name)

    async def pin(self, alias: str, name: str, answers: Answers | None) -> None:
        self._require(alias, name)
        if answers is not None:
            await answers.pin_lora(name)
        self._pinned[alias].add(name)

    def _require_free(self, alias: str, name: str) -> None:
        """A name means one thing: a request for it must not be answered by whoever comes first."""
        if name in self._paths:
            raise LoraRefused(f"{name} is a model; an adapter needs a name of its own")
        for other, adapters in self._paths.items():
            if other != alias and name in adapters:
                raise LoraRefused(f"{name} is an adapter of {other}; give this one another name")

    def _require(self, alias: str, name: str) -> None:
        if name not in self._paths[alias]:
            raise UnknownModel(f"no LoRA {name!r} on {alias}{nearest(name, self._paths[alias])}")

    def _resolved(self, path: str) -> Path:
        if self._root is None:
            raise LoraRefused("no adapter can be loaded: lora_root is not set")
        resolved = (self._root / path).resolve()
        if not resolved.is_relative_to(self._root.resolve()):
            raise LoraRefused(f"{path} is not below lora_root")
        if not resolved.is_dir():
            raise LoraRefused(f"no adapter at {path} below lora_root")
        return resolved
