from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def one_import() -> Iterator[None]:
    """One import of vLLM for all processes that tests of this folder start."""
    from service.engine.processes.fork_server import server

    with server.kept():
        yield
