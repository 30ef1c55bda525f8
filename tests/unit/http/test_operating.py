"""What operators of vLLM's server do over HTTP, for each model and for all; who may, and what is wrong is said."""

import asyncio

import pytest

from schemas.contexts import Tier
from service.http import operating
from tests.support.bus import until
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


async def is_sleeping(s, **which: str) -> bool:
    return (await s.http.get("/is_sleeping", params=which)).json()["is_sleeping"]


async def test_a_model_sleeps_and_wakes_and_all_of_them_do(served):
    async with served(dev_mode=True) as s:
        assert not await is_sleeping(s)
        slept = await s.http.post("/sleep", params={"model": "qwen", "level": 2})
        assert (slept.status_code, slept.json()) == (200, {"status": "sleeping", "level": 2})
        assert [await is_sleeping(s, model=model) for model in ("llama", "qwen")] == [False, True]
        assert await is_sleeping(s)
        assert s.engine._tiers["qwen"] is Tier.DROPPED
        woken = await s.http.post("/wake_up", params={"model": "qwen"})
        assert (woken.status_code, woken.json()) == (200, {"status": "awake", "tags": None})
        assert not await is_sleeping(s)
        assert (await s.http.post("/sleep")).status_code == 200
        assert [await is_sleeping(s, model=model) for model in ("llama", "qwen")] == [True, True]
        tags = ["weights", "kv_cache"]
        assert (await s.http.post("/wake_up", params={"tags": tags})).json() == {"status": "awake", "tags": tags}
        answer = await s.openai.completions.create(model="llama", prompt="hello", max_tokens=1)
        assert answer.choices[0].text == "llama0 "


async def test_it_pauses_and_resumes(served):
    async with served(dev_mode=True) as s:
        for path, said, paused in (("/pause", "paused", True), ("/resume", "resumed", False)):
            assert (await s.http.post(path)).json() == {"status": said}
            assert (await s.http.get("/is_paused")).json() == {"is_paused": paused}
        assert (await s.openai.completions.create(model="qwen", prompt="hello", max_tokens=1)).choices


async def test_it_pauses_and_resumes_one_model(served):
    async def paused(s, **model: str) -> bool:
        return (await s.http.get("/is_paused", params=model)).json()["is_paused"]

    async with served(dev_mode=True) as s:
        assert (await s.http.post("/pause", params={"model": "qwen"})).json() == {"status": "paused"}
        assert [await paused(s), await paused(s, model="llama"), await paused(s, model="qwen")] == [False, False, True]
        waiting = asyncio.create_task(s.openai.completions.create(model="qwen", prompt="hello", max_tokens=1))
        assert (await s.openai.completions.create(model="llama", prompt="hello", max_tokens=1)).choices
        await s.http.post("/pause", params={"model": "llama"})
        assert await paused(s)
        assert not waiting.done()
        await s.http.post("/resume", params={"model": "qwen"})
        assert (await waiting).choices


async def test_a_profile_is_a_models_and_ends_with_it_whichever_model_is_active_then(served):
    async with served(dev_mode=True) as s:

        async def profiling(path: str, **which: str) -> set[str]:
            assert (await s.http.post(path, params=which)).status_code == 200
            return set(s.engine.profiling)

        assert await profiling("/start_profile") == {"llama"}
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        assert await profiling("/start_profile", model="qwen") == {"llama", "qwen"}
        assert await profiling("/stop_profile", model="qwen") == {"llama"}
        assert await profiling("/stop_profile") == set()
        assert (await s.http.post("/start_profile", params={"model": "quen"})).status_code == 404


