"""The README says what is there."""

import inspect
import re
from pathlib import Path

import pytest

from lightning_megatrain import MegaTrainStrategy

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


@pytest.mark.parametrize(
    "command", ["python -m pip install . && megatrain train", "python -m pip install '.[test]' && pytest -n 2"]
)
def test_each_set_up_command_stands_on_a_line_of_its_own_once(command):
    assert README.splitlines().count(command) == 1


def test_the_argument_table_has_the_strategys_arguments_and_defaults():
    table = README[README.index("| argument |") :].split("\n\n")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE))
    parameters = inspect.signature(MegaTrainStrategy).parameters.values()
    plugins = {"accelerator", "checkpoint_io", "precision_plugin"}
    assert documented == {p.name: repr(p.default).replace("'", '"') for p in parameters if p.name not in plugins}
