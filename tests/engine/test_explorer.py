"""The explorer in a real Chromium, over SmolLM2: what is clicked, dragged and walked; its colours and numbers are those
of local rows.

Needs chromium (Debian: apt-get install chromium) and playwright (PyPI).
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import uvicorn
from support.rows import GREEDY

from steercap import Add, CaptureSpec, SteerModel
from steercap.adapters import server
from steercap.lab.directions import extract
from steercap.server.server import ServerSettings, application
from steercap.steering.layers import LayerVectors
from steercap.testing.saes import RandomSAE

playwright = pytest.importorskip("playwright.async_api", reason="no playwright; pip install playwright")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no browser; Debian: apt-get install chromium"),
    pytest.mark.extended,
]

TEXT = "The film was wonderful, but the dinner after it was"
LENGTH = 12
MORE = [
    "The film was wonderful.",
    "I found the food excellent.",
    "Their new song is beautiful.",
    "My day has been lovely.",
]
LESS = ["The film was terrible.", "I found the food awful.", "Their new song is boring.", "My day has been dreadful."]
#: Ends and middle of the colours in light, as explorer.css has them.
CENTRE, BELOW, ABOVE = "#f3f4f5", "#2166ac", "#d95b00"
#: The first of the pictures, which is always there.
GRID = ".pictures > div:first-child .grid"
#: Milliseconds.
PATIENCE = 60_000


@pytest.fixture(scope="module")
async def site(smol: SteerModel) -> Any:
    async with served(smol) as address:
        yield address


@asynccontextmanager
async def served(model: SteerModel, *flags: str, settings: ServerSettings | None = None) -> Any:
    """The address of a server over the model."""
    read = server.read_flags(model.serving.model, ["--served-model-name", "smollm2", *flags])
    app = await application(model, read, settings or ServerSettings())
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    running.install_signal_handlers = lambda: None
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    await task


@pytest.fixture(scope="module")
async def browser() -> Any:
    async with playwright.async_playwright() as started:
        found = await started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        await found.close()


class Seen:
    """A page with what it said to the console."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _said(self, said: Any) -> None:
        if said.type in {"error", "warning"} and "getImageData" not in said.text:  # that is this test's own doing
            self.complaints.append(said.text)

    async def text(self, selector: str) -> str:
        found: str = (await self.page.locator(selector).inner_text()).strip()
        return found

    async def idle(self) -> None:
        """Wait until answers are whole and seen, and the lens of the chosen cell is here."""
        await self.page.wait_for_selector("#run:enabled")
        await self.page.wait_for_selector('#plain[aria-busy="false"]')
        await self.page.wait_for_selector('#steered[aria-busy="false"]')
        await self.page.wait_for_selector(".cell .next li", state="attached")

    async def made(self) -> None:
        """Make the direction of the texts that stand there."""
        await self.page.locator("#make").evaluate("one => (one.open = true)")
        await self.page.click("#make-button")
        await self.page.wait_for_selector("#dose:enabled")
        await self.idle()

    async def dosed(self, dose: float) -> None:
        await self.page.locator("#dose").fill(str(dose))
        await self.page.wait_for_timeout(400)
        await self.idle()

    async def numbers(self) -> dict[str, str]:
        """What the panel of the chosen cell says."""
        names, values = [await self.page.locator(f".cell {kind}").all_inner_texts() for kind in ("dt", "dd")]
        return dict(zip(names, values, strict=True))

    async def colours(self) -> list[list[list[int]]]:
        """The picture: red, green, blue by layer and token, read off its canvas at a corner of each cell."""
        found: list[list[list[int]]] = await self.page.evaluate(COLOURS)
        return found


#: Reads the middles of cells; the sizes of cells are found by their count.
COLOURS = """() => {
  const grid = document.querySelector(".grid"), canvas = grid.querySelector(".cells"), density = devicePixelRatio;
  const rows = Number(grid.getAttribute("aria-rowcount")), columns = Number(grid.getAttribute("aria-colcount"));
  const high = (parseFloat(canvas.style.height) - 74) / rows, wide = (parseFloat(canvas.style.width) - 44) / columns;
  const context = canvas.getContext("2d");
  return Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => {
    const left = Math.floor((column + 0.5) * wide * density), top = Math.floor((rows - row - 0.5) * high * density);
    return [...context.getImageData(left, top, 1, 1).data].slice(0, 3);
  }));
}"""


