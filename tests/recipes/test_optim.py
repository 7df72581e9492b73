"""Learning-rate schedule and decay groups."""

import pytest
import torch
from torch import nn

from lightning_megatrain.recipes.optim import cosine_with_warmup, decay_groups


def test_schedule_warms_up_falls_and_stays():
    factor = cosine_with_warmup(warmup_steps=4, total_steps=14, min_ratio=0.1)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(9) == pytest.approx(0.55)
    assert factor(14) == factor(1000) == pytest.approx(0.1)


def test_a_run_shorter_than_its_warmup_only_warms_up():
    factor = cosine_with_warmup(warmup_steps=10, total_steps=5, min_ratio=0.0)
    assert [factor(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_out_of_range_is_refused():
    with pytest.raises(ValueError, match="min_lr_ratio"):
        cosine_with_warmup(warmup_steps=0, total_steps=1, min_ratio=2.0)
    with pytest.raises(ValueError, match="negative"):
        cosine_with_warmup(warmup_steps=-1, total_steps=1, min_ratio=0.0)


def test_groups_hold_each_trainable_parameter_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
    model["b"].weight = model["a"].weight
    model["norm"].bias.requires_grad_(False)
    decayed, rest = decay_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [torch.Size([3, 3])]
    assert len(rest["params"]) == 3
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def test_an_empty_group_is_left_out():
    assert len(decay_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
