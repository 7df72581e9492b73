"""The `megatrain` command: finds the subcommand and hands it the rest of the line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a language model; without overrides a small one on Python's standard library",
    "plan": "say what a training needs and how fast it would go, on this machine or another; allocates nothing",
    "bench": "measure this machine: training steps, the link, or the host's memory and update",
    "export": "convert a checkpoint: to one file or a sharded folder, its weights to safetensors or huggingface",
}

USAGE = "\n".join(
    [
        "usage: megatrain <command> [key=value ...]",
        "",
        "commands:",
        *(f"  {name:<8}{purpose}" for name, purpose in COMMANDS.items()),
        "",
        "`megatrain <command> --help` lists what a command can override.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the console entry point.

    Args:
        argv: command and overrides; by default those of the process.

    Returns:
        The exit status: 0 after a run or `--help`, 2 where the command is missing or unknown. A command that fails
        exits by itself, with 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else None
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        problem = "a command is missing" if command is None else f"unknown command '{command}'"
        print(f"megatrain: {problem}\n{USAGE}", file=sys.stderr)
        return 2
    # Imported late: usage and typing errors should not wait for torch.
    module = importlib.import_module(f"lightning_megatrain.cli.{command}")
    return module.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