@asynccontextmanager
async def opened(browser: Any, address: str, **context: Any) -> Any:
    made = await browser.new_context(**{"viewport": {"width": 1380, "height": 1000}, "color_scheme": "light"} | context)
    seen = Seen(await made.new_page())
    await seen.page.goto(address)
    yield seen
    await made.close()


def explored(site: str) -> str:
    return f"{site}/explorer#text={TEXT.replace(' ', '+')}&length={LENGTH}"


@pytest.fixture(scope="module")
async def vectors(smol: SteerModel) -> LayerVectors:
    return (await extract(smol, MORE, LESS, name="praise", held_out=0.0))["praise"]


def mixed(value: float, limit: float) -> list[int]:
    """The colour of a value, by Ottosson's OKLab."""
    to = torch.tensor(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ],
        dtype=torch.float64,
    )
    mix = torch.tensor(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ],
        dtype=torch.float64,
    )

    def lab(colour: str) -> torch.Tensor:
        parts = torch.tensor([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)], dtype=torch.float64)
        linear = torch.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return mix @ (to @ linear) ** (1 / 3)

    share = min(1.0, abs(value) / limit)
    found = torch.lerp(lab(CENTRE), lab(BELOW if value < 0 else ABOVE), share)
    linear = torch.linalg.solve(to, torch.linalg.solve(mix, found) ** 3).clamp(0, 1)
    parts = torch.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return [round(255 * float(part)) for part in parts]


def number(said: str) -> float:
    return float(said.replace("−", "-"))


async def test_a_stranger_sees_something_at_once(smol: SteerModel, browser) -> None:
    """Painted within a second, without a direction: lengths and the lens; nothing to complain of."""
    async with served(smol) as site, opened(browser, f"{site}/explorer") as seen:
        await seen.idle()
        paint = await seen.page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert paint < 1000
        assert await seen.text("#model") == "smollm2 · 30 layers × 576"
        assert await seen.text("#plain")
        assert await seen.page.locator(".token").count() > 10
        assert await seen.page.input_value("#measure") == "norm"
        assert len(await seen.page.locator(".next li").all()) == 8
        assert not await seen.page.locator("#notice").is_visible()
        await seen.page.select_option("#measure", "next")
        await seen.page.wait_for_timeout(1500)
        assert not seen.complaints


async def test_colours_and_numbers_are_those_of_local_rows(site, browser, smol: SteerModel, vectors) -> None:
    """Of a direction that the page has made of texts: every cell's colour; of cells that are clicked, the numbers."""
    text, handle = await smol.generate(TEXT, {"max_tokens": LENGTH, **GREEDY}, capture=CaptureSpec())
    async with handle:
        rows = torch.stack([handle.captures[layer] for layer in range(30)])
        along = torch.stack([torch.cosine_similarity(rows[layer], vectors[layer][None], dim=1) for layer in range(30)])
        words = [smol.tokenizer.decode([token]).strip() for token in handle.token_ids]
        says = {layer: await handle.lens(layer, site="resid_post", top=3) for layer in (7, 18, 29)}
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        assert await seen.text("#plain") == text.strip()
        await seen.made()
        assert await seen.page.input_value("#measure") == "cosine"
        colours = await seen.colours()
        limit = float(along.abs().max())
        assert limit < 10 * float(along.abs().median()), "a cosine that counts for less than it is"
        low, high = (
            await seen.page.locator(".marks b").nth(0).inner_text(),
            await seen.page.locator(".marks b").nth(2).inner_text(),
        )
        assert -number(low) == number(high) == pytest.approx(limit, abs=6e-4)
        assert (len(colours), len(colours[0])) == tuple(along.shape)
        for layer, line in enumerate(along.tolist()):
            for token, value in enumerate(line):
                known = mixed(value, limit)  # of equal numbers but for rounding: two of 255
                assert max(abs(one - two) for one, two in zip(colours[layer][token], known, strict=True)) <= 2
        box = await seen.page.locator(f"{GRID} .cells").bounding_box()
        high, wide = (box["height"] - 74) / 30, (box["width"] - 44) / along.shape[1]
        for layer, token in ((7, 3), (29, 0), (18, 14)):
            place = {"x": (token + 0.5) * wide, "y": (30 - layer - 0.5) * high}
            await seen.page.locator(f"{GRID} .cells").click(position=place)
            await seen.idle()
            assert f"layer {layer} · token {token} ·" in await seen.text(".cell > p.hint")
            found = await seen.numbers()
            assert number(found["Cosine with praise"]) == pytest.approx(float(along[layer, token]), abs=6e-4)
            length = float(rows[layer, token].norm())
            assert number(found["Length of the row"]) == pytest.approx(length, rel=6e-3)
            assert await seen.text(f".token >> nth={token}") == words[token]
            said = await seen.page.locator(".next .chance").all_inner_texts()
            chances = [0.0 if one == "< 0.1 %" else number(one.rstrip(" %")) for one in said]
            known = 100 * says[layer].log_probs[token].exp()
            assert chances[:3] == pytest.approx(known.tolist(), abs=0.06)
        assert not seen.complaints


