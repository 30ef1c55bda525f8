"""Our pages in a real browser."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WIDTHS = {"desktop": (1200, 1100), "phone": (390, 1400)}


@contextmanager
def chromium() -> Iterator[Any]:
    """Headless, with its driver; skips the test where either is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("Chromium or its driver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield opened
    opened.quit()


async def in_page(browser: Any, script: str, *arguments: Any) -> Any:
    return await asyncio.to_thread(browser.execute_script, script, *arguments)


async def until(browser: Any, script: str) -> Any:
    """Wait until a script answers with something true."""
    look = "const look = () => { const found = (() => {%s})(); found ? done(found) : setTimeout(look, 50) }; look()"
    await asyncio.to_thread(browser.set_script_timeout, 15)
    return await asyncio.to_thread(browser.execute_async_script, f"const done = arguments[0]; {look % script}")


async def resize(browser: Any, width: int, height: int) -> None:
    """The viewport itself; a window can't be as narrow as a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await asyncio.to_thread(browser.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", metrics)


async def prefer(browser: Any, scheme: str) -> None:
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    await asyncio.to_thread(browser.execute_cdp_cmd, "Emulation.setEmulatedMedia", features)


async def press(browser: Any, *keys: str) -> None:
    """Keys, as somebody without a mouse presses them."""
    from selenium.webdriver import ActionChains

    for key in keys:
        await asyncio.to_thread(ActionChains(browser).send_keys(key).perform)


async def chord(browser: Any, held: str, key: str) -> None:
    """A key while another one is held."""
    from selenium.webdriver import ActionChains

    await asyncio.to_thread(ActionChains(browser).key_down(held).send_keys(key).key_up(held).perform)


async def tab_to(browser: Any, script: str, *, back: bool = False) -> None:
    """Press Tab until an element has the focus, of which a script says whether it is the one."""
    from selenium.webdriver import Keys

    for _ in range(40):
        if await in_page(browser, f"const it = document.activeElement; return {script}"):
            return
        await (chord(browser, Keys.SHIFT, Keys.TAB) if back else press(browser, Keys.TAB))
    raise AssertionError(f"no number of Tabs leads there: {script}")


async def complaints(browser: Any) -> list[str]:
    """What went wrong on the page, by the browser's own log, since this was asked last."""
    problems = await asyncio.to_thread(browser.get_log, "browser")
    return [problem["message"] for problem in problems if problem["level"] == "SEVERE"]
