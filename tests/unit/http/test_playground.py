"""The playground in a real browser, without a mouse."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.chromium import WIDTHS, chord, complaints, in_page, prefer, press, resize, tab_to, until
from tests.support.fake_engine import BROKEN, FakeEngine

keys = pytest.importorskip("selenium.webdriver", reason="selenium is not installed").Keys
ANSWERS = "[...document.querySelectorAll('article')].reverse()"
"""In the order in which they were asked."""


def said(number: int, what: str) -> str:
    card = f"const card = {ANSWERS}[{number}]"
    return f"{card}; return card && card.querySelector('[role=status]').textContent.startsWith('{what}')"


def words(number: int) -> str:
    return f"{ANSWERS}[{number}].querySelectorAll('p')[1].textContent"


async def opened(browser, address: str) -> None:
    await asyncio.to_thread(browser.get, f"{address}/playground")
    await in_page(browser, "sessionStorage.clear()")
    await complaints(browser)
    await asyncio.to_thread(browser.get, f"{address}/playground")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_by_keyboard_alone_one_asks_sees_it_freeze_and_go_on(served, browser, tmp_path, width, scheme):
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    engine = FakeEngine(step_s=0.01, max_model_len=1 << 20)
    async with served(engine=engine, dev_mode=True, hold_s=60) as s:
        await resize(browser, *WIDTHS[width])
        await prefer(browser, scheme)
        await opened(browser, s.server.address)
        await until(browser, "return document.querySelectorAll('#model option').length == 2")
        await until(browser, "return document.activeElement.id == 'prompt'")
        await tab_to(browser, "it.id == 'most'", back=True)
        await chord(browser, keys.CONTROL, "a")
        await press(browser, "100000")
        await tab_to(browser, "it.id == 'prompt'")
        await press(browser, "Where are you?")
        await chord(browser, keys.CONTROL, keys.ENTER)
        await until(browser, said(0, "streaming"))
        await tab_to(browser, "it.getAttribute('aria-label') == 'Switch to qwen'", back=True)
        await press(browser, keys.ENTER)
        await until(browser, said(0, "frozen at"))
        before = await in_page(browser, f"return {words(0)}")
        assert s.engine.active == "qwen"
        assert 0 < len(before.split()) < 100000
        await until(browser, "return document.activeElement.getAttribute('aria-disabled') == 'true'")
        assert await in_page(browser, "return document.activeElement.getAttribute('aria-label')") == "Switch to qwen"
        await tab_to(browser, "it.id == 'model'")
        await press(browser, "qwen")
        await tab_to(browser, "it.id == 'ask'")
        await press(browser, keys.SPACE)
        await until(browser, said(1, "streaming"))
        assert await in_page(browser, "return document.documentElement.scrollWidth <= innerWidth")
        await in_page(browser, "scrollTo(0, 0)")
        await asyncio.to_thread(browser.save_screenshot, str(shots / f"playground-{width}-{scheme}.png"))
        assert await in_page(browser, said(0, "frozen at"))
        await tab_to(browser, "it.getAttribute('aria-label') == 'Stop answer 2'")
        await press(browser, keys.ENTER)
        await until(browser, said(1, "stopped"))
        await tab_to(browser, "it.getAttribute('aria-label') == 'Switch to llama'", back=True)
        await press(browser, keys.ENTER)
        await until(browser, said(0, "streaming"))
        await until(browser, f"return {words(0)}.length > {len(before)}")
        await tab_to(browser, "it.getAttribute('aria-label') == 'Stop answer 1'")
        await press(browser, keys.ENTER)
        await until(browser, said(0, "stopped"))
        whole = (await in_page(browser, f"return {words(0)}")).split()
        assert whole == [f"llama{n}" for n in range(len(whole))]
        assert await complaints(browser) == []


async def test_a_key_is_entered_kept_in_the_tab_and_forgotten(served, browser, tmp_path):
    (tmp_path / "keys").write_text("sesame ask\n")
    async with served(api_keys_file=tmp_path / "keys") as s:
        await opened(browser, s.server.address)
        await until(browser, "return document.activeElement.id == 'key'")
        await press(browser, "wrong", keys.ENTER)
        await until(browser, "return document.activeElement.id == 'key' && document.activeElement.value == ''")
        await press(browser, "sesame", keys.ENTER)
        await until(browser, "return document.querySelectorAll('#model option').length == 2")
        assert await in_page(browser, "return document.activeElement.id") == "prompt"
        kept = "return [sessionStorage.getItem('key'), localStorage.length, document.cookie]"
        assert await in_page(browser, kept) == ["sesame", 0, ""]
        assert await in_page(browser, "return [...document.querySelectorAll('#models button')].every(b => b.hidden)")
        await press(browser, "Hello")
        await chord(browser, keys.CONTROL, keys.ENTER)
        await until(browser, said(0, "done"))
        await asyncio.to_thread(browser.refresh)
        await until(browser, "return document.querySelectorAll('#model option').length == 2")
        await tab_to(browser, "it.id == 'forget'")
        await press(browser, keys.ENTER)
        await until(browser, "return document.activeElement.id == 'key'")
        assert await in_page(browser, kept) == [None, 0, ""]
        assert [line for line in await complaints(browser) if "401" not in line and "403" not in line] == []


async def test_who_may_switch_has_the_buttons_and_who_may_not_is_told(served, browser, tmp_path):
    (tmp_path / "keys").write_text("boss ask, operate\nlooker ask, look\n")
    async with served(api_keys_file=tmp_path / "keys") as s:
        for key in ("boss", "looker"):
            await opened(browser, s.server.address)
            await until(browser, "return document.activeElement.id == 'key'")
            await press(browser, key, keys.ENTER)
            await until(browser, "return [...document.querySelectorAll('#models button')].some(b => !b.hidden)")
            wanted = "qwen" if key == "boss" else "llama"
            await tab_to(browser, f"it.getAttribute('aria-label') == 'Switch to {wanted}'", back=True)
            await press(browser, keys.ENTER)
            if key == "boss":
                await until(
                    browser, "return document.querySelector('[data-model=qwen] .badge').textContent == 'active'"
                )
            else:
                await until(browser, "return document.querySelector('#notice').textContent.includes('operate')")
            assert s.engine.active == "qwen"


async def test_what_goes_wrong_is_said_and_strangers_words_are_text(served, browser):
    async with served(max_attempts=1) as s:
        await opened(browser, s.server.address)
        await until(browser, "return document.querySelectorAll('#model option').length == 2")
        evil = f"<img src=x onerror=window.owned=1>{BROKEN}"
        await press(browser, evil)
        await chord(browser, keys.CONTROL, keys.ENTER)
        await until(browser, said(0, "failed"))
        shown = await in_page(browser, "return document.querySelector('article').textContent")
        assert evil in shown
        assert await in_page(browser, f"return {words(0)}") != ""
        assert await in_page(browser, "return window.owned") is None