async def test_the_grid_is_walked_by_keys(site, browser) -> None:
    """Arrows, ends and pages; what is heard is the active cell, and the text's tokens walk too."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        page = seen.page
        await page.locator(GRID).focus()
        await page.keyboard.press("Home")
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowUp")
        heard = (
            "document.getElementById(document.querySelector('.grid').getAttribute('aria-activedescendant')).textContent"
        )
        first = await page.evaluate(f"() => {heard}")
        assert first.startswith("layer 19, token 1 ")
        for key, where in (
            ("PageDown", "layer 14, token 1 "),
            ("End", "layer 14, token"),
            ("Control+End", "layer 0, "),
        ):
            await page.keyboard.press(key)
            assert (await page.evaluate(f"() => {heard}")).startswith(where)
        for _ in range(3):
            await page.keyboard.press("ArrowDown")
        assert (await page.evaluate(f"() => {heard}")).startswith("layer 0, ")
        await seen.idle()
        await page.locator('.token[tabindex="0"]').focus()
        for _ in range(2):
            await page.keyboard.press("ArrowLeft")
        chosen = await page.locator('.token[aria-selected="true"]').get_attribute("aria-label")
        assert await page.evaluate("() => document.activeElement.getAttribute('aria-label')") == chosen
        await page.keyboard.press("ArrowUp")
        assert (await page.locator('.token[aria-selected="true"]').get_attribute("aria-label")).startswith("layer 1, ")
        order = []
        await page.locator("#text").focus()
        for _ in range(24):
            await page.keyboard.press("Tab")
            order.append(await page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        places = [order.index(name) for name in ("length", "run", "direction", "measure", "grid")]
        assert places == sorted(places)
        unnamed = await page.evaluate(UNNAMED)
        assert not unnamed
        assert not seen.complaints


#: Fields and buttons that are shown and have no name.
UNNAMED = """() => [...document.querySelectorAll("input, select, textarea, button")].filter((one) =>
  !(one.labels?.length || one.textContent.trim() || one.getAttribute("aria-label"))).map((one) => one.outerHTML)"""


async def test_the_dose_is_dragged(site, browser, smol: SteerModel, vectors) -> None:
    """The steered text beside the plain one is the one that is steered here; nothing is left of it at no dose."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        plain = await seen.text("#plain")
        await seen.made()
        box = await seen.page.locator("#dose").bounding_box()
        middle = box["y"] + box["height"] / 2
        await seen.page.mouse.move(box["x"] + box["width"] / 2, middle)
        await seen.page.mouse.down()
        for share in (0.55, 0.65, 0.75):
            await seen.page.mouse.move(box["x"] + share * box["width"], middle)
        await seen.page.mouse.up()
        await seen.page.wait_for_timeout(400)
        await seen.idle()
        dose, layer = [float(await seen.page.input_value(name)) for name in ("#dose", "#at")]
        assert dose > 0
        for scale in (dose, -2.0):
            if scale != dose:
                await seen.dosed(scale)
            own = Add(vectors[int(layer)], scale, layer=int(layer))
            known = await smol.generate(TEXT, {"max_tokens": LENGTH, **GREEDY}, steering=own)
            assert await seen.text("#steered") == known.strip()
        assert await seen.text("#plain") == plain
        await seen.page.locator('.choices input[value="steered"]').check(force=True)
        assert known.split()[-2] in await seen.text(".tokens")
        await seen.dosed(0)
        assert "Move the dose" in await seen.text("#steered")
        assert await seen.page.locator(".choices input[value=steered]").count() == 0
        assert not seen.complaints


