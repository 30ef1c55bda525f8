"""``gearshift batch``: how it ends."""

import pytest
import typer

from schemas.batches import BatchEnd
from service.cli.batch import print_end
from service.client import Progress


@pytest.mark.parametrize("end", BatchEnd)
def test_a_batch_that_is_not_completed_is_a_failure(end: BatchEnd) -> None:
    code = 0
    try:
        print_end(Progress("b", end, 2, 1, 1), as_json=True)
    except typer.Exit as ended:
        code = ended.exit_code
    assert code == (end is not BatchEnd.COMPLETED)