@pytest.mark.parametrize("cache", ["prefix", "mm", "encoder"])
async def test_one_cache_is_reset_of_one_model_or_of_all(served, cache):
    class Noting(FakeEngine):
        async def reset_caches(self, alias=None, cache=None, *, running=False, external=False):
            asked.append((alias, cache, running, external))
            return await super().reset_caches(alias, cache, running=running, external=external)

    asked: list[tuple[str | None, str | None, bool, bool]] = []
    path = f"/reset_{cache}_cache"
    async with served(dev_mode=True, engine=Noting()) as s:
        answer = await s.http.post(path)
        assert (answer.status_code, answer.text) == (200, '{"success":true}' if cache == "prefix" else "")
        wanted = {"model": "qwen", "reset_running_requests": "true", "reset_external": "1"}
        assert (await s.http.post(path, params=wanted)).status_code == 200
        wrong = await s.http.post(path, params={"reset_external": "perhaps"})
        assert (wrong.status_code, "reset_external" in wrong.json()["error"]["message"]) == (400, True)
        answer = await s.http.post(path, params={"model": "quen"})
        assert "did you mean 'qwen'" in answer.json()["error"]["message"]
        assert (answer.status_code, asked) == (
            404,
            [(None, cache, False, False), ("qwen", cache, True, True), ("quen", cache, False, False)],
        )


async def test_a_prefix_cache_that_is_held_is_not_reset_and_that_is_said(served):
    async with served(dev_mode=True, engine=FakeEngine(step_s=3600.0)) as s:
        asking = asyncio.create_task(s.openai.completions.create(model="llama", prompt="x", max_tokens=2))
        await until(lambda: any(context.unfinished for context in s.engine.contexts()))
        assert (await s.http.get("/load")).json() == {"server_load": 1}
        assert (await s.http.post("/reset_prefix_cache")).json() == {"success": False}
        forced = await s.http.post("/reset_prefix_cache", params={"reset_running_requests": True})
        assert forced.json() == {"success": True}
        asking.cancel()


async def test_adapters_are_loaded_and_unloaded_in_the_words_of_vllm_s_server(served):
    async with served(dev_mode=True) as s:
        ask = {"lora_name": "poet", "lora_path": "adapters/poet", "model": "qwen"}
        answer = await s.http.post("/v1/load_lora_adapter", json=ask)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert s.engine.loras("qwen") == ("poet",)
        answer = await s.http.post("/v1/load_lora_adapter", json=ask)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
        assert (await s.openai.models.retrieve("poet")).parent == "qwen"
        answer = await s.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
        assert (await s.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})).status_code == 404
        answer = await s.http.post("/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": "a"})
        assert (answer.status_code, s.engine.loras("llama")) == (200, ("poet",))  # the active one's


async def test_a_models_server_tells_of_its_inside_in_the_development_mode(served):
    async with served(dev_mode=True) as s:
        for which, alias in (({}, "llama"), ({"model": "qwen"}, "qwen")):
            info = (await s.http.get("/server_info", params={**which, "config_format": "json"})).json()
            assert (info["vllm_config"], info["query"]) == (f"model={alias}", "config_format=json")
            assert (await s.http.get("/tokenizer_info", params=which)).json()["model"] == alias
            called = await s.http.post("/collective_rpc", params=which, json={"method": "check"})
            assert called.json() == {"results": [f"check of {alias}"]}
        nobody = await s.http.get("/server_info", params={"model": "quen"})
        assert nobody.status_code == 404
        assert "did you mean 'qwen'" in nobody.json()["error"]["message"]
        form = await s.http.post("/collective_rpc", content=b"{}", headers={"content-type": "text/plain"})
        assert form.status_code == 415


async def test_with_keys_alone_nobody_calls_methods_of_workers(served, tmp_path):
    (keys := tmp_path / "keys").write_text("root operate\nasks ask\n")
    async with served(api_keys_file=keys, key="root") as s:
        said = {
            (key, path): (
                await s.http.request(method, path, json={}, headers={"authorization": f"Bearer {key}"})
            ).status_code
            for key in ("root", "asks")
            for method, path in (("GET", "/tokenizer_info"), ("GET", "/server_info"), ("POST", "/collective_rpc"))
        }
        assert said == {
            ("root", "/tokenizer_info"): 200,
            ("root", "/server_info"): 404,
            ("root", "/collective_rpc"): 404,
            ("asks", "/tokenizer_info"): 403,
            ("asks", "/server_info"): 403,
            ("asks", "/collective_rpc"): 403,
        }


