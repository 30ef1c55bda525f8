"""Durable calls without a broker, and what is said of a wish that can't be had."""

import pytest

BODY = {"model": "llama", "prompt": "hello", "max_tokens": 1}


async def test_without_a_broker_a_preference_is_passed_over_and_a_promise_is_not_given(served) -> None:
    async with served() as s:
        answer = await s.http.post("/v1/completions", json=BODY, headers={"prefer": "respond-async"})
        assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")
        keyed = await s.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "k"})
        assert (keyed.status_code, keyed.json()["error"]["param"]) == (400, "idempotency-key")
        background = {"model": "llama", "input": "hello", "background": True}
        refused = await s.http.post("/v1/responses", json=background)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
        assert "broker" in refused.json()["error"]["message"]


@pytest.mark.parametrize("store", [False, None])
async def test_what_is_not_to_be_kept_can_not_be_asked_in_the_background(served, store: object) -> None:
    async with served() as s:
        body = {"model": "llama", "input": "hello", "background": True, "store": store}
        answer = await s.http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
        assert "`store` is true" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "k" * 256, "a\tb"])
async def test_a_key_that_is_none_is_refused_by_name(served, key: str) -> None:
    async with served() as s:
        answer = await s.http.post("/v1/completions", json=BODY, headers={"idempotency-key": key})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")
        assert "255" in answer.json()["error"]["message"]


async def test_until_the_log_has_been_read_a_door_says_so_and_answers_all_other_calls(served) -> None:
    async with served() as s:
        s.server.has_broker = True
        keyed = await s.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "k"})
        for answer in (keyed, await s.http.get("/v1/responses/resp_1"), await s.http.get("/v1/calls/resp_1")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "starting" in answer.json()["error"]["message"]
        assert (await s.http.post("/v1/completions", json=BODY)).status_code == 200
