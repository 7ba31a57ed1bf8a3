"""For the site: the page of modules, a table per room of each module and the first sentence of its docstring."""

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

LIBRARY: Final = Path(__file__).parent.parent / "steercap"
#: The room whose folders are rooms too.
LAB: Final = "lab"
START: Final = """# Modules

Every module of the library, room by room, with the first sentence of its docstring; a folder has that of its `__init__.py`.
[How it works](architecture.md#rooms) says what each room is for. The page is made from the source when the site is built.
"""
#: A full stop, and behind it the beginning of a sentence.
END: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
#: Code in a sentence.
CODE: Final = re.compile(r"`([^`]*)`")
HEAD: Final = "<tr><th>module</th><th>contents</th></tr>"


def on_files(files: Files, *, config: Any) -> Files:
    """mkdocs' event: one further page."""
    files.append(File.generated(config, "modules.md", content=page()))
    return files


def page() -> str:
    """The page in Markdown."""
    lines = [START]
    for room, modules in sorted(rooms().items()):
        # In HTML, since a table of Markdown has no id, by which assets/extra.css keeps names in one line.
        lines += [f"## {room}", "", f'<table id="modules-{room.replace("/", "-")}">', HEAD]
        lines += [f"<tr><td><code>{name_of(module)}</code></td><td>{summary(module)}</td></tr>" for module in modules]
        lines += ["</table>", ""]
    return "\n".join(lines)


def rooms() -> dict[str, list[Path]]:
    """The modules of each room, the room's own `__init__.py` first."""
    found: dict[str, list[Path]] = {}
    for module in _modules():
        found.setdefault(_room(module), []).append(module)
    return found


def _modules() -> Iterator[Path]:
    """Every module, a folder's own before those in it."""
    yield from sorted(LIBRARY.rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path.name))


def _room(module: Path) -> str:
    folders = module.relative_to(LIBRARY).parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == (LAB,) else 1]) or "steercap"


def name_of(module: Path) -> str:
    """What pages call a module: its path in the library, of `__init__.py` that of its folder."""
    path = module.relative_to(LIBRARY)
    if path.name != "__init__.py":
        return path.as_posix()
    return f"{path.parent.as_posix()}/" if path.parent.parts else path.name


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, in HTML."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    sentence = END.split(" ".join(docstring.split("\n\n")[0].split()))[0]
    return CODE.sub(r"<code>\1</code>", escape(sentence, quote=False))
