"""`megatrain bench link`: how fast this machine copies between host and device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch
from omegaconf import DictConfig
from rich.table import Table

from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.bench_result import check_output, circumstances, finish
from lightning_megatrain.cli.values import check_values
from lightning_megatrain.memory.host import format_bytes, parse_bytes
from lightning_megatrain.stream.bench import LinkRates, bench_link

USAGE = """\
usage: megatrain bench link [output=json] [to=FILE] [smallest=SIZE] [largest=SIZE]

Copies between host and GPU, alone and both ways at once, from registered (pinned) memory as training has it, and from
ordinary (pageable) memory. Needs a CUDA device, and twice the largest size of host and of device memory.

  smallest=SIZE     of one copy; 1MiB by default
  largest=SIZE      1GiB by default; each size is four times the one before

examples:
  megatrain bench link
  megatrain bench link largest=256MiB output=json to=link.json"""

_HEADINGS = {
    "to_device": "to device",
    "to_host": "to host",
    "both": "both at once, in total",
    "pageable_to_device": "pageable, to device",
    "pageable_to_host": "pageable, to host",
}


def main(argv: Sequence[str]) -> int:
    """Run the measurement with Hydra overrides and flags.

    Returns:
        The exit status: 0, or 2 where there is no CUDA device.
    """
    if not torch.cuda.is_available():
        print(
            "megatrain bench link: a CUDA device is needed, whose link is measured, and torch finds none here; run it "
            "on a machine with an NVIDIA GPU and a torch built for CUDA.",
            file=sys.stderr,
        )
        return 2
    run_app(run, command="bench link", config_name="bench_link", argv=argv)
    return 0


def run(cfg: DictConfig) -> None:
    """Measure as `cfg`, the composed `bench_link.yaml`, says, and report the rates.

    Raises:
        UserError: if a value is not valid.
    """
    check_values(cfg)
    check_output(cfg)
    device = torch.device("cuda", 0)
    rates = bench_link(device, sizes_between(cfg.smallest, cfg.largest))
    result = {"rates": [dataclasses.asdict(rate) for rate in rates], **circumstances("megatrain bench link", device)}
    finish(cfg, result, [_table(rates)])


def sizes_between(smallest: str, largest: str) -> list[int]:
    """Sizes in bytes, each four times the one before.

    Raises:
        UserError: if the first is not smaller than the last, or nothing.
        ValueError: if a text is no size.
    """
    first, last = parse_bytes(smallest), parse_bytes(largest)
    if not 0 < first <= last:
        raise UserError(f"smallest={smallest} and largest={largest} are no range; set smallest to the smaller of two.")
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, 4 * sizes[-1]))
    return sizes


def _table(rates: Sequence[LinkRates]) -> Table:
    table = Table(title="megatrain bench link, GB/s", title_justify="left")
    for heading in ("bytes of a copy", *_HEADINGS.values()):
        table.add_column(heading, justify="right")
    for rate in rates:
        row = dataclasses.asdict(rate)
        table.add_row(format_bytes(rate.nbytes), *(f"{row[f'{key}_gb_s']:.1f}" for key in _HEADINGS))
    return table
