"""The notebooks run from top to bottom, and are kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    # The kernel is a process of its own, and a notebook sets its devices itself.
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(FOLDER))
    shown = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    for cell in shown:
        for output in cell.outputs:
            assert output.get("name") != "stderr", output["text"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


def test_there_is_a_notebook_to_start_with():
    assert "01_quickstart" in [path.stem for path in NOTEBOOKS]