async def test_what_is_seen_follows_the_dose(site, browser) -> None:
    """The text in colour is the steered one since the dose is moved, at the layer that it is moved to; until the plain one is chosen."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        plain = await seen.text(".tokens")
        await seen.dosed(3)
        assert await seen.text("#view h2 >> nth=0") == "Tokens at layer 18, steered"
        assert await seen.text(".tokens") != plain
        await seen.page.select_option("#at", "12")
        await seen.page.wait_for_timeout(400)
        await seen.idle()
        assert await seen.text("#view h2 >> nth=0") == "Tokens at layer 12, steered"
        await seen.page.locator('.choices input[value="plain"]').last.check(force=True)
        assert await seen.text(".tokens") == plain
        await seen.page.click("#run")
        await seen.idle()
        assert await seen.text(".tokens") == plain
        await seen.dosed(0)
        assert await seen.text("#view h2 >> nth=0") == "Tokens at layer 12"
        assert not seen.complaints


async def test_the_dose_steers_the_answer_that_is_shown(site, browser, smol: SteerModel, vectors) -> None:
    """Not what has come into the fields since; the address is of it too."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        plain = await seen.text("#plain")
        await seen.page.fill("#text", "Dear Sir or Madam, I am writing to complain about")
        await seen.page.fill("#length", "3")
        await seen.dosed(2)
        layer = int(await seen.page.input_value("#at"))
        own = Add(vectors[layer], 2.0, layer=layer)
        known = await smol.generate(TEXT, {"max_tokens": LENGTH, **GREEDY}, steering=own)
        assert (await seen.text("#plain"), await seen.text("#steered")) == (plain, known.strip())
        await seen.page.wait_for_timeout(300)
        assert f"text={TEXT.replace(' ', '+').replace(',', '%2C')}&length={LENGTH}&" in seen.page.url
        assert not seen.complaints


async def test_an_upload_is_steered_with_at_once(site, browser, smol: SteerModel, vectors, tmp_path) -> None:
    """The answer under its name is its own, not that of the direction before it."""
    LayerVectors({18: -vectors[18]}, name="turned").save(tmp_path / "turned.safetensors")
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        await seen.dosed(4)
        await seen.page.set_input_files("#upload", tmp_path / "turned.safetensors")
        await seen.page.get_by_text("Steered: +4 × turned at layer 18").wait_for()
        await seen.page.wait_for_timeout(400)
        await seen.idle()
        own = Add(-vectors[18], 4.0, layer=18)
        known = await smol.generate(TEXT, {"max_tokens": LENGTH, **GREEDY}, steering=own)
        assert await seen.text("#steered") == known.strip()
        assert not seen.complaints


