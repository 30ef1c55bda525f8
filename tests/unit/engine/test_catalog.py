"""What is wrong with a model is told to everyone who wants it, and keeps none of them."""

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from service.engine.models.catalog import Catalog
from service.errors import ConfigError


class Checked(BaseModel):
    length: int

    @field_validator("length")
    @classmethod
    def short(cls, length: int) -> int:
        if length > 9:
            raise ValueError("so wrong")
        return length


class Wrong:
    """Arguments that don't validate."""

    def __init__(self, validate: Callable[[], Any]) -> None:
        self.validate = validate

    def create_engine_config(self, _usage_context: Any) -> Any:
        raise self.validate()


class Caller:
    """Whoever wants the model."""


@pytest.mark.parametrize(
    ("validate", "kind"),
    [
        (lambda: ConfigError("so wrong"), ConfigError),
        (lambda: FileNotFoundError("so wrong"), OSError),
        (lambda: json.JSONDecodeError("so wrong", "", 0), ValueError),
        (lambda: Checked(length=10), ValueError),  # pydantic's error keeps what its validator raised
    ],
)
def test_what_is_wrong_is_raised_again_and_again_and_keeps_nobody(validate: Callable[[], Any], kind: type) -> None:
    catalog = Catalog({"some": Wrong(validate)})

    def ask() -> weakref.ref[Caller]:
        caller = Caller()
        for _ in range(2):
            with pytest.raises(kind, match="so wrong"):
                catalog.config("some")
        return weakref.ref(caller)

    caller = ask()
    gc.collect()
    assert caller() is None
