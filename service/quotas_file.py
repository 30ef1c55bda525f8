"""quotas.yaml: what each tenant may have of the pool."""

from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import ConfigError
from service.watched_files import WatchedFiles
from service.yaml_files import read_yaml

log = structlog.get_logger(__name__)


class Quota(BaseModel):
    """What a tenant may have of the whole pool; what is left out has no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Of prompts and answers together, as results say that they have cost."""
    concurrent: int | None = Field(default=None, gt=0)
    """Requests that are under way at a time."""
    waiting_bytes: int | None = Field(default=None, gt=0)
    """Of its requests that workers hold, waiting or running."""
    ttft_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Its requests' objectives promise no shorter time to the first token, whatever their model's do."""
    tpot_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """And no shorter one per further token."""


UNLIMITED = Quota()


class QuotasFile(BaseModel):
    """The whole file. ``default`` is for each tenant that is not named; a request without a tenant is of ``""``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Quota = Field(default_factory=lambda: UNLIMITED)
    tenants: Mapping[str, Quota] = Field(default_factory=dict)

    def of(self, tenant: str) -> Quota:
        return self.tenants.get(tenant, self.default)


def read_quotas(path: Path) -> QuotasFile:
    """The file at ``path``. Raises ConfigError."""
    try:
        said = read_yaml(path)
        return QuotasFile.model_validate({} if said is None else said)
    except (FileNotFoundError, ConfigError) as error:
        raise ConfigError(f"quotas_file: {error}") from None
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise ConfigError(f"quotas_file: {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class WatchedQuotas:
    """The quotas as the file has them now; one that can't be read any more leaves those that were."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError."""
        self._path = path
        self._files = WatchedFiles(*([] if path is None else [path]))
        self.now = QuotasFile() if path is None else read_quotas(path)

    def look(self) -> None:
        """Read the file again if it has changed."""
        if self._path is None or not self._files.changed():
            return
        try:
            self.now = read_quotas(self._path)
        except ConfigError as error:
            log.error("quotas.unreadable", why=str(error))  # noqa: TRY400  # the message says all
        else:
            log.info("quotas.read", tenants=len(self.now.tenants))
