"""``python -m tests.support.fake_worker``: the whole service in a process of its own, around the fake engine.

Options: ``--aliases a,b``, ``--step-s``, ``--switch-s``, ``--tally FOLDER`` in which the words that its engine says are
counted, and ``--set NAME=VALUE`` as for ``gearshift worker``.
"""

import argparse
from pathlib import Path

import uvloop

from service import telemetry
from service.app import Parts
from service.cli.main import reported
from service.cli.options import settings_of
from service.cli.run import run_worker
from service.models_file import ModelsFile, ModelSpec
from service.ports import Engine
from tests.support.fake_engine import FakeEngine
from tests.support.tally import Tally


def parts(aliases: tuple[str, ...], *, step_s: float = 0.0, switch_s: float = 0.0, tally: Tally | None = None) -> Parts:
    """What a worker around the fake engine is made of."""
    models = ModelsFile(
        path=Path("models.yaml"),
        default_model=aliases[0],
        models={alias: ModelSpec(alias=alias, engine_args={"model": alias}) for alias in aliases},
    )

    async def open_engine(wanted: ModelsFile, _settings: object, _progress: object) -> Engine:
        return FakeEngine(aliases, active=wanted.default_model, step_s=step_s, switch_s=switch_s, tally=tally)

    return Parts(read_models=lambda: models, open_engine=open_engine)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--aliases", default="llama,qwen")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--switch-s", type=float, default=0.0)
    parser.add_argument("--tally", type=Path)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    given = parser.parse_args()
    tally = None if given.tally is None else Tally(given.tally)
    made = parts(tuple(given.aliases.split(",")), step_s=given.step_s, switch_s=given.switch_s, tally=tally)

    def work() -> None:
        settings = settings_of(given.assignments)
        telemetry.configure(settings.log)
        uvloop.run(run_worker(settings, made))

    reported(work)


if __name__ == "__main__":
    main()
