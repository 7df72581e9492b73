"""Run the notebooks as a person would, cell by cell in a fresh kernel.

    python tests/notebooks/run_notebooks.py [1_first_run ...]

runs all of them, or those of these names, and saves their outputs.
"""

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

import lightning_megatrain

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# A kernel in another folder must still find the package that is under test here.
PACKAGE_HOME = Path(lightning_megatrain.__file__).resolve().parents[1]


def execute(path: Path, folder: Path, *, timeout: int | None = 120) -> NotebookNode:
    """Run a notebook.

    Args:
        path: of the notebook, which stays as it is.
        folder: where its cells run and write.
        timeout: seconds that a cell may take; None for no limit.

    Returns:
        The notebook with the outputs of this run.

    Raises:
        CellExecutionError: at the first cell that raises.
        CellTimeoutError: a cell takes too long.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = os.pathsep.join(filter(None, [str(PACKAGE_HOME), os.environ.get("PYTHONPATH")]))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,  # saved files would differ in every run
        resources={"metadata": {"path": str(folder)}},
    )
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths}):
        return client.execute()


def main(names: list[str]) -> None:
    """Run and save the notebooks of these names, or all."""
    for path in [FOLDER / f"{name}.ipynb" for name in names] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder), timeout=None), path)
        print(f"saved {path.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
