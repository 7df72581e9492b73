"""The steps whose speed is promised, each beside the same model wholly in device memory, in one process each.

    python tests/benchmarks/speed.py FOLDER [ROW ...]

Writes FOLDER/ROW.json for each row (all of them unless some are named) and prints what was reached beside what is
wanted. A row takes some two minutes on an H200: registering 100 GiB, compiling twice, and the steps.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMPILED = ("precision=bf16_mixed", "seq_len=2048", "strategy.compile=true", "ceiling=true", "warmup=8", "steps=3")


@dataclass(frozen=True)
class Row:
    """A step, and the share of the ceiling's tokens per second that it must reach; None where there is no ceiling."""

    overrides: tuple[str, ...]
    least: float | None


def _row(model: str, rows: int, least: float | None, *more: str) -> Row:
    given = (f"model={model}", f"rows={rows}", "strategy.microbatch=8", *COMPILED, *more)
    named = dict(override.split("=", 1) for override in given)  # the last of equal names counts
    return Row(tuple(f"{name}={value}" for name, value in named.items()), least)


def _depth(blocks: int) -> Row:
    """So many blocks of one width, 14.8 billion parameters with 48, streamed alike: nothing is spent on speed."""
    fixed = ("ceiling=false", "warmup=2", "strategy.recompute=always", "strategy.device_update=never")
    return _row("qwen2_5_14b", 16, None, f"model.config.num_hidden_layers={blocks}", *fixed)


ROWS = {
    "7b_32k": _row("qwen2_5_7b", 16, 1.12),
    "7b_32k_clip": _row("qwen2_5_7b", 16, 1.05, "clip=1.0"),
    "7b_32k_24gib": _row("qwen2_5_7b", 16, 0.93, "strategy.device_memory=24GiB"),
    "7b_8k_clip": _row("qwen2_5_7b", 4, 0.75, "clip=1.0"),
    "7b_64k_32gib": _row("qwen2_5_7b", 32, 0.97, "strategy.device_memory=32GiB"),
    "14b_32k": _row("qwen2_5_14b", 16, 1.0),
    "14b_32k_24gib": _row("qwen2_5_14b", 16, 0.9, "strategy.microbatch=4", "strategy.device_memory=24GiB"),
    "depth_8": _depth(8),
    "depth_24": _depth(24),
    "depth_48": _depth(48),
}
"""Those of 14.8 billion parameters need 256 GiB of host memory."""

SPREAD = 0.1
"""How far the model TFLOP/s of different depths may be apart, as a part of the highest."""


def main() -> int:
    """Measure; 1 if a row failed or was slower than wanted."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    good, depths = True, []
    for name in names:
        row, result = ROWS[name], folder / f"{name}.json"
        result.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "lightning_megatrain.cli.main",
            "bench",
            "step",
            *row.overrides,
            f"to={result}",
        ]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not result.exists():
            print(f"{name}: failed", flush=True)
            good = False
            continue
        [size] = json.loads(result.read_text())["sizes"]
        reached = size.get("of_ceiling")
        share = "no ceiling" if reached is None else f"{reached:.3f} of the ceiling"
        if row.least is None:
            depths.append(size["model_tflops"])
        else:
            good &= reached is not None and reached >= row.least
            share += f", wanted {row.least}"
        waits = ", ".join(f"{cause} {seconds * 1e3:.0f} ms" for cause, seconds in size["waits_s"].items())
        print(
            f"{name}: {share}; {size['step_s']:.3f} s, {size['model_tflops']:.0f} TFLOP/s, "
            f"{(size['peak_device_allocated_bytes'] or 0) / 2**30:.1f} GiB, {size['kept_graphs']} graphs kept, "
            f"{size['device_groups']} groups on the device; waited for {waits or 'nothing'}",
            flush=True,
        )
    if depths:
        spread = 1 - min(depths) / max(depths)
        good &= spread <= SPREAD
        print(f"model TFLOP/s of different depths: {spread:.3f} apart, wanted {SPREAD} at most")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
