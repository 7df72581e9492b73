"""A measurement's result: what it was measured on, and where it goes."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console, RenderableType

import lightning_megatrain
from lightning_megatrain.cli.app import UserError, require_writable
from lightning_megatrain.update.threads import plan_threads

Output = Literal["table", "json"]

_PACKAGES = ("lightning-megatrain", "torch", "lightning", "transformers")


def check_output(cfg: DictConfig) -> None:
    """Refuse, before anything is measured, a result that could not be shown or kept.

    Raises:
        UserError: if `cfg.output` is neither "table" nor "json", or `cfg.to` cannot be written.
    """
    if cfg.output not in ("table", "json"):
        raise UserError(f"output={cfg.output!r} is not valid: it must be table or json.")
    if cfg.to is None:
        return
    if Path(cfg.to).exists():
        raise UserError(f"to={cfg.to} exists already; set another file, or remove that one.")
    if not Path(cfg.to).absolute().parent.is_dir():
        raise UserError(f"to={cfg.to} is in a folder that does not exist; make it, or set another file.")
    require_writable("to", cfg.to)


def finish(cfg: DictConfig, result: Mapping[str, Any], table: Iterable[RenderableType]) -> None:
    """Print a result as `cfg.output` says, and write it to `cfg.to` as one JSON object, if that is set."""
    if cfg.to is not None:
        Path(cfg.to).write_text(json.dumps(result, indent=1) + "\n")
    if cfg.output == "json":
        print(json.dumps(result))
        return
    # Wide where the output goes to a file, where rich assumes 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160)
    for part in table:
        console.print(part)


def _version(package: str) -> str | None:
    """None for one that is imported from a folder that nothing installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def circumstances(
    command: str, device: torch.device, *, arguments: Sequence[str] | None = None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """What has to stand beside every figure: command, hardware, versions, and the commit where it is known.

    Args:
        command: without its arguments.
        device: what computed.
        arguments: of the command; None for the overrides that Hydra was given.
        packages: others whose versions matter.
    """
    hardware: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": plan_threads().topology.usable_cores,
        "host_memory_bytes": psutil.virtual_memory().total,
        "device": "cpu",
    }
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package.replace("-", "_"): _version(package) for package in (*_PACKAGES, *packages)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"device": properties.name, "device_memory_bytes": properties.total_memory}
        versions["cuda"] = torch.version.cuda
    return {
        "command": " ".join([command, *(HydraConfig.get().overrides.task if arguments is None else arguments)]),
        "hardware": hardware,
        "versions": versions,
        "commit": _commit(Path(lightning_megatrain.__file__).resolve().parents[1]),
    }


def _cpu() -> str:
    """Name of the processor, as the kernel has it."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _commit(root: Path) -> str | None:
    """Commit of the source tree that runs, with "-dirty" if it was changed since; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
