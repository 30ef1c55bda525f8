"""The status page in a real browser, and what it is drawn from."""

import asyncio
import os
from pathlib import Path

import pytest

from schemas.objectives import Objective
from service.http.history import Judged, Switched, frozen, reached, turns
from tests.support.chromium import WIDTHS, in_page, prefer, resize, until
from tests.support.fake_engine import FakeEngine

NOTHING = "\u2013"


async def test_the_page_lives_through_a_switch_under_load(served, browser, tmp_path):
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    engine = FakeEngine(aliases=("llama", "qwen", "phi"), step_s=0.005, switch_s=0.05)
    async with served(engine=engine, dev_mode=True, max_running=6, hold_s=0.5) as s:
        bodies = [{"model": ("llama", "qwen", "phi")[n % 3], "prompt": "x", "max_tokens": 100_000} for n in range(12)]
        asked = [asyncio.create_task(s.http.post("/v1/completions", json=body, timeout=None)) for body in bodies]
        await s.http.post("/v1/completions", json={"model": "lama", "prompt": "x"})
        await asyncio.to_thread(browser.get, s.server.address)
        await until(browser, "return document.querySelectorAll('#requests tr').length == 12")
        await in_page(browser, "document.querySelector('[aria-label=\"Switch to phi\"]').focus()")
        await until(browser, "return document.querySelectorAll('#switches tr').length > 2")
        assert await in_page(browser, "return document.activeElement.getAttribute('aria-label')") == "Switch to phi"
        await in_page(browser, "scrollTo(0, 0)")
        for scheme in ("light", "dark"):
            await prefer(browser, scheme)
            for name, size in WIDTHS.items():
                await resize(browser, *size)
                assert await in_page(browser, "return document.documentElement.scrollWidth <= innerWidth")
                await asyncio.to_thread(browser.save_screenshot, str(shots / f"{name}-{scheme}.png"))
        await in_page(browser, "document.querySelector('#requests button').click()")
        await until(browser, "return document.querySelectorAll('#requests tr').length == 11")
        assert "does not exist" in await in_page(browser, "return document.querySelector('#errors').textContent")
        problems = await asyncio.to_thread(browser.get_log, "browser")
        assert [problem for problem in problems if problem["level"] == "SEVERE"] == []
        for task in asked:
            task.cancel()


async def test_a_switch_from_the_page_is_done_with_its_mode(served, browser):
    async with served(dev_mode=True) as s:
        await asyncio.to_thread(browser.get, s.server.address)
        await until(browser, "return document.querySelector('[aria-label=\"Switch to qwen\"]')")
        await in_page(browser, "document.querySelector('#mode').value = 'drain'")
        await in_page(browser, "document.querySelector('[aria-label=\"Switch to qwen\"]').click()")
        await until(browser, "return document.querySelector('[aria-label=\"Switch to qwen\"][aria-disabled=true]')")
        assert s.engine.active == "qwen"
        assert "drain" in await in_page(browser, "return document.querySelector('#switches').textContent")


async def test_outside_of_dev_mode_the_page_only_shows(served, browser):
    async with served() as s:
        await asyncio.to_thread(browser.get, s.server.address)
        await until(browser, "return document.querySelector('#models tr')")
        assert await in_page(browser, "return [...document.querySelectorAll('button')].every(b => b.hidden)")
        cancel = await s.http.post("/requests/r1/cancel", json={})
        assert cancel.status_code == 404


async def test_the_page_asks_for_a_key_and_shows_strangers_words_as_text(served, browser, tmp_path):
    (tmp_path / "keys").write_text("sesame ask, look")
    async with served(api_keys_file=tmp_path / "keys", wait=True) as s:
        evil = "<img src=x onerror=window.owned=1>"
        authorized = {"authorization": "Bearer sesame"}
        await s.http.post("/v1/completions", json={"model": evil, "prompt": "x"}, headers=authorized)
        await asyncio.to_thread(browser.get, s.server.address)
        await until(browser, "return document.querySelector('#key')")
        await in_page(browser, "document.querySelector('#key').value = 'sesame'")
        await in_page(browser, "document.querySelector('#notice form').requestSubmit()")
        shown = await until(browser, "return document.querySelector('#errors').textContent")
        assert evil in shown
        assert await in_page(browser, "return window.owned") is None


