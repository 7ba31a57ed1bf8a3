"""What a contributor meets first: a page, hooks and forms, which name things that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from docs_pages import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
#: Types of a form's parts, with the attributes that each may have, as GitHub's schema for issue forms lists them.
PARTS = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}


def test_the_page_is_one_page() -> None:
    """At most 600 words."""
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 600


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "changes/README.md", "docs/releasing.md", "README.md"])
def test_links_and_commands_lead_somewhere(name) -> None:
    """Files and headings that are linked, and every `make` target and script that the text names."""
    page = ROOT / name
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`\n]*`", "", text)) if "://" not in link]
    for link in links:
        path, _, heading = link.partition("#")
        assert (page.parent / path).exists(), link
        assert not heading or heading in headings((page.parent / path).read_text()), link
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) <= targets
    scripts = re.findall(r"\b((?:scripts|tests)/[\w/]+\.(?:py|txt))", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def headings(text: str) -> set[str]:
    """Anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_hooks_are_the_linters() -> None:
    """Each hook runs a tool of .venv that `make lint` runs, and fetches nothing; types are checked before a push alone."""
    linters = re.findall(r"\$\(BIN\)/(\S+(?: format --check| check)?)", (ROOT / "Makefile").read_text())
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in found["repos"]] == ["local"]
    hooks = found["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    commands = [hook["entry"].removesuffix(" --force-exclude") for hook in hooks]
    assert commands == [".venv/bin/ruff format --check", ".venv/bin/ruff check", ".venv/bin/mypy"]
    assert {command.removeprefix(".venv/bin/") for command in commands} <= set(linters)
    assert found["default_stages"] == found["default_install_hook_types"] == ["pre-commit"]
    assert [hook["id"] for hook in hooks if hook.get("stages") == ["pre-push"]] == ["mypy"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_are_those_that_github_reads(path: Path) -> None:
    """Keys that its schema knows; ids and labels that are there once; something to fill in."""
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "title", "labels", "body"}
    parts = form["body"]
    for part in parts:
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert set(part["attributes"]) <= PARTS[part["type"]]
        assert set(part.get("validations", {})) <= {"required"}
    asked = [part for part in parts if part["type"] != "markdown"]
    for names in ([part["id"] for part in asked], [part["attributes"]["label"] for part in asked]):
        assert len(names) == len(set(names)) > 0
    assert all(re.fullmatch(r"[\w-]+", part["id"]) for part in asked)
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_the_form_for_wrong_results_asks_for_what_is_needed() -> None:
    """Versions, model, spec, result, and by which reference it is wrong: none can be left out."""
    assert [path.stem for path in FORMS] == ["crash", "idea", "wrong_result"]
    parts = {part.get("id"): part for part in yaml.safe_load(FORMS[-1].read_text())["body"]}
    for name in ("doctor", "model", "spec", "result", "expected"):
        assert parts[name]["validations"]["required"]
    assert "`steercap doctor`" in parts["doctor"]["attributes"]["description"]
    assert "reference" in parts["expected"]["attributes"]["label"]
