"""Counts what a reader of the library has to get through: entries, rooms, modules, lines, imports, names, docstrings.

    python scripts/house.py            # a table of today's figures
    python scripts/house.py --hold     # writes them as the ceilings that a test holds, into tests/house.json

Figures may fall and are then written down anew; none of those held may rise.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parent.parent
LIBRARY: Final = ROOT / "steercap"
HELD: Final = ROOT / "tests" / "house.json"
#: Entries of the folder that every Python package of this kind has.
UNCOUNTED: Final = {"__main__.py", "py.typed", "__pycache__"}
#: Figures that say something and are held to nothing.
FREE: Final = {"lines of the median module", "lines"}
#: Openings of docstrings that make a reader guess what the thing is.
RIDDLE: Final = re.compile(r"(What|Which|How|Where|Whether|Whose|Who|Why|Of)\b")


def figures() -> dict[str, int]:
    """Count everything, by the name of the figure."""
    modules = sorted(LIBRARY.rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    trees = [ast.parse(path.read_text()) for path in modules]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))]
    return {
        "entries": sum(path.name not in UNCOUNTED for path in LIBRARY.iterdir()),
        "folders": len({path.parent for path in modules}),
        "imports between rooms": _between_rooms(),
        "modules": len(modules),
        "modules under 30 lines": sum(count < 30 for count in lines.values()),
        "modules over 300 lines": sum(count > 300 for count in lines.values()),
        "lines of the median module": int(statistics.median(lines.values())),
        "lines of the longest module": max(lines.values()),
        "lines": sum(lines.values()),
        "lines of the median function": int(statistics.median(functions)),
        "lines of the ninth function of ten": functions[len(functions) * 9 // 10],
        "lines of the longest function": functions[-1],
        "class names used more than once": sum(count > 1 for count in classes.values()),
        "docstrings that open with a question": sum(bool(RIDDLE.match(text)) for text in docstrings),
    }


def _between_rooms() -> int:
    """Pairs of rooms of which one imports the other; each room of the lab counts by itself."""
    graph = grimp.build_graph("steercap", cache_dir=None)
    pairs = {
        (_room(importer), _room(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    }
    return sum(importer != imported for importer, imported in pairs)


def _room(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["lab"] else 1])


def main() -> None:
    """Print the figures, or write them down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hold", action="store_true", help="write them as the ceilings of tests/house.json")
    counted = figures()
    if parser.parse_args().hold:
        HELD.write_text(
            json.dumps({name: counted[name] for name in counted.keys() - FREE}, indent=2, sort_keys=True) + "\n"
        )
    for name, figure in counted.items():
        print(f"{name:40}{figure:>8,}")


if __name__ == "__main__":
    main()
