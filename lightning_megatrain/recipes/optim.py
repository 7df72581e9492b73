"""AdamW for language models: which parameters decay, and how the learning rate moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of `module` into two AdamW groups.

    Matrices decay; vectors (norm gains, biases) do not, since shrinking them changes a layer's scale and not its
    complexity. Tied weights are listed once, frozen parameters not at all, and an empty group is left out.

    Args:
        module: the model.
        weight_decay: coefficient of the first group.

    Returns:
        Parameter groups as `torch.optim.AdamW` takes them.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_with_warmup(*, warmup_steps: int, total_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Return the factor by which `LambdaLR` multiplies the learning rate at each optimizer step.

    With w = warmup_steps, n = total_steps and m = min_ratio, step t (from 0) gets (t + 1) / w while t < w, and then
    m + (1 - m) (1 + cos(pi (t - w) / (n - w))) / 2, which stays at m from t = n on. The first step is never zero.

    Args:
        warmup_steps: optimizer steps of linear warm-up; 0 starts at the full rate.
        total_steps: optimizer steps of the whole run, warm-up included.
        min_ratio: final factor, between 0 and 1.

    Raises:
        ValueError: if a step count is negative or `min_ratio` lies outside [0, 1].
    """
    if warmup_steps < 0 or total_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} and total_steps={total_steps} must not be negative.")
    if not 0.0 <= min_ratio <= 1.0:
        raise ValueError(f"min_lr_ratio={min_ratio} must lie between 0 and 1.")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
