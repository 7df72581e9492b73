"""`megatrain bench`: measures this machine, and training on it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

MEASUREMENTS = {
    "step": "training steps of a model, beside the same model in device memory",
    "link": "copies between host and device",
    "host": "the host's memory and its update",
}

USAGE = "\n".join(
    [
        "usage: megatrain bench <what> [output=json] [to=FILE] [key=value ...]",
        "",
        "what to measure:",
        *(f"  {name:<6}{purpose}" for name, purpose in MEASUREMENTS.items()),
        "",
        "`megatrain bench <what> --help` lists what it can override, with examples.",
    ]
)


def main(argv: Sequence[str]) -> int:
    """Run the command: what to measure, then Hydra overrides and flags.

    Returns:
        The exit status: 0, or 2 where what to measure is missing, unknown, or not there on this machine.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not argv or argv[0] not in MEASUREMENTS:
        problem = f"cannot measure '{argv[0]}'" if argv else "what to measure is missing"
        print(f"megatrain bench: {problem}\n{USAGE}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"lightning_megatrain.cli.bench_{argv[0]}")
    if argv[1:] and argv[1] in ("-h", "--help"):
        print(module.USAGE)
        return 0
    return module.main(argv[1:])
