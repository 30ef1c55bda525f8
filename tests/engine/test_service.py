"""The real engine through the worker's port: what every engine does, and what only a real one can show."""

import pytest

from tests.support.engine_spec import *  # noqa: F403

pytestmark = pytest.mark.engine
