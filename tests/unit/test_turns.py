"""A session's digest tells it apart from all others, and does not name it."""

from dataclasses import replace

from service.ports import Turn

TURN = Turn("story", 1, final=False, owner=("acme", b"key"))


def test_the_parts_of_a_session_share_a_digest_that_is_no_others() -> None:
    digest = TURN.digest("llama")
    assert replace(TURN, part=2, final=True).digest("llama") == digest
    others = [replace(TURN, session="tale"), replace(TURN, owner=("acme", None)), replace(TURN, owner=("acme", b""))]
    others += [replace(TURN, owner=("other", b"key"))]
    assert len({digest, TURN.digest("qwen"), *(each.digest("llama") for each in others)}) == 6


def test_a_digest_does_not_name_its_session() -> None:
    digest = TURN.digest("llama")
    assert len(digest) == 64
    assert not any(name in digest for name in ("story", "acme", b"story".hex()))
