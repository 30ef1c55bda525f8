"""What a model's frontend logs, and its metrics in a Prometheus registry of its own."""

from dataclasses import dataclass, replace
from typing import Any

from service.engine.versions import vllm_frontend


@dataclass(frozen=True, slots=True)
class Logging:
    """What frontends log, in AsyncLLM's terms."""

    stats: bool = True
    requests: bool = False
    aggregate: bool = False
    factories: tuple[Any, ...] = ()

    def of(self, arguments: Any) -> "Logging":
        """What a model of these arguments logs: they may turn its statistics off, and the log of its requests on."""
        return replace(
            self,
            stats=self.stats and not getattr(arguments, "disable_log_stats", False),
            requests=self.requests or getattr(arguments, "enable_log_requests", False),
        )

    @property
    def heard(self) -> bool:
        """Whether anybody hears the core's statistics: as with AsyncLLM, loggers given or installed do in any case."""
        return self.stats or bool(self.factories) or vllm_frontend.has_stat_logger_plugins()


class Steps:
    """Counts the steps of a model's core that its frontend has heard of, those of which no token came among them."""

    def __init__(self) -> None:
        self.count = 0

    def logger(self) -> type:
        """vLLM's stat logger that counts here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        def record(_self: Any, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
            self.count += scheduler_stats is not None

        nothing = {name: lambda *_, **__: None for name in ("__init__", "log_engine_initialized")}
        return type("StepsLogger", (StatLoggerBase,), {"record": record, **nothing})


def prometheus(logging: Logging) -> tuple[Any, list[Any]]:
    """A model's metrics in a registry of its own, and its logger: in the common one each model removes the others'."""
    if not logging.stats:
        return None, []
    registry, logger = vllm_frontend.prometheus_logger()
    return registry, [logger]
