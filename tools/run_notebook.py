"""Runs a notebook and keeps its outputs, without progress bars and warnings, with what they depend on.

    HF_HYBRID_SSM_SMOLLM2=FILE.gguf python -m tools.run_notebook docs/notebooks/upcycling.ipynb

The line that begins with "Outputs:" is written anew: processor, threads, versions, commit and minutes.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^Outputs: .*$", re.MULTILINE)


def executed(path: Path, folder: Path, timeout: int = 3600) -> Any:
    """The notebook with its outputs, run in that folder with this repository's package.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    options: dict[str, Any] = {"timeout": timeout, "resources": {"metadata": {"path": str(folder)}}}
    nbclient.NotebookClient(notebook, **options).execute(env=environment)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    sys.path.insert(0, str(ROOT / "recipes"))
    from _lib.provenance import COMMIT, machine

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(path, Path(folder))
    found, minutes = machine(), (time.perf_counter() - start) / 60
    made_by = (
        f"Outputs: `python -m tools.run_notebook {path.as_posix()}`: {found['processor']}, "
        f"{found['threads']} threads, Python {found['python']}, torch {found['torch']}, "
        f"transformers {found['transformers']}; commit {COMMIT}; {minutes:.1f} minutes."
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
        if cell.cell_type == "markdown":
            cell.source = LINE.sub(made_by, cell.source)
        elif cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
