"""Take the pictures of the explorer in README.md and docs/explorer.md from a server that runs.

    steercap serve
    python scripts/docs_explorer.py http://127.0.0.1:8000

Needs chromium (Debian: apt-get install chromium) and playwright (PyPI), which the project does not install.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"
#: Pixels of the page: as narrow as it has its three columns, so that its texts are large in a page of the docs.
WIDTH, HEIGHT = 1200, 900
#: Scheme and measure of each picture.
TAKEN: Final = {"light": "cosine", "dark": "next"}
VIEW: Final = {"text": "The film was wonderful, but the dinner after it was", "length": 24, "layer": 18, "at": 18}
#: Token whose cell is chosen: its row gives the first token of the answer.
TOKEN: Final = 10


async def take(page: Any, address: str, scheme: str) -> None:
    """Make the direction of the page's own texts, add it twice, choose the plain answer, and write the picture."""
    asked: set[Any] = set()

    def ended(request: Any) -> None:
        asked.discard(request)

    page.on("request", lambda request: asked.update([request]))
    page.on("requestfinished", ended)
    page.on("requestfailed", ended)
    await page.goto(f"{address}/explorer#{urlencode(VIEW)}")
    await idle(page)
    await page.locator("#make").evaluate("one => (one.open = true)")
    await page.click("#make-button")
    await page.wait_for_selector("#dose:enabled")
    await idle(page)
    await page.locator("#make").evaluate("one => (one.open = false)")
    await page.locator("#dose").fill("2")
    await page.wait_for_timeout(400)
    await idle(page)
    await page.select_option("#measure", TAKEN[scheme])
    await page.locator('input[name="run"][value="plain"]').check(force=True)
    await page.locator(f".token >> nth={TOKEN}").click()
    await idle(page)
    while asked:  # the lens of all cells comes in parts
        await page.wait_for_timeout(1000)
    await page.screenshot(path=PICTURES / f"explorer-{scheme}.png", full_page=True)


async def idle(page: Any) -> None:
    """Wait until the answers are whole and the lens of the chosen cell is shown."""
    await page.wait_for_selector("#run:enabled")
    for answer in ("plain", "steered"):
        await page.wait_for_selector(f'#{answer}[aria-busy="false"]')
    await page.wait_for_selector(".cell .next li", state="attached")


async def main(address: str, browser: str) -> None:
    async with import_module("playwright.async_api").async_playwright() as started:
        found = await started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in TAKEN:
            size = {"width": WIDTH, "height": HEIGHT}
            context = await found.new_context(viewport=size, color_scheme=scheme)
            page = await context.new_page()
            page.set_default_timeout(150_000)
            await take(page, address, scheme)
            await context.close()
        await found.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="address of a server, without a path")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="program of the browser")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.address, arguments.browser))
