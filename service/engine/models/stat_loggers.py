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


def prometheus(logging: Logging) -> tuple[Any, list[Any]]:
    """A model's metrics in a registry of its own, and its logger: in the common one each model removes the others'."""
    if not logging.stats:
        return None, []
    registry, logger = vllm_frontend.prometheus_logger()
    return registry, [logger]
