"""Runs the notebooks of `notebooks/` and stores their outputs in them.

python scripts/notebooks.py [NAME ...]
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
_QUIET = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
    "DS_ACCELERATOR": "cpu",
}


def run_notebook(path: Path, temporary: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs, without warnings and progress bars.

    Its files are made below `temporary`. Raises nbclient's CellExecutionError for the first cell
    that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    paths = {"PATH": programs, "PYTHONPATH": modules, "TMPDIR": str(temporary)}
    folder = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook, timeout=300, resources=folder, record_timing=False, coalesce_streams=True
    )
    client.execute(env={**os.environ, **_QUIET, **paths})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        notebook_path = FOLDER / f"{name}.ipynb"
        with TemporaryDirectory() as folder:
            nbformat.write(run_notebook(notebook_path, Path(folder)), notebook_path)
        print(f"{notebook_path}: written")
