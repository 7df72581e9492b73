"""Every notebook runs from its first cell to its last, and is saved with what a reader should see."""

import json
import re

import nbformat
import pytest
from run_notebooks import NOTEBOOKS, execute

WITH_PICTURES = ("2_", "3_", "5_")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def test_there_are_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_it_runs(self, path, tmp_path):
        execute(path, tmp_path)

    def test_it_is_saved_as_it_ran_from_top_to_bottom(self, path):
        cells = code_cells(path)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert outputs(path)

    def test_its_pictures_are_saved(self, path):
        pictures = [output for output in outputs(path) if "image/png" in output.get("data", {})]
        assert pictures or not path.name.startswith(WITH_PICTURES)

    def test_what_is_saved_has_no_warnings_and_no_paths_or_times_of_the_machine(self, path):
        for output in outputs(path):
            assert output.get("name") != "stderr", output.text
            data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
            text = output.get("text", "") + json.dumps(data)
            assert not re.search(r"/(?:home|root|tmp|opt|usr|var|mnt|work|Users)/|[A-Z]:\\\\", text), text
        assert not any("execution" in cell.metadata for cell in code_cells(path))