async def test_how_many_got_what_they_were_to_get_is_shown_and_what_kept_the_others_from_it(served, browser):
    objective = Objective(ttft_s=2.5, tpot_s=1e-6)
    async with served(engine=FakeEngine(step_s=0.05), objective=objective) as s:
        for tokens in (1, 1, 60):
            await s.openai.completions.create(model="qwen", prompt="x", max_tokens=tokens)
        (_, row) = (await s.http.get("/state")).json()["objectives"]
        assert row == {
            "model": "qwen", "class": "", **objective.model_dump(), "requests": 3, "met": 2, "missed_by": {"decode": 1},
        }  # fmt: skip
        await asyncio.to_thread(browser.get, s.server.address)
        await until(browser, "return document.querySelectorAll('#objectives tr').length == 2")
        script = (
            "return [...document.querySelectorAll('#objectives tr')].map(tr => [...tr.cells].map(td => td.innerText))"
        )
        llama, qwen = await in_page(browser, script)
        assert [*llama[:1], *llama[2:]] == ["llama", "0", NOTHING, NOTHING]
        assert [*qwen[:1], *qwen[2:]] == ["qwen", "3", "67 %", "decode 1"]
        assert await in_page(browser, "return document.querySelector('#objectives .bad').textContent") == "67 %"


def test_what_was_reached_is_counted_by_class_and_forgotten_in_time():
    judged = [Judged(at, "a", name, why) for at, name, why in ((1, "", ""), (5, "", ""), (6, "", "turn"), (7, "b", ""))]
    assert reached(judged, since=5) == {("a", ""): {"": 1, "turn": 1}, ("a", "b"): {"": 1}}


def switched(at: float, left: str, to: str, *, kept: int = 0) -> Switched:
    return Switched(at, left, to, 2.0, 1.0, "resident", "keep", kept, 0, operator=False)


def test_turns_follow_each_other_without_their_switches():
    found = turns([switched(110, "a", "b"), switched(120, "b", "a")], "a", since=100, now=130)
    assert [(turn["model"], turn["from"], turn["to"]) for turn in found] == [
        ("a", 100, 109.999), ("b", 110, 119.999), ("a", 120, 130),
    ]  # fmt: skip
    assert turns([], "a", since=100, now=130) == [{"model": "a", "from": 100, "to": 130}]


def test_requests_are_frozen_until_their_model_has_its_turn_again():
    found = frozen([switched(110, "a", "b", kept=2), switched(120, "b", "a"), switched(125, "a", "b", kept=1)], now=130)
    assert [(span["model"], span["from"], span["to"], span["requests"]) for span in found] == [
        ("a", 110, 120, 2), ("a", 125, 130, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_what_can_be_asked_is_shown_to_who_has_a_key(served, browser, tmp_path, width, scheme):
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    (keys := tmp_path / "keys").write_text("secret ask\n")
    async with served(api_keys_file=keys, key="secret") as serving:
        await resize(browser, *WIDTHS[width])
        await prefer(browser, scheme)
        await asyncio.to_thread(browser.get, f"{serving.server.address}/docs")
        await until(browser, "return document.getElementById('key')")
        await in_page(
            browser, "document.getElementById('key').value = 'secret'; document.querySelector('form button').click()"
        )
        shown = await until(browser, "return document.querySelectorAll('details').length")
        said = await serving.http.get("/openapi.json", headers={"authorization": "Bearer secret"})
        assert shown == sum(map(len, said.json()["paths"].values()))
        await in_page(browser, "document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert "model" in await in_page(browser, "return document.querySelector('td').textContent")
        assert await in_page(browser, "return document.documentElement.scrollWidth <= innerWidth")
        await asyncio.to_thread(browser.save_screenshot, str(shots / f"docs-{width}-{scheme}.png"))
        complaints = [line["message"] for line in browser.get_log("browser")]  # an earlier page's are about its server
        assert not [each for each in complaints if serving.server.address in each and "401" not in each]
