"""The notebook runs from its first cell to its last, on a CPU and without the checkpoint that it looks for."""

import os
import re
from pathlib import Path

import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/notebooks/longhorn.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])))
        patch.setenv("HF_HYBRID_SSM_CHECKPOINT", str(folder / "not there"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
        client.execute()
    return notebook, folder


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_it_draws_and_prints(executed):
    notebook, _ = executed
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    text = printed(notebook)
    assert "LonghornForCausalLM" in text and "trainable params" in text


def test_fine_tuning_lowers_the_loss_and_changes_the_text(executed):
    notebook, folder = executed
    text = printed(notebook)
    before, after = map(float, re.search(r"loss: ([\d.]+) to ([\d.]+)", text).groups())
    assert after < 0.5 * before
    before, after = re.search(r"before: (.*)\nafter: (.*)\n", text).groups()
    assert "than" in after and before != after
    assert (folder / "fine-tuned/modeling_longhorn.py").is_file()
