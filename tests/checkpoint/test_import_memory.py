"""Resident memory while a pretrained model moves from its files into the store."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from probing import run_probe

PROBE = Path(__file__).with_name("import_probe.py")
SLACK = 64 * 2**20
"""A part that is converted, and what the C library and Python take for small things."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where large files are not kept for later inspection."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("store_format", ["split", "bf16"])
def test_a_gigabyte_is_in_memory_once(folder: Path, store_format: str) -> None:
    result = run_probe(PROBE, folder, "--format", store_format)
    print(result)
    assert result["file"] > 0.95e9
    assert result["store"] == pytest.approx({"split": 2, "bf16": 1}[store_format] * result["file"], rel=0.01)
    assert result["rise"] < 1.05 * result["store"] + result["largest"]
    # More exactly, nothing of the files is there beside the store.
    assert result["largest"] > SLACK
    assert result["rise"] < result["store"] + SLACK
