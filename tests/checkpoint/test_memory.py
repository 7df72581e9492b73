"""Resident memory while checkpoints are saved and loaded."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fitting import FORMATS
from probing import run_probe

from lightning_megatrain.checkpoint.lazy import PART_BYTES

PROBE = Path(__file__).with_name("memory_probe.py")
IN_HAND = 3 * PART_BYTES
"""While a part is loaded there are its bytes as they lie in the file, the tensor made of them, and its copy."""
SLACK = 16 * 2**20
"""What the C library and Python take for small things."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where large files are not kept for later inspection."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("precision", "save_async"), [("32-true", False), ("bf16-mixed", True)])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_saving_and_loading_a_gigabyte(folder: Path, checkpoint_format: str, precision: str, save_async: bool) -> None:
    flags = ["--save-async"] if save_async else []
    result = run_probe(PROBE, "once", folder, "--format", checkpoint_format, "--precision", precision, *flags)
    print(result)
    saved, loaded = result["saved"], result["loaded"]
    assert 12 * saved["parameters"] > 1e9
    assert saved["largest_tensor"] > 150e6  # more than a sharded save may take
    assert saved["rise"] < 100e6 + (saved["largest_tensor"] if checkpoint_format == "ckpt" else 0)

    assert loaded["rises"].keys() == {"load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"}
    # Weights and moments have their memory before they are loaded, so nothing belongs there on top.
    assert loaded["unit"] > IN_HAND + SLACK
    assert max(loaded["rises"].values()) < IN_HAND + SLACK
    # All together, from before the module was made: what training holds, and one unit that moves into the store.
    assert loaded["peak"] < loaded["planned"] + loaded["unit"] + IN_HAND + SLACK


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_twenty_saves_leave_resident_memory_flat(folder: Path, checkpoint_format: str) -> None:
    """One tensor of a block left behind by each save would be three times the limit."""
    for mode, resident in run_probe(PROBE, "often", folder, "--format", checkpoint_format).items():
        print(mode, [round(r / 1e6) for r in resident])
        assert len(resident) == 20
        assert resident[-1] - resident[2] < 20e6, (mode, resident)
