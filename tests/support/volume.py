"""Which of many cases a default run shows: the others are volume, and run with ``-m long``."""

from collections.abc import Iterable
from typing import Any

import pytest


def shown(cases: Iterable[Any], *by_default: Any) -> list[Any]:
    """For ``parametrize``: all cases, of which the default run has those that are named."""
    found = list(cases)
    assert set(by_default) <= set(found), f"{set(by_default) - set(found)} is no case"
    return [case if case in by_default else pytest.param(case, marks=pytest.mark.long) for case in found]
