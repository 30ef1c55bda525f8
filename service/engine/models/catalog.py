"""The models that an engine was given, by alias: their arguments, validated when somebody first needs them."""

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import nearest
from service.engine.models.checkpoint import Fingerprint, fingerprint
from service.engine.models.compatibility import require_beside, require_compatible, require_one_import
from service.engine.models.residency import give_kv_shares, kv_within, require_utilization, said_utilization
from service.engine.processes.inspection import asked_in_forks
from service.engine.system.environment import CHANGING, environment_of, set_apart
from service.engine.versions import checkpoints
from service.errors import ConfigError
from service.models_file import UNSET, Unset
from service.scheduling.memory import Budgets

QuantConfig = str | Unset | None
"""The QUANT_CONFIG of a model: a path, None to clear it, UNSET for the caller's."""


_PLAIN = frozenset({"builtins", "service.errors", "service.scheduling.memory"})
"""Modules whose errors hold nothing but words."""


@dataclass(frozen=True, slots=True)
class Made:
    """A finished configuration, and what else came of making it."""

    config: Any
    variables: Mapping[str, str | None]
    """What vLLM set in the environment meanwhile: the model's own."""
    read: Fingerprint
    """The files that it was made from."""


class Catalog:
    """Arguments and configurations by alias. One model that is wrong never keeps the others from serving.

    ``configs`` has the VllmConfigs that are finished, ``broken`` what is wrong with the others; both fill on demand.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        usage_context: Any = None,
        quant_configs: Mapping[str, str | None] | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        if not arguments:
            raise ValueError("model_configs cannot be empty")
        self.arguments = dict(arguments)
        self.quant_configs = dict(quant_configs or {})
        self.memory = dict(memory or {})
        """Bytes of the device that a model may take for weights and KV cache, where it was said."""
        self.usage_context = usage_context
        self._callers = dict(os.environ)
        """The environment in which the engine was made: other models' variables are set in it for a while."""
        self.configs: dict[str, Any] = {}
        self.broken: dict[str, Exception] = {}
        self._made: dict[str, Made] = {}
        """How the configurations came about."""
        checkpoints.forget()
        self._pattern: tuple[str, Any] | None = None
        """The model that the engine was started with, and its configuration."""
        self._imported: Mapping[str, str | None] = {}
        """What vLLM set for that one, under which the engine's processes have imported its modules."""

    def require(self, alias: str) -> None:
        """Raises ValueError for an unknown name, and says the nearest known one."""
        if alias not in self.arguments:
            known = list(self.arguments)
            raise ValueError(f"Model '{alias}' not found. Available: {known}{nearest(alias, known)}")

    def usable(self, alias: str) -> None:
        """Raises ValueError for an unknown name, and what is known to be wrong with the model's arguments."""
        self.require(alias)
        if alias in self.broken:
            raise _bare(self.broken[alias])

    def config(self, alias: str) -> Any:
        """The VllmConfig of a model. Raises ValueError for an unknown name, or what is wrong with its arguments."""
        self.require(alias)
        self.configure([alias])
        self.usable(alias)
        return self.configs[alias]

    def configure(self, aliases: list[str]) -> None:
        """Validate arguments; what is wrong with them is raised to whoever wants the model."""
        for alias in aliases:
            if alias in self.configs or alias in self.broken:
                continue
            try:
                self._take(alias, self._make(self.arguments[alias], self.environment(alias)))
            except Exception as error:
                self.set_aside(alias, error)

    def forget(self) -> None:
        """Make every configuration anew when it is needed next: an engine that ran has settled these."""
        for made in (self.configs, self.broken, self._made):
            made.clear()
        self._pattern = None

    def set_aside(self, alias: str, error: Exception) -> None:
        """Something is wrong with the model, which is raised to whoever wants it."""
        self.broken[alias] = _bare(error)
        self.configs.pop(alias, None)

    def _take(self, alias: str, made: Made) -> None:
        self._made[alias], self.configs[alias] = made, made.config

    def _make(self, arguments: Any, environment: Mapping[str, str | None]) -> Made:
        from service.platforms import current

        apart = set_apart("VLLM_")
        with CHANGING, environment_of(environment), asked_in_forks(), apart as variables:
            config = arguments.create_engine_config(self.usage_context)
        current().arrange(config)
        return Made(config, variables, fingerprint(config.model_config.model))

    def require_compatible(self, first: str) -> None:
        """Set those aside that can't live in one engine with ``first``. Raises what is wrong with that one itself."""
        pattern = self.config(first)
        self._pattern, self._imported = (first, pattern), self._made[first].variables
        accepted: dict[str, Any] = {}
        for alias, config in tuple(self.configs.items()):
            try:
                require_compatible(pattern, config, first_alias=first, alias=alias)
                require_beside(accepted, config, alias=alias)
                require_one_import(self._imported, self._made[alias].variables, first_alias=first, alias=alias)
                accepted[alias] = config
            except ConfigError as error:
                if alias == first:
                    raise
                self.set_aside(alias, error)

    def utilization(self, order: Iterable[str]) -> float | None:
        """The share of the device that the engine was given as gpu_memory_utilization, by the first that says one."""
        said = (said_utilization(self.configs[alias]) for alias in order if alias in self.configs)
        return next((each for each in said if each is not None), None)

    def divide(self, budgets: Budgets, aliases: Collection[str], *, lend: bool = False) -> None:
        """Settle the KV cache of each model; those of ``aliases`` whose memory can't be what is asked are set aside.

        ``lend``: these are all models, which may lend each other what they don't use.
        """
        for alias in [alias for alias in aliases if alias in self.configs]:
            try:
                require_utilization(alias, self.configs[alias], budgets)
            except ConfigError as refused:
                self.set_aside(alias, refused)
        asked = {alias: size for alias, size in self.memory.items() if alias in aliases and alias in self.configs}
        for alias, error in give_kv_shares(self.configs, budgets, asked, lend=lend).items():
            self.set_aside(alias, error)

    def validated(
        self,
        alias: str,
        arguments: Any,
        budgets: Budgets,
        quant_config: QuantConfig = UNSET,
        memory: int | None = None,
    ) -> Made:
        """The configuration of a model that is to be added. Raises what is wrong with its arguments or its memory."""
        assert self._pattern is not None
        first, pattern = self._pattern
        checkpoints.forget()
        made = self._make(arguments, self._own(quant_config))
        config = made.config
        require_utilization(alias, config, budgets)
        if memory is not None:
            kv_within(alias, config, memory)
        require_compatible(pattern, config, first_alias=first, alias=alias)
        require_beside({name: each for name, each in self.configs.items() if name != alias}, config, alias=alias)
        require_one_import(self._imported, made.variables, first_alias=first, alias=alias)
        return made

    def add(self, alias: str, arguments: Any, made: Made, quant_config: QuantConfig = UNSET) -> None:
        """Take up a model whose arguments were validated. Raises ValueError where the name is taken."""
        if alias in self.arguments:
            raise ValueError(f"Model '{alias}' is there already; remove it first")
        self.arguments[alias] = arguments
        self._take(alias, made)
        if quant_config is not UNSET:
            self.quant_configs[alias] = quant_config

    def remove(self, alias: str) -> None:
        for known in (self.arguments, self.configs, self.broken, self.quant_configs, self.memory, self._made):
            known.pop(alias, None)

    def loading(self, alias: str) -> tuple[Any, dict[str, str | None]]:
        """What the core needs in order to load a model: its configuration, and the environment for it.

        Raises as ``loadable`` does.
        """
        self.loadable(alias)
        return self.configs[alias], self.environment(alias)

    def loadable(self, alias: str) -> None:
        """Raises what ``usable`` raises, and ConfigError where the model's checkpoint was replaced meanwhile."""
        self.usable(alias)
        if self.replaced(alias):
            raise ConfigError(
                f"{alias}: the files at {self.configs[alias].model_config.model} have changed since they were read: "
                "its tokenizer and its configuration would be the old ones; remove the model and add it again"
            )

    def replaced(self, alias: str) -> bool:
        """Whether other files than weights lie where a model's configuration was read, or others than then."""
        return alias in self.configs and fingerprint(self.configs[alias].model_config.model) != self._made[alias].read

    def environment(self, alias: str) -> dict[str, str | None]:
        """What a model wants in the environment, wherever it is configured and loaded; None clears a variable.

        Without a word of its own about QUANT_CONFIG it gets what the engine's caller had when the engine was made,
        never what another model has. So it is with the variables that vLLM sets by itself for some models.
        """
        others = {name: self._callers.get(name) for made in self._made.values() for name in made.variables}
        own = self._made[alias].variables if alias in self._made else {}
        return {**others, **own, **self._own(self.quant_configs.get(alias, UNSET))}

    def _own(self, quant_config: QuantConfig) -> dict[str, str | None]:
        return {"QUANT_CONFIG": self._callers.get("QUANT_CONFIG") if quant_config is UNSET else quant_config}


def _bare(error: Exception) -> Exception:
    """An error of the nearest kind that can be made of its words alone.

    The one itself has the frames that it came through, and so have those inside it (pydantic keeps what validators
    raised): whoever keeps it keeps the engine that those frames saw.
    """
    kind = next(each for each in type(error).__mro__ if each.__module__ in _PLAIN and issubclass(each, Exception))
    try:
        return kind(str(error))
    except TypeError:  # it is made of something else
        return ValueError(str(error))


def by_alias(engine_args: Any) -> dict[str, Any]:
    """Engine arguments by alias; those of a single model under the name that it is served by."""
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    served = engine_args.served_model_name
    first = served[0] if isinstance(served, list) else served
    return {str(first or engine_args.model): engine_args}


def finished(vllm_config: Any) -> dict[str, Any]:
    """The same for configurations that are made already."""
    if not isinstance(vllm_config, Mapping):
        vllm_config = {vllm_config.model_config.served_model_name: vllm_config}
    return {alias: _Finished(config) for alias, config in vllm_config.items()}


class _Finished:
    """A configuration where engine arguments are expected."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def create_engine_config(self, _usage_context: Any) -> Any:
        """A copy: an engine settles what it starts with."""
        return copy.deepcopy(self._config)
