"""Peak resident memory of a whole fit, set-up and teardown included."""

from pathlib import Path

import pytest
from probing import run_probe

PROBE = Path(__file__).parents[1] / "rss_probe.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_peak_is_twelve_bytes_per_parameter_and_the_rings(precision: str) -> None:
    """On the CPU the device's slots and gradient buffers are host memory too, and are counted by the plan."""
    result = run_probe(PROBE, "--width", "512", "--layers", "48", "--precision", precision)
    rings = result["host"]["slabs"] + sum(result["device"].values())
    unit_gradients = result["host"]["slabs"] // 3  # autograd's own, before they are packed
    allowed = 12.5 * result["parameters"] + rings + unit_gradients + 30 * 2**20
    assert result["parameters"] > 100e6
    assert result["peak_bytes"] <= allowed, (result["peak_bytes"] / result["parameters"], result)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_peak_of_a_billion_parameters_on_the_gpu() -> None:
    result = run_probe(PROBE, "--device", "gpu", "--width", "2048", "--layers", "32", "--host-memory", "100GiB")
    assert result["parameters"] > 1e9
    extra = result["peak_bytes"] - result["host"]["slabs"]
    print(f"{extra / result['parameters']:.2f} bytes per parameter beyond slabs: {result}")
    assert extra <= 12.5 * result["parameters"]
