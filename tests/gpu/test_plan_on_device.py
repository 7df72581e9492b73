"""The plan's device memory against that of the very step, and its clock."""

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.utils.data import DataLoader

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.planner import Planner

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 50_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def planned():
    def plan(*overrides):
        shape = [f"model.config.{key}={value}" for key, value in SHAPE.items()]
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose("plan", overrides=["data.seq_len=2048", "data.batch_size=8", *shape, *overrides])
        return cfg, Planner(cfg)

    return plan


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("strategy.microbatch=2",),
        ("trainer.gradient_clip_val=1.0",),
        ("model.config.tie_word_embeddings=true",),
        ("precision=bf16_true", "strategy.microbatch=4"),
        ("precision=fp32", "strategy.microbatch=4"),
    ],
    ids=lambda o: "-".join(p.split("=")[0].split(".")[-1] + "_" + p.split("=")[1] for p in o) or "plain",
)
def test_peak_device_memory_is_within_five_percent_and_never_under(planned, overrides):
    given = overrides if any("precision" in o for o in overrides) else (*overrides, "precision=bf16_mixed")
    cfg, planner = planned(*given)
    expected = planner.device_peak(planner.schedule()[0], cfg.strategy.microbatch)
    module = instantiate(cfg.model)
    batch = {"input_ids": torch.randint(0, SHAPE["vocab_size"], (8, 2048))}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=3,
        precision=cfg.precision.lightning,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        strategy=MegaTrainStrategy(microbatch=cfg.strategy.microbatch, recompute="always", device_update="never"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * 3, batch_size=None))
    measured = torch.cuda.max_memory_allocated() - before
    assert measured <= expected <= 1.05 * measured


def test_a_step_of_this_model_is_timed(planned):
    _, planner = planned("precision=bf16_mixed")
    forward, backward = planner.timed  # every unit is recomputed, and the loss makes its gradients in the forward
    products = 8 * sum(g.layout.numel for g in planner.groups if not g.resident) * 8 * 2048
    assert forward > 0
    assert backward > 0
    assert products / 1e15 < forward + backward < 60  # no GPU of today does more than 1e15 a second in bf16
    assert planner.result()["step_s"] >= backward
