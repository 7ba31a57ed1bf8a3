"""For the site: the notebooks as pages, with the outputs that they were saved with."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NOTE = """!!! note
    This page was made from `notebooks/{name}`. To run it yourself, in the clone's folder:
    `pip install -e ".[notebooks]"`, then `jupyter lab notebooks/{name}`.

"""


def on_files(files: Files, *, config: Any) -> Files:
    """mkdocs' event: further files of the site."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        body, resources = MarkdownExporter().from_filename(str(path))
        body = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", body.replace("](../docs/", "](../"))  # the site's own pages
        title, _, rest = body.lstrip().partition("\n")
        page = f"{title}\n\n{NOTE.format(name=path.name)}{rest}"
        for name, content in resources["outputs"].items():
            page = page.replace(f"]({name})", f"]({path.stem}_{name})")
            files.append(File.generated(config, f"notebooks/{path.stem}_{name}", content=content))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files
