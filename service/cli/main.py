"""The commands together, and what an error does: one line of what is wrong, and an exit code that means something.

Exit codes: 0 done; 1 it was tried and failed; 2 wrong usage or configuration; 3 no broker; 4 no answer in time.
"""

import sys
from collections.abc import Callable

import structlog
import typer

from service import telemetry
from service.app import causes
from service.cli import ask, backlog, batch, contract, operate, plan, run, serve, top, usage
from service.cli.options import Terminal
from service.errors import BrokerUnavailable, ConfigError, GearshiftError, NoAnswer
from service.settings import LogSettings

log = structlog.get_logger(__name__)
app = typer.Typer(
    name="gearshift",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Every setting can also be given as GEARSHIFT_<NAME> in the environment.",
)


@app.callback()
def prepare() -> None:
    """Many models on one vLLM engine, switched in milliseconds, driven from Kafka."""
    telemetry.configure(LogSettings(log_level="warning"))


ask.add_to(app)
operate.add_to(app)
run.add_to(app)
serve.add_to(app)
top.add_to(app)
backlog.add_to(app)
batch.add_to(app)
contract.add_to(app)
usage.add_to(app)
plan.add_to(app)


def main() -> None:
    """Run the command, and turn what goes wrong into an exit code."""
    reported(app)


def reported(work: Callable[[], object]) -> None:
    """Do it; an error of ours ends the process with one line and its exit code."""
    try:
        work()
    except GearshiftError as error:
        sys.exit(_report(error))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(_report(ConfigError(f"{error.filename}: {error.strerror}")))
    except BaseExceptionGroup as group:
        known = [cause for cause in causes(group) if isinstance(cause, GearshiftError)]
        if not known:
            raise
        for cause in known:
            log.exception("worker.failed", error=type(cause).__name__, reason=str(cause), exc_info=cause)
        sys.exit(_report(known[0]))


def _report(error: GearshiftError) -> int:
    Terminal(stderr=True).out(f"gearshift: {error}")
    if isinstance(error, BrokerUnavailable):
        return 3
    if isinstance(error, NoAnswer):
        return 4
    return error.exit_code
