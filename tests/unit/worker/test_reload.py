"""`control.reload`: what the worker does with a models.yaml that adds and removes aliases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.base import Origin
from schemas.control import Pause, Reload
from schemas.results import Outcome
from schemas.status import StatusState
from service.errors import ConfigError, EngineRefused
from service.models_file import ModelsFile, ModelSpec
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine


def saying(*aliases: str) -> ModelsFile:
    models = {alias: ModelSpec(alias=alias, engine_args={}) for alias in aliases}
    return ModelsFile(path=Path("models.yaml"), default_model="llama", models=models)


async def one_waits_for_qwen(serving: Any) -> Origin:
    """A request that is here and is not begun."""
    bus: FakeBus = serving.bus
    bus.command(Pause(id="hush"))
    await bus.said("hush", StatusState.COMPLETED)
    waiting = bus.produce({"model": "qwen", "prompt": "Hello"}, {"endpoint": "/v1/completions"})
    await bus.until(lambda: serving.worker.scheduler.queues.view("qwen").requests)
    return waiting


async def test_an_added_alias_is_served_and_what_waits_for_a_removed_one_is_told(serve) -> None:
    async with serve(read_models=lambda: saying("llama", "lynx"), inactive="park") as serving:
        bus: FakeBus = serving.bus
        waiting = await one_waits_for_qwen(serving)
        bus.command(Reload(id="again"))
        status = await bus.said("again", StatusState.COMPLETED)
        assert status.answer == {"models": {"llama": "kept", "lynx": "added", "qwen": "removed"}}
        result = await bus.result(waiting)
        assert (result.outcome, result.status) == (Outcome.FAILED, 404)


class FailsInTheMiddle(FakeEngine):
    """Its models are those of the new file, of which one came to nothing."""

    async def reload(self, models: ModelsFile) -> Mapping[str, str]:
        await super().reload(models)
        raise EngineRefused("the engine: out of descriptors")


async def test_what_waits_for_a_model_is_told_that_it_went_though_the_reload_failed_later(serve) -> None:
    engine = FailsInTheMiddle()
    async with serve(engine=engine, read_models=lambda: saying("llama", "lynx"), inactive="park") as serving:
        bus: FakeBus = serving.bus
        waiting = await one_waits_for_qwen(serving)
        bus.command(Reload(id="again"))
        assert "out of descriptors" in (await bus.said("again", StatusState.FAILED)).reason
        result = await bus.result(waiting)
        assert (result.outcome, result.status) == (Outcome.FAILED, 404)
        assert bus.followed == ("llama", "lynx")


async def test_a_refused_file_changes_nothing(serve) -> None:
    def wrong() -> ModelsFile:
        raise ConfigError("models.yaml: models.qwen.max_len: unknown key")

    async with serve(read_models=wrong) as serving:
        serving.bus.command(Reload(id="again"))
        status = await serving.bus.said("again", StatusState.REJECTED)
        assert "unknown key" in status.reason
        assert serving.engine.aliases == ("llama", "qwen")
