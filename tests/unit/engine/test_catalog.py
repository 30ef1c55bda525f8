"""What is wrong with a model is told to everyone who wants it, and keeps none of them."""

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from service.engine.models.catalog import Catalog
from service.engine.models.compatibility import require_beside
from service.errors import ConfigError
from service.scheduling.memory import Budgets
from tests.support.waiting import PATIENCE_S


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


@pytest.mark.delicate
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


class Setting:
    """Arguments whose configuration sets a variable, as vLLM does for some architectures."""

    def __init__(self, value: str | None, name: str = "VLLM_EXAMPLE") -> None:
        self.value, self.name = value, name

    def create_engine_config(self, _usage_context: Any) -> Any:
        from vllm.config import VllmConfig

        if self.value is not None:
            os.environ[self.name] = self.value
        config = VllmConfig()
        config.model_config = SimpleNamespace(model="/nowhere", is_moe=False)  # type: ignore[assignment]
        return config


@pytest.mark.parametrize("callers", [None, "by the caller"])
def test_what_vllm_sets_for_one_model_is_that_models_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, callers: str | None
) -> None:
    monkeypatch.delenv("VLLM_EXAMPLE", raising=False)
    if callers is not None:
        monkeypatch.setenv("VLLM_EXAMPLE", callers)
    catalog = Catalog({"one": Setting("its own"), "two": Setting(None), "three": Setting("another")})
    for alias in ("one", "two"):
        catalog.config(alias)
    assert os.environ.get("VLLM_EXAMPLE") == callers
    catalog.config("three")
    found = {alias: catalog.loading(alias)[1]["VLLM_EXAMPLE"] for alias in ("one", "two", "three")}
    assert found == {"one": "its own", "two": callers, "three": "another"}


class Slow(Setting):
    """Arguments whose configuration takes until somebody has looked."""

    def __init__(self, begun: threading.Event, looked: threading.Event) -> None:
        super().__init__("its own")
        self.begun, self.looked = begun, looked

    def create_engine_config(self, usage_context: Any) -> Any:
        os.environ["VLLM_EXAMPLE"] = "its own"
        self.begun.set()
        assert self.looked.wait(PATIENCE_S)
        return super().create_engine_config(usage_context)


def test_a_model_that_is_validated_in_a_thread_changes_nothing_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUANT_CONFIG", "VLLM_EXAMPLE"):
        monkeypatch.delenv(name, raising=False)
    catalog = Catalog({"one": Setting("of one"), "two": Setting(None)}, quant_configs={"one": "/one.json"})
    for alias in ("one", "two"):
        catalog.config(alias)
    catalog.require_compatible("one")
    begun, looked = threading.Event(), threading.Event()

    def of_two() -> tuple[str | None, str | None]:
        variables = catalog.loading("two")[1]
        return variables["VLLM_EXAMPLE"], variables["QUANT_CONFIG"]

    with ThreadPoolExecutor() as threads:
        made = [
            threads.submit(catalog.validated, f"added {n}", Slow(begun, looked), Budgets(), f"/added {n}.json")
            for n in range(2)
        ]
        assert begun.wait(PATIENCE_S)
        meanwhile = of_two()
        looked.set()
        assert [each.result().variables["VLLM_EXAMPLE"] for each in made] == ["its own"] * 2
    assert meanwhile == of_two() == (None, None)
    assert not {"QUANT_CONFIG", "VLLM_EXAMPLE"} & os.environ.keys()


BREAKS = "VLLM_USE_BREAKABLE_CUDAGRAPH"


