"""The client for those who don't await."""

import pytest

from service.client import SyncClient


def test_a_client_that_was_not_opened_or_is_closed_says_so() -> None:
    client = SyncClient("127.0.0.1:1")
    for ask in (client.presences, lambda: client.submit({"model": "llama"}), lambda: list(client.map([{}]))):
        with pytest.raises(RuntimeError, match="not open: use it inside `with SyncClient"):
            ask()