async def test_who_is_there_and_how_much_it_has_to_do(served):
    async with served(engine=FakeEngine(step_s=3600.0)) as s:
        assert [(await s.http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
        assert (await s.http.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        ("/sleep?model=quen", None, 404, "quen"),
        ("/sleep?level=3", None, 400, "level"),
        ("/sleep?level=-1", None, 400, "level: must be a number"),
        ("/sleep?level=" + "9" * 5000, None, 400, "level"),
        ("/sleep?mode=wait", None, 400, "mode: 'wait'"),
        ("/wake_up?tags=weights", None, 400, "whole"),
        ("/pause?model=quen", None, 404, "quen"),
        ("/resume?model=quen", None, 404, "quen"),
        ("/pause?mode=abort", None, 400, "goes on to its end"),
        ("/wake_up?model=" + "x" * 300, None, 400, "256"),
        ("/v1/load_lora_adapter", {"lora_name": ""}, 400, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "x": 1}, 400, "x:"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "model": "q" * 300}, 400, "model"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "b", "load_inplace": True, "is_3d_lora_weight": False},
            400,
            "load_inplace",
        ),
        ("/v1/load_lora_adapter", {"lora_name": "qwen", "lora_path": "b"}, 400, "qwen is a model"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "../../etc"}, 400, "not below lora_root"),
        ("/start_profile", {"profile_prefix": None, "max_iterations": 3}, 400, "max_iterations"),
        ("/start_profile", {"max_iterations": "many"}, 400, "max_iterations"),
        ("/v1/models/switch", {"model": "q" * 300}, 400, "model"),
        ("/v1/models/switch", {"model": "qwen", "drain_timout": 3}, 400, "drain_timout"),
        ("/v1/models/switch", {"model": "qwen", "hold": "for ever"}, 400, "hold: Value error, give seconds"),
        (f"/requests/{'r' * 300}/cancel", {}, 400, "request"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "model": "quen"}, 404, "quen"),
        ("/v1/unload_lora_adapter", [], 400, "body"),
    ],
)
async def test_what_can_t_be_done_is_said(served, path, body, code, said):
    async with served(dev_mode=True) as s:
        answer = await s.http.post(path, json=body) if body is not None else await s.http.post(path)
        assert answer.status_code == code, answer.text
        assert said in answer.json()["error"]["message"]
        for question in ("/is_sleeping", "/is_paused"):
            assert (await s.http.get(question, params={"model": "quen"})).status_code == 404


async def test_a_cancel_of_what_is_not_here_is_answered(served):
    async with served(dev_mode=True) as s:
        answer = await s.http.post("/requests/nothere/cancel", json={}, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()) == (200, {"cancelled": 0})


async def test_a_page_of_another_site_can_not_operate_a_server_without_keys(served):
    async with served(dev_mode=True, cors_origins="http://ours.example") as s:
        for path in sorted(operating.PATHS):
            for origin in ("http://evil.example", "null"):
                answer = await s.http.post(path, headers={"origin": origin}, json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert not await is_sleeping(s)
        for origin in ("http://ours.example", s.server.address):
            assert (await s.http.post("/sleep?model=qwen", headers={"origin": origin})).status_code == 200
        text = await s.http.post("/v1/load_lora_adapter", headers={"content-type": "text/plain"}, content="{}")
        assert text.status_code == 415


async def test_without_dev_mode_and_keys_nobody_operates_it(served):
    async with served() as s:
        assert {(await s.http.post(path)).status_code for path in operating.PATHS} <= {404, 405}


async def test_a_key_needs_the_role(served, tmp_path):
    (tmp_path / "keys").write_text("asker ask\nviewer look\nboss operate\n")
    async with served(api_keys_file=tmp_path / "keys", key="boss", wait=False) as s:

        async def code(method: str, path: str, key: str) -> int:
            return (await s.http.request(method, path, headers={"authorization": f"Bearer {key}"})).status_code

        while (await s.http.get("/ready")).status_code != 200:
            pass
        assert [await code("POST", "/sleep?model=qwen", key) for key in ("asker", "viewer", "boss")] == [403, 403, 200]
        assert [await code("GET", "/is_sleeping", key) for key in ("asker", "viewer", "boss")] == [403, 200, 200]
        assert (await s.http.get("/ping")).status_code == 200
        assert (await s.http.get("/load")).status_code == 401
