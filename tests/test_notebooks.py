"""Every notebook runs from top to bottom in a fresh kernel, and draws what it promises."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from preloaded import PRELOADED

#: What a notebook does less of here, by its name: text of its code, and what stands in its place. Its outputs are of all.
SMALLER = {"09_personas_at_scale": ("n_questions=6", "n_questions=3")}
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(1200)  # some take three minutes on two idle cores, and CI's may be a third as fast
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
async def test_a_notebook_runs(path: Path, monkeypatch) -> None:
    """No cell fails; the cells that draw give pictures. The first has processes that are started as a user's are."""
    if path != NOTEBOOKS[0]:
        monkeypatch.setattr(local_provisioner, "launch_kernel", PRELOADED.launch_kernel)
    notebook = nbformat.read(path, as_version=4)
    if path.stem in SMALLER:
        whole, less = SMALLER[path.stem]
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and whole in cell.source]
        cell.source = cell.source.replace(whole, less)
    at = {"metadata": {"path": path.parent}}
    client = NotebookClient(notebook, timeout=900, startup_timeout=300, kernel_name="python3", resources=at)
    await client.async_execute()
    drawing = [cell for cell in notebook.cells if cell.cell_type == "code" and "plt.show()" in cell.source]
    assert drawing
    for cell in drawing:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)
