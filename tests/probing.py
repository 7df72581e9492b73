"""Running what measures memory, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_probe(*command: object) -> Any:
    """Run Python with this command line. Returns the value of the JSON in the last line that it prints."""
    environment = {
        **os.environ,
        # A real model's tensors are too large for the C library's heap and are given back when freed; a probe's are
        # not all, and what the heap happens to keep would drown the measurement.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