async def test_a_steered_answer_that_fails_leaves_none(site, browser, tmp_path) -> None:
    """A kept view has no answer under a dose that is not its own; a question that fails leaves the one before it."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        plain = await seen.text("#plain")
        await seen.dosed(2)

        async def full(route: Any) -> None:
            refused = '"steering"' in (route.request.post_data or "")
            await (route.fulfill(status=429, json={"error": {"message": "no room"}}) if refused else route.continue_())

        await seen.page.route("**/v1/completions", full)
        await seen.dosed(3)
        assert "The server is full: no room" in await seen.text("#notice")
        assert await seen.text("#steered") == "No answer: see above."
        assert await seen.page.locator(".choices input").count() == 0
        async with seen.page.expect_download() as coming:
            await seen.page.click("#file")
        await (await coming.value).save_as(tmp_path / "view.html")
        await seen.page.fill("#text", "word " * 3000)
        await seen.page.click("#run")
        await seen.page.wait_for_selector("#notice:visible")
        await seen.idle()
        assert await seen.text("#plain") == plain
    async with opened(browser, (tmp_path / "view.html").as_uri(), offline=True) as kept:
        assert await kept.page.locator("#answers h2").all_inner_texts() == ["Plain"]


async def test_the_model_that_answers_is_named(browser, smol: SteerModel, vectors, tmp_path) -> None:
    """On the page and in a saved file; a model that a link asks for and that is not there is said to be missing."""
    vectors.save(tmp_path / "praise.safetensors")
    preset = {"op": "add", "vector": "praise", "layers": [18], "scale": 2.0}
    settings = ServerSettings(vectors={"praise": tmp_path / "praise.safetensors"}, presets={"calm": preset})
    async with served(smol, settings=settings) as site, opened(browser, f"{explored(site)}&model=other") as seen:
        await seen.idle()
        assert "model “other”, which this server does not have" in await seen.text("#notice")
        assert await seen.text("#model") == "smollm2 · 30 layers × 576"
        await seen.page.select_option("#models", "smollm2+calm")
        assert await seen.text("#model") == "smollm2 · 30 layers × 576", "it has not answered yet"
        await seen.page.click("#run")
        await seen.page.get_by_text("smollm2+calm · 30").wait_for()
        await seen.idle()
        async with seen.page.expect_download() as coming:
            await seen.page.click("#file")
        await (await coming.value).save_as(tmp_path / "view.html")
    async with opened(browser, (tmp_path / "view.html").as_uri(), offline=True) as kept:
        assert await kept.text("#model") == "smollm2+calm · 30 layers × 576"


async def test_a_link_with_an_unknown_measure_opens(site, browser) -> None:
    async with opened(browser, f"{explored(site)}&measure=constructor") as seen:
        await seen.idle()
        assert await seen.page.input_value("#measure") == "norm"
        assert not await seen.page.locator("#notice").is_visible()
        assert not seen.complaints


async def test_of_two_directions_the_last_chosen_is_seen(browser, smol: SteerModel, vectors, tmp_path) -> None:
    """Though the scores of the one before it come later."""
    for name in ("first", "last"):
        vectors.save(tmp_path / f"{name}.safetensors")
    settings = ServerSettings(vectors={name: tmp_path / f"{name}.safetensors" for name in ("first", "last")})
    async with served(smol, settings=settings) as site, opened(browser, explored(site)) as seen:

        async def late(route: Any) -> None:
            if '"first"' in (route.request.post_data or ""):
                await asyncio.sleep(1.0)
            await route.continue_()

        await seen.idle()
        await seen.page.route("**/scores", late)
        await seen.page.select_option("#direction", "first")
        await seen.page.select_option("#direction", "last")
        await seen.page.wait_for_timeout(2000)
        await seen.idle()
        assert await seen.page.input_value("#measure") == "cosine"
        assert "Cosine with last" in await seen.numbers()
        assert await seen.page.locator("#dose").is_enabled()
        assert not seen.complaints


async def test_a_picture_says_which_answer_it_shows(site, browser) -> None:
    """The layer of its text, and what it is steered with."""
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        await seen.dosed(2)
        await seen.page.evaluate(
            """() => {
              const own = CanvasRenderingContext2D.prototype.fillText;
              globalThis.drawn = [];
              CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                drawn.push(text);
                return own.call(this, text, ...rest);
              };
            }"""
        )
        for run, said in (
            ("steered", "Tokens at layer 18, steered   (Steered: +2 × praise at layer 18)"),
            ("plain", "Tokens at layer 18"),
        ):
            await seen.page.locator(f'.choices input[value="{run}"]').check(force=True)
            await seen.page.evaluate("() => (drawn.length = 0)")
            async with seen.page.expect_download():
                await seen.page.click("#png")
            assert said in await seen.page.evaluate("() => drawn")
        assert not seen.complaints


async def test_the_skip_link_leaves_the_view_as_it_is(site, browser) -> None:
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        await seen.page.wait_for_timeout(300)
        before = seen.page.url, await seen.numbers()
        await seen.page.locator("#skip").focus()
        await seen.page.keyboard.press("Enter")
        await seen.page.wait_for_timeout(300)
        await seen.idle()
        assert (seen.page.url, await seen.numbers()) == before
        assert await seen.page.evaluate("() => document.activeElement.id") == "view"
        assert not seen.complaints


async def test_on_a_phone_the_dose_stays_beside_the_text(site, browser) -> None:
    """Scrolled to the tokens, dose and tokens are both within the screen; nothing is wider than it."""
    async with opened(browser, explored(site), viewport={"width": 390, "height": 780}) as seen:
        await seen.idle()
        await seen.made()
        await seen.page.locator(".tokens").evaluate("one => one.scrollIntoView({ block: 'center' })")
        for place in ("#dose", ".tokens"):
            box = await seen.page.locator(place).bounding_box()
            assert 0 <= box["y"] < box["y"] + min(box["height"], 100) <= 780
        dose, tokens = [await seen.page.locator(name).bounding_box() for name in ("#dose-panel", ".tokens")]
        assert dose["y"] + dose["height"] <= tokens["y"]
        assert await seen.page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert not seen.complaints


async def test_the_name_of_a_direction_says_what_it_may_be(site, browser) -> None:
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.page.locator("#make").evaluate("one => (one.open = true)")
        said = await seen.text("#name-hint")
        for name, fits in (("two words", False), (".x", False), ("a.b-c_1", True)):
            await seen.page.fill("#name", name)
            assert await seen.page.locator("#name").evaluate("one => one.validity.valid") is fits
        assert said == "Of letters, digits, dots, dashes and underscores; a letter or digit first."
        assert said.rstrip(".").removeprefix("Of ").capitalize() == await seen.page.get_attribute("#name", "title")
        assert not seen.complaints


async def test_a_view_is_kept(site, browser, tmp_path) -> None:
    """As a link, which says the same again; as a file, which needs no server; as a picture."""
    async with opened(browser, explored(site), permissions=["clipboard-read", "clipboard-write"]) as seen:
        await seen.idle()
        await seen.made()
        await seen.dosed(2)
        await seen.page.locator(GRID).focus()
        await seen.page.keyboard.press("ArrowUp")
        await seen.idle()
        await seen.page.wait_for_timeout(300)
        await seen.page.click("#link")
        await seen.page.get_by_text("The link is copied.").wait_for(state="attached")
        assert await seen.page.evaluate("() => navigator.clipboard.readText()") == seen.page.url
        link, said, numbers, colours = (
            seen.page.url,
            await seen.text("#steered"),
            await seen.numbers(),
            await seen.colours(),
        )
        for button, name in (("#file", "view.html"), ("#png", "view.png")):
            async with seen.page.expect_download() as coming:
                await seen.page.click(button)
            await (await coming.value).save_as(tmp_path / name)
        assert not seen.complaints
    async with opened(browser, link) as again:
        await again.idle()
        assert await again.text("#steered") == said
        assert await again.numbers() == numbers
        assert await again.colours() == colours
    assert (tmp_path / "view.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (tmp_path / "view.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    async with opened(browser, (tmp_path / "view.html").as_uri(), offline=True) as kept:
        assert await kept.numbers() == numbers
        assert await kept.colours() == colours
        assert said in await kept.text("#answers")
        await kept.page.select_option("#measure", "next")
        await kept.page.locator(GRID).focus()
        for _ in range(3):
            await kept.page.keyboard.press("ArrowDown")
            assert len(await kept.page.locator(".next li").all()) == 8
        assert not kept.complaints


async def test_two_directions_are_compared(site, browser, smol: SteerModel, vectors) -> None:
    async with opened(browser, explored(site)) as seen:
        await seen.idle()
        await seen.made()
        await seen.page.fill("#name", "past")
        past, present = ["He walked home.", "They ate there."], ["He walks home.", "They eat there."]
        await seen.page.fill("#more", "\n".join(past))
        await seen.page.fill("#less", "\n".join(present))
        await seen.page.click("#make-button")
        await seen.page.wait_for_selector('#direction option[value="past"]', state="attached")
        await seen.idle()
        await seen.page.select_option("#direction", "praise")
        await seen.page.select_option("#compare", "past")
        await seen.page.wait_for_selector(".pictures > div:nth-child(2):not([hidden])")
        other = (await extract(smol, past, present, name="past", held_out=0.0))["past"]
        known = float(torch.cosine_similarity(vectors[18], other[18], dim=0))
        assert number((await seen.numbers())["Cosine of praise with past"]) == pytest.approx(known, abs=6e-4)
        assert "Cosine with past" in await seen.numbers()
        assert not seen.complaints


async def test_features_of_the_chosen_cell(browser, smol: SteerModel, tmp_path) -> None:
    """Where an SAE reads its layer, the strongest of the row there, and in a saved file too; none at other layers."""
    hook = {"sae_lens_version": "6.54.12", "hook_name": "blocks.18.hook_resid_post"}
    own = RandomSAE("standard", 576, 2048, configuration=(("metadata", hook),))
    settings = ServerSettings(saes={"own": own.write(tmp_path / "own")})
    _, handle = await smol.generate(TEXT, {"max_tokens": LENGTH, **GREEDY}, capture=CaptureSpec(layers=[18]))
    async with handle:
        dense = torch.from_numpy(own.encode(handle.captures[18]))
    async with served(smol, settings=settings) as site, opened(browser, explored(site)) as seen:
        await seen.idle()
        for token in (4, 7):
            await seen.page.locator(f".token >> nth={token}").click()
            await seen.page.wait_for_selector(".cell .features li")
            assert "Features, by own" in await seen.text(".cell")
            values, ids = dense[token].topk(8)
            assert await seen.page.locator(".features code").all_inner_texts() == [f"#{one}" for one in ids.tolist()]
            said = [number(one) for one in await seen.page.locator(".features .chance").all_inner_texts()]
            assert said == pytest.approx(values.tolist(), rel=6e-3)
            assert f"of {int((dense[token] > 0).sum())} that are active" in await seen.text(".cell")
        kept = await seen.page.locator(".features code").all_inner_texts()
        await seen.page.locator('.token[tabindex="0"]').focus()
        await seen.page.keyboard.press("ArrowUp")
        await seen.idle()
        assert await seen.page.locator(".cell .features").count() == 0
        async with seen.page.expect_download() as coming:
            await seen.page.click("#file")
        await (await coming.value).save_as(tmp_path / "view.html")
        assert not seen.complaints
    async with opened(browser, (tmp_path / "view.html").as_uri(), offline=True) as saved:
        await saved.page.locator('.token[tabindex="0"]').focus()
        await saved.page.keyboard.press("ArrowDown")
        assert await saved.page.locator(".features code").all_inner_texts() == kept
        assert not saved.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_scrolling_sideways(site, browser, scheme) -> None:
    size = {"viewport": {"width": 360, "height": 780}, "color_scheme": scheme, "has_touch": True, "is_mobile": True}
    async with opened(browser, explored(site), **size) as seen:
        await seen.idle()
        for measure in ("norm", "next"):
            await seen.page.select_option("#measure", measure)
            await seen.page.wait_for_timeout(300)
            assert await seen.page.evaluate("() => document.documentElement.scrollWidth") == 360
        assert not seen.complaints


async def test_what_goes_wrong_is_said_in_words(site, browser, smol: SteerModel) -> None:
    """A prompt that does not fit, a direction that is not there, texts that say nothing, and a key."""
    async with opened(browser, f"{explored(site)}&direction=nothing") as seen:
        await seen.idle()
        assert "direction “nothing”, which this server does not have" in await seen.text("#notice")
        await seen.page.fill("#text", "word " * 3000)
        await seen.page.click("#run")
        await seen.page.wait_for_selector("#notice:visible")
        assert "1024" in await seen.text("#notice")
        await seen.page.fill("#text", TEXT)
        await seen.page.press("#text", "Control+Enter")
        await seen.page.wait_for_selector("#notice", state="hidden")
        await seen.idle()
        await seen.page.locator("#make").evaluate("one => (one.open = true)")
        await seen.page.fill("#more", "")
        await seen.page.click("#make-button")
        await seen.page.wait_for_selector("#notice:visible")
        assert "give a list of texts" in await seen.text("#notice")
    async with served(smol, "--api-key", "secret") as guarded, opened(browser, explored(guarded)) as seen:
        await seen.page.wait_for_selector("#key-form:visible")
        assert "API key" in await seen.text("#notice")
        await seen.page.fill("#key", "secret")
        await seen.page.press("#key", "Enter")
        await seen.idle()
        assert await seen.text("#plain")
        assert not await seen.page.locator("#key-form").is_visible()


async def test_a_chat_is_typed_or_pasted(site, browser, smol: SteerModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    known = await smol.chat(messages, {"max_tokens": LENGTH, "temperature": 0.0})
    typed = "system: Be brief.\nuser: Name a colour."
    pasted = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]'
    async with opened(browser, f"{explored(site)}&mode=chat") as seen:
        for text in (typed, pasted):
            await seen.idle()
            await seen.page.fill("#text", text)
            await seen.page.click("#run")
            await seen.page.wait_for_timeout(200)
            await seen.idle()
            assert await seen.text("#plain") == known.strip()
            assert "<|im_start|>" in await seen.text(".tokens")
        assert not seen.complaints
