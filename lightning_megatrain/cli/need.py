"""Refuses a training that the host cannot hold, before any weight is made."""

from __future__ import annotations

from typing import Any

import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_megatrain.cli.app import UserError
from lightning_megatrain.cli.planner import FORMATS
from lightning_megatrain.memory.host import available_host_bytes, format_apart, parse_bytes
from lightning_megatrain.memory.plan import make_plan
from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.random_weights import weight_bytes
from lightning_megatrain.stream.discovery import find_units, make_groups
from lightning_megatrain.stream.gradients import GRADIENT_BUFFERS
from lightning_megatrain.update.gradients import SLABS

_REMEDY = "set a smaller model=..., or ask `megatrain plan` what would fit"


def hollow_model(cfg: DictConfig) -> CausalLM | None:
    """The model of a config without its memory; None for a module of the user's own, which may need its values."""
    target = get_object(cfg.model["_target_"])
    if not (isinstance(target, type) and issubclass(target, CausalLM)):
        return None
    optim: dict[str, Any] = OmegaConf.to_container(cfg.optim, resolve=True)  # type: ignore[assignment]
    with torch.device("meta"):
        return instantiate(cfg.model, **optim)


def require_host_memory(module: nn.Module, cfg: DictConfig, *, clips: bool, accumulates: bool) -> None:
    """Refuse a model whose training needs more host memory than there is.

    Args:
        module: the model; its parameters may be without memory.
        cfg: a config with the groups `strategy` and `precision`.
        clips: whether gradients are clipped.
        accumulates: whether those of several batches are summed.

    Raises:
        RuntimeError: needed, available, the largest items, and what to set.
    """
    settings: dict[str, Any] = OmegaConf.to_object(cfg.strategy)  # type: ignore[assignment]
    if "prefetch" not in settings:  # Lightning's own strategy begins with fp32 weights on the host
        needed, available = weight_bytes(module, torch.float32), available_host_bytes()
        if needed > available:
            need, free = format_apart(needed, available)
            raise UserError(f"The weights alone need {need} of host memory, and {free} are available; {_REMEDY}.")
        return
    store_format = FORMATS.get(cfg.precision.lightning)
    if store_format is None:
        return  # which the strategy refuses
    units = find_units(module, settings["units"])
    all_at_once = settings["update"] in ("next_forward", "blocking") or clips or accumulates
    wide = accumulates and settings["accumulate_dtype"] == "float32" and store_format is not StoreFormat.FP32
    plan = make_plan(
        make_groups(module, units),
        store_format,
        training=True,
        moment_bytes=8 if settings["moments_dtype"] == "float32" else 4,
        gradients_coexist=all_at_once,
        gradient_bytes=4 if wide else None,
        slots=min(settings["prefetch"] + 1, len(units)),
        gradient_buffers=GRADIENT_BUFFERS,
        slabs=SLABS,
        accumulates=accumulates,
    )
    limit = settings["host_memory"]
    plan.require_host(available_host_bytes() if limit == "auto" else parse_bytes(limit), _REMEDY)
