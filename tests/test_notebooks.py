"""The notebooks run top to bottom as a reader runs them: in a kernel of their own, in their folder, without network."""

import os
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

from fp4jax.interop import find_smollm2

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("[0-9]*.py"))
SECONDS_PER_CELL = 300  # what hangs should fail; slow machines should not

# jupyter_client and its event loop warn in this process about themselves. What a notebook warns of stays in its kernel.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(script: Path) -> str:
    """Executes a script as a notebook and returns all it printed. A cell that raises raises here."""
    notebook = jupytext.read(script)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute()
    if folder := os.environ.get("FP4JAX_NOTEBOOKS_OUT"):
        nbformat.write(notebook, Path(folder) / f"{script.stem}.ipynb")
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook draws nothing"
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel inherits the environment: one CPU device, not the eight virtual ones of this session; no fetching."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("FP4JAX_FETCH", "0")


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_runs_without_network(script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no weights are in the cache: an empty cache stands for it."""
    monkeypatch.delenv("FP4JAX_SMOLLM2", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = run(script)
    assert ("SmolLM2 is not on this machine" in printed) == script.stem.startswith("02")


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.skipif(find_smollm2() is None, reason="SmolLM2 is not on this machine")
def test_outliers_of_the_real_model() -> None:
    assert "activations of SmolLM2" in run(NOTEBOOKS / "02_outliers.py")


def test_half_of_a_notebook_is_prose() -> None:
    for script in SCRIPTS:
        cells = jupytext.read(script).cells
        words = {
            kind: sum(len(c.source.split()) for c in cells if c.cell_type == kind) for kind in ("markdown", "code")
        }
        assert words["markdown"] >= 0.8 * words["code"], (script.name, words)