@pytest.mark.parametrize(("first", "second"), [("breaks", "whole"), ("whole", "breaks")])
def test_models_that_want_vllms_modules_imported_in_two_ways_can_not_live_together(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    monkeypatch.delenv(BREAKS, raising=False)

    def made() -> Catalog:
        catalog = Catalog({"breaks": Setting("1", BREAKS), "whole": Setting(None), "another": Setting(None)})
        catalog.configure([first, second])
        catalog.require_compatible(first)
        return catalog

    with pytest.raises(ConfigError, match=rf"{second}: {BREAKS} is \d, but \d for {first}: .* whole engine"):
        made().usable(second)
    if first == "breaks":
        with pytest.raises(ConfigError, match=rf"another: {BREAKS} is 0, but 1 for breaks"):
            made().validated("another", Setting(None), Budgets())
    monkeypatch.setenv(BREAKS, "1")
    made().usable(second)


@pytest.mark.parametrize(
    ("mine", "theirs", "refused"),
    [
        ({"use_all2all": True}, {"use_all2all": False}, "use_all2all is True, but False for first"),
        ({"all2all_backend": "a"}, {"all2all_backend": "b"}, None),  # nothing is exchanged
        (
            {"use_all2all": True, "all2all_backend": "a"},
            {"use_all2all": True, "all2all_backend": "b"},
            "all2all_backend is 'a', but 'b' for first",
        ),
    ],
)
def test_two_mixtures_of_experts_exchange_in_one_way(mine: Any, theirs: Any, refused: str | None) -> None:
    def config(given: Any) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(is_moe=True),
            parallel_config=SimpleNamespace(**{"use_all2all": False, "all2all_backend": "a", **given}),
            kv_events_config=None,
        )

    if refused is None:
        require_beside({"first": config(theirs)}, config(mine), alias="second")
        return
    with pytest.raises(ConfigError, match=f"second: {refused}"):
        require_beside({"first": config(theirs)}, config(mine), alias="second")


def _publishing(endpoint: str, *, enabled: bool = True, replay: str | None = None, ranks: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        kv_events_config=SimpleNamespace(endpoint=endpoint, replay_endpoint=replay, enable_kv_cache_events=enabled),
    )


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"endpoint": "tcp://*:5557"}, {"endpoint": "tcp://*:5557"}),
        ({"endpoint": "tcp://*:5557"}, {"endpoint": "tcp://127.0.0.1:5557"}),
        ({"endpoint": "tcp://0.0.0.0:5557"}, {"endpoint": "tcp://[::1]:5557"}),
        (
            {"endpoint": "tcp://*:5557", "replay": "tcp://*:6000"},
            {"endpoint": "tcp://*:5558", "replay": "tcp://*:6000"},
        ),
        ({"endpoint": "tcp://*:5557", "replay": "tcp://*:5558"}, {"endpoint": "tcp://*:5558"}),
        ({"endpoint": "tcp://*:5557", "ranks": 2}, {"endpoint": "tcp://*:5558"}),
        ({"endpoint": "ipc:///run/events", "ranks": 2}, {"endpoint": "ipc:///run/events_dp1"}),
    ],
)
def test_two_publishers_of_kv_events_need_two_ports(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    for one, other in ((theirs, mine), (mine, theirs)):
        with pytest.raises(ConfigError, match=r"second: kv_events_config takes .*, and that of dense takes "):
            require_beside({"dense": _publishing(**one)}, _publishing(**other), alias="second")


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"endpoint": "tcp://*:5557"}, {"endpoint": "tcp://*:5558"}),
        ({"endpoint": "tcp://*:5557"}, {"endpoint": "tcp://*:5557", "enabled": False}),
        ({"endpoint": "tcp://127.0.0.1:5557"}, {"endpoint": "tcp://127.0.0.2:5557"}),
        ({"endpoint": "tcp://*:0"}, {"endpoint": "tcp://*:0"}),
        ({"endpoint": "tcp://*:5557", "ranks": 2}, {"endpoint": "tcp://*:5559"}),
    ],
)
def test_publishers_of_kv_events_with_ports_of_their_own_live_together(
    theirs: dict[str, Any], mine: dict[str, Any]
) -> None:
    require_beside({"dense": _publishing(**theirs)}, _publishing(**mine), alias="second")
