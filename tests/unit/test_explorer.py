"""The parts of the explorer's page, as a server hands them over."""

from __future__ import annotations

import re
import webbrowser

import httpx
import pytest
from starlette.applications import Starlette

from steercap.cli.explore import opened
from steercap.cli.terminal import Output, Terminal
from steercap.server import routes


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = Starlette(routes=routes.explorer_routes())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_every_part_that_is_named_is_served(client) -> None:
    """From the page on, by links and imports, and each with the policy; nothing is named that is elsewhere."""
    wanted, seen = ["/explorer"], set()
    while wanted:
        path = wanted.pop()
        seen.add(path)
        found = await client.get(path)
        assert found.status_code == 200, path
        assert found.headers["content-security-policy"].startswith("default-src 'self';")
        assert found.headers["x-content-type-options"] == "nosniff"
        named = re.findall(r'(?:src|href)="([^"#]+)"', found.text) + [
            f"explorer/{name}" for name in re.findall(r'from "\./([^"]+)"', found.text)
        ]
        assert not [name for name in named if "//" in name]
        wanted += [f"/{name}" for name in named if f"/{name}" not in seen and "${" not in name]
    left = {f"/explorer/{name}" for name in routes.assets()} - seen
    assert left == {"/explorer/index.html", "/explorer/saved.js"}, "saved.js is a part of saved files"


async def test_the_page_has_no_script_or_style_of_its_own(client) -> None:
    page = (await client.get("/explorer")).text
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize(
    "path", ["..%2Fserver.py", "%2e%2e%2fserver.py", "../server.py", "..", "nothing.js", "assets/x.js", "%00"]
)
async def test_only_parts_are_served(client, path) -> None:
    assert (await client.get(f"/explorer/{path}")).status_code in {404, 307}


def test_modules_are_joined_in_a_saved_file() -> None:
    """Without imports and exports, and with no name that two of them declare."""
    parts = {name: text.decode() for name, text in routes.assets().items()}
    saving = parts["save.js"]
    order = re.findall(
        r'"(\w+\.js)"', saving[saving.index("const PARTS") : saving.index("];", saving.index("const PARTS"))]
    )
    assert order == ["colours.js", "picture.js", "view.js", "saved.js"]
    names: list[str] = []
    for at, name in enumerate(order):
        imported = re.findall(r'^import \{[^}]*\} from "\./([^"]+)";$', parts[name], re.MULTILINE)
        assert set(imported) <= set(order[:at])
        assert len(imported) == len(re.findall(r"^import\b", parts[name], re.MULTILINE))
        assert "</script" not in parts[name]
        names += re.findall(r"^(?:export )?(?:async )?(?:const|let|function\*?|class) (\w+)", parts[name], re.MULTILINE)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("browser", [True, False])
async def test_the_page_is_opened_if_wanted(browser, monkeypatch, capsys) -> None:
    """With --no-browser it is not; where no browser can be opened, that is said."""
    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda page: bool(seen.append(page)))
    await opened(Terminal(Output()), "http://there/explorer", browser=browser)
    assert seen == (["http://there/explorer"] if browser else [])
    assert ("no browser could be opened" in capsys.readouterr().err) is browser
