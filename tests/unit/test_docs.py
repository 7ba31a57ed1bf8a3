"""The documentation builds, its commands exist, and what of it is not run is counted."""

from __future__ import annotations

import ast
import builtins
import contextlib
import html
import inspect
import io
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import docs_diagram
import docs_modules
import msgspec
import pytest
import typer
from docs_pages import ROOT, Block, blocks, model_of, pages, steercap_commands

import steercap
from steercap import errors
from steercap.architectures.sites import SITES
from steercap.cli.app import app
from steercap.cli.evaluation_file import EvaluationFile, RolloutFile
from steercap.cli.sweep_file import SweepFile
from steercap.lab.measures.scores import SCORERS
from steercap.lab.personas import load_trait
from steercap.lab.personas.roles import load_roles
from steercap.steering.edits import EDITS

#: Blocks that no test runs, by page; each says its reason above it.
NOT_RUN = {
    "answers.md": 1,
    "collecting.md": 1,
    "command-line.md": 1,
    "install.md": 2,
    "nnsight.md": 1,
    "parallelism.md": 2,
    "pyvene.md": 1,
    "recording.md": 1,
    "repeng.md": 1,
    "sae-lens.md": 1,
    "serve.md": 3,
    "transformer-lens.md": 1,
    "transformers.md": 1,
    "versions.md": 1,
    "vllm-lens.md": 1,
}
ALL = [block for page in pages() for block in blocks(page)]
SHELL = [block for block in ALL if block.language in {"sh", "console"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The pages, built as `make docs` builds them."""
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return path


@pytest.mark.slow
def test_the_documentation_builds(site) -> None:
    """`mkdocs build --strict` finds every page, link, heading and object named, without a network."""
    for name in ("index.html", "api/model.html", "api/errors.html", "notebooks/02_steer.html"):
        page = (site / name).read_text()
        assert 'src="http' not in page, "something is fetched from elsewhere"
        assert "md-footer__link--" in page, "no way to the next page"
    assert "capture_layers" in (site / "api" / "model.html").read_text()


@pytest.mark.slow
def test_the_reference_shows_values(site) -> None:
    """Defaults are what they are, not the names of constants; the twins without await have their arguments."""
    shown = {page.name: text_of(page.read_text()) for page in (site / "api").glob("*.html")}
    assert "capture_bytes: int = 4 << 30" in shown["model.html"]
    assert "slice(1, None)" in shown["vectors.html"]
    assert not [(name, found) for name, text in shown.items() if (found := CONSTANT.findall(text))]
    for name in ("generate", "read", "extract", "run_sweep"):
        assert re.search(rf"\b{name}\(\s*(model|prompts)\b", shown["sync.html"]), name


#: A default that is a name: of a module's constant, or of a field of Settings.
CONSTANT = re.compile(r"= (?:[A-Z][A-Z_]{3,}\b(?<!FROM_CONTEXT)|Settings\.\w+)")


def text_of(page: str) -> str:
    """A page without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.mark.slow
def test_every_notebook_is_a_page(site) -> None:
    """With its text, code, outputs and pictures, and in the navigation."""
    start = (site / "index.html").read_text()
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        page = (site / "notebooks" / f"{notebook.stem}.html").read_text()
        pictures = re.findall(r'src="([^"]*_output_[^"]*)"', page)
        assert pictures
        assert all((site / "notebooks" / picture).stat().st_size > 1000 for picture in pictures)
        assert f"notebooks/{notebook.stem}.html" in start


@pytest.mark.slow
def test_every_module_is_on_a_page(site) -> None:
    """With the first sentence of its docstring, in the table of its room."""
    page = (site / "modules.html").read_text()
    tables = dict(zip(re.findall(r'<h2 id="[^"]+">([^<]+)<', page), page.split("<h2 ")[1:], strict=True))
    modules = docs_modules.rooms()
    assert tables.keys() == modules.keys()
    for room, paths in modules.items():
        missing = [path for path in paths if f"<td><code>{docs_modules.name_of(path)}</code></td>" not in tables[room]]
        assert not missing, room
    assert sum(map(len, modules.values())) == sum(1 for _ in Path(steercap.__file__).parent.rglob("*.py"))
    assert [path for paths in modules.values() for path in paths if not docs_modules.summary(path)] == []


def test_pages_on_how_it_works_are_short() -> None:
    """A newcomer can read the whole in one go, and a mechanism in five minutes."""
    pages_of = {ROOT / "docs" / "architecture.md": 900}
    mechanisms = dict.fromkeys((ROOT / "docs" / "mechanisms").glob("*.md"), 800)
    assert [path.name for path, most in (pages_of | mechanisms).items() if len(path.read_text().split()) > most] == []
    assert sum(len(path.read_text().split()) for path in mechanisms) <= 6000


def test_the_picture_of_the_processes_is_the_one_that_is_drawn() -> None:
    """`python scripts/docs_diagram.py` writes it anew; the page of the whole shows it."""
    assert docs_diagram.PICTURE.read_text() == docs_diagram.drawn()
    assert f"](pictures/{docs_diagram.PICTURE.name})" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.slow
def test_the_site_can_be_searched_from_a_file(site) -> None:
    """The index is a script, and where a browser starts no worker from a file, a frame does its work."""
    page = (site / "index.html").read_text()
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert 'src="assets/iframe-worker.js"' in page
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser to search with; Debian: apt-get install chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    places = {"logit+lens": "index.html", "hook_resid_post": "roles.html", "steering+vector": "index.html"}
    for words, name in (places | {"run_with_cache": "api/model.html"}).items():
        place = f"{(site / name).as_uri()}?q={words}"
        found = subprocess.run([*command, place], capture_output=True, text=True, timeout=500, check=False).stdout
        assert re.search(r"md-search-result__meta[^>]*>\s*\d+ matching document", found), name
        results = re.findall(r'href="([^"]+)" class="md-search-result__link"', found)
        assert results[0].startswith((site / "from" / "transformer-lens.html").as_uri()), words
    assert "views.html" in found


def test_every_picture_is_described() -> None:
    """For those who do not see it: a text of several words, no name of a file, and of each picture another."""
    found = [
        (page.name, words, picture)
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        for words, picture in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", page.read_text())
    ]
    assert len(found) >= 12
    assert [
        (page, words) for page, words, _ in found if len(words.split()) < 5 or words.endswith((".png", ".svg"))
    ] == []
    pictures = {words: Path(picture).name for _, words, picture in found}
    assert all(pictures[words] == Path(picture).name for _, words, picture in found)
    assert not [page.name for page in (ROOT / "docs").rglob("*.md") if "<img" in page.read_text()]


#: Openings that leave a reader guessing what a page is for.
RIDDLES = ("What ", "Whose ", "Which ", "Where ", "Who ", "How ", "Whether ", "There ", "It ", "This ")


@pytest.mark.parametrize("page", pages()[2:], ids=lambda page: page.name)
def test_a_guide_begins_with_what_a_reader_can_do(page: Path) -> None:
    """A sentence follows its title, no heading or code, and it is neither a question nor a riddle."""
    text = re.sub(r"\A(?:---\n.*?^---\n)?(?:<!--.*?-->\n)*", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    title, opening, *_ = text.split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[A-Za-z`]", opening), opening
    assert not opening.startswith(("```", *RIDDLES)), opening
    assert not re.match(r"[^.:]*\?", opening), opening


def test_no_block_is_passed_over() -> None:
    """Every fence is of a language that tests know, and what is not run says why and is counted."""
    fences = sum(page.read_text().count("\n```") for page in pages())
    assert fences == 2 * len(ALL), "a fence that is not read as a block"
    known = {"python", "sh", "console", "yaml", "text"}
    assert not {block.where for block in ALL if block.language not in known}
    assert Counter(block.page for block in ALL if block.reason) == NOT_RUN
    for page in pages():
        if any(block.language == "python" and not block.reason and not block.is_script for block in blocks(page)):
            assert model_of(page) in {"smol", "tiny", "heads", "seeing", "encoder"}, (
                f"{page.name} does not say which model it runs with"
            )


def test_python_that_is_not_run_is_python() -> None:
    """What no test runs can at least be read."""
    for block in ALL:
        if block.language == "python":
            compile(block.text, block.where, "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_are_spelled_right(block: Block, tmp_path, monkeypatch) -> None:
    """Every `steercap` command in the documentation has options and values that the command takes."""
    for name in ("praise.txt", "complaint.txt", "prompts.txt"):
        (tmp_path / name).write_text("text\n")
    for name in ("praise.safetensors", "out/praise.safetensors", "out/rows/0000.safetensors", "evil.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for other in ALL:
        if other.page == block.page and other.title:
            other.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in steercap_commands(block):
        parse(arguments)


def parse(arguments: list[str]) -> None:
    """Read a command as the shell's call would, and do nothing.

    Raises:
        click.UsageError: no such command, option or value.
    """
    command, name = typer.main.get_command(app), "steercap"
    parent, rest = None, arguments
    with contextlib.suppress(typer.Exit, click.exceptions.Exit):  # --help
        while True:
            context = command.make_context(name, list(rest), parent=parent)
            if not hasattr(command, "resolve_command"):
                return
            given = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, given)
            parent = context


@pytest.mark.parametrize("arguments", [["generate", "--no-such"], ["vectors", "shows"], ["capture", "a"]])
def test_the_parser_of_this_test_refuses(arguments) -> None:
    """An option, a command or a required option that is not there is seen."""
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        parse(arguments)


def test_other_commands_exist() -> None:
    """What is called beside `steercap` is a target of the Makefile, a script of ours, or known to everybody."""
    targets = (ROOT / "Makefile").read_text()
    for block in SHELL:
        for words in block.commands:
            if words[0] == "make":
                assert all(f"\n{word}:" in targets for word in words[1:] if "=" not in word), block.where
            elif words[0] == "python":
                path = next(word for word in words[1:] if not word.startswith("-"))
                written = {other.title for other in ALL} | {"first.py"}
                assert (ROOT / path).exists() or path in written, f"{block.where}: {path}"
            else:
                assert words[0] in {
                    "steercap",
                    "git",
                    "cd",
                    ".",
                    "pip",
                    "pytest",
                    "printf",
                    "export",
                    "curl",
                    "pre-commit",
                }, f"{block.where}: {words}"


def test_files_shown_are_what_they_say(tmp_path) -> None:
    """A trait, a sweep and a folder of roles in YAML can be read."""
    shown = [block for block in ALL if block.language == "yaml" and block.title]
    assert {block.title for block in shown} >= {"curious.yaml", "evaluation.yaml", "sweep.yaml"}
    for block in shown:
        path = block.write(tmp_path)
        if block.title == "sweep.yaml":
            msgspec.yaml.decode(block.text, type=SweepFile)
        elif block.title == "evaluation.yaml":
            msgspec.yaml.decode(block.text, type=EvaluationFile)
        elif block.title == "rollouts.yaml":
            msgspec.yaml.decode(block.text, type=RolloutFile)
        elif path.parent == tmp_path:
            load_trait(path)
    assert load_roles(tmp_path / "mine").names == ("baker", "sailor")


def test_troubleshooting_names_every_error() -> None:
    """Who meets an error finds its name there, and what to do."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    classes = [name for name, cls in vars(errors).items() if inspect.isclass(cls)]
    assert [name for name in classes if f"`{name}`" not in page] == []


def test_recipes_are_short() -> None:
    """Six scripts, each by itself, under 25 lines of at most 100 characters, of public names alone."""
    data, *recipes = [block.text for block in blocks(ROOT / "docs" / "recipes.md") if block.language == "python"]
    assert len(recipes) == 6
    assert [text for text in recipes if len(text.splitlines()) >= 25 or re.search(r"[ .]_\w", text)] == []
    assert [line for text in (data, *recipes) for line in text.splitlines() if len(line) > 100] == []
    for text in recipes:
        nodes = list(ast.walk(ast.parse(text)))
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        made |= {getattr(node, "name", getattr(node, "arg", "")) for node in nodes}
        assert used - made - set(dir(builtins)) <= {"model"}


def test_the_tables_are_complete() -> None:
    """Every operation is in the table of operations, every scorer in that of scorers."""
    page = (ROOT / "docs" / "steering.md").read_text()
    assert [edit.__name__ for edit in EDITS.values() if f"| `{edit.__name__}(" not in page] == []
    page = (ROOT / "docs" / "persona.md").read_text()
    assert [name for name in SCORERS if f"| `{name}`" not in page] == []


def test_the_pages_name_every_site() -> None:
    """Wherever sites are listed, all of them are."""
    for name, pattern in (
        ("README.md", r"`(\w+)`(?=[, ].*in each layer that has them)"),
        ("docs/tokens.md", r"^\| `(\w+)` \| "),
        ("docs/glossary.md", r"`(\w+)`(?=[,;].*a hook point elsewhere)"),
        ("docs/mechanisms/sites.md", r"(\w+)(?=[,.].*`attn_out` and `mlp_out` are what the block)"),
    ):
        page = (ROOT / name).read_text()
        assert sorted(re.findall(pattern, page, re.MULTILINE)) == sorted(SITES), name


def test_outputs_on_the_page_of_the_command_line_are_what_is_printed(tmp_path) -> None:
    """The static ones are printed now and compared; every block with an output is marked as one from a run."""
    script = runpy.run_path(str(ROOT / "scripts" / "docs_command_line.py"))
    page = (ROOT / "docs" / "command-line.md").read_text()
    found = list(script["outputs"](page))
    static = [one for one in found if one.kind == "static"]
    assert static
    for one in static:
        assert script["printed"](one.command, tmp_path) == one.text, (
            f"run scripts/docs_command_line.py for {one.command}"
        )
    marked = {(one.command, bool(one.text)) for one in found}
    shown = [block for block in blocks(ROOT / "docs" / "command-line.md") if block.language == "console"]
    for block in shown:
        command, _, output = block.text.partition("\n")
        assert not output or (command.removeprefix("$ "), True) in marked, f"{block.where} was written by hand"


def test_the_install_says_how_far_it_is(tmp_path) -> None:
    """From what pip says, packages are counted and named; what pip says is shown where it fails."""
    script = runpy.run_path(str(ROOT / "scripts" / "install.py"))
    packages = tmp_path / "some.txt"
    packages.write_text("# a list\none==1\ntwo==2 ; python_version > '3'\n\n-e ./three\n")
    assert script["counted"](["--no-deps", "-r", str(packages)]) == ("some", 2)
    told = script["Told"](2)
    for line in ("Collecting one==1 (from -r some.txt)", "  Downloading one-1-py3-none-any.whl (87 MB)"):
        told.take(line)
    assert told.line("some", 31.4) == "installing some: 1 of 2 packages, 31 s, one, 87 MB"
    told.take("Requirement already satisfied: two in ./lib")
    told.take("Installing collected packages: one")
    assert told.line("some", 40) == "installing some: 2 of 2 packages, 40 s, unpacking"
    written = io.StringIO()
    packages.write_text("no package is called so\n")
    assert script["install"](["-r", str(packages)], written) != 0
    assert "could not install some" in written.getvalue()
    assert "ERROR: Invalid requirement" in written.getvalue()
