"""The console command's own part: usage and dispatch."""

import pytest

from lightning_megatrain.cli.main import COMMANDS, main


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(("argv", "problem"), [([], "missing"), (["frobnicate"], "unknown command 'frobnicate'")])
def test_no_known_command_is_an_error_with_usage(capsys, argv, problem):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert "usage: megatrain" in captured.err
    assert captured.out == ""
