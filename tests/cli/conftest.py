"""The console command, run as a person runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_megatrain

# The command runs in another folder and must still find the package that is under test here.
PACKAGE_HOME = Path(lightning_megatrain.__file__).resolve().parents[1]


@pytest.fixture
def megatrain(tmp_path):
    def run(*arguments, env=None):
        paths = os.pathsep.join(filter(None, [str(PACKAGE_HOME), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-m", "lightning_megatrain.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **(env or {})},
            capture_output=True,
            text=True,
            timeout=560,
            check=False,
        )

    return run
