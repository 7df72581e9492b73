"""Counting tokens and timing them."""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks import throughput as throughput_module
from lightning_megatrain.callbacks.throughput import Throughput, count_tokens


def test_padding_is_not_counted():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    assert count_tokens({"input_ids": ids}) == 10
    assert count_tokens({"input_ids": ids, "attention_mask": mask}) == 7
    assert count_tokens({"input_ids": ids, "attention_mask": mask, "num_tokens": 3}) == 3
    assert count_tokens(ids) == 0


def test_a_mask_on_a_device_is_not_read_and_says_so():
    batch = {"input_ids": torch.zeros(2, 5), "attention_mask": torch.zeros(2, 5, device="meta")}
    with pytest.warns(UserWarning, match="counts padding"):
        assert count_tokens(batch) == 10


class Tokens(BoringModel):
    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 32)).sum()

    def validation_step(self, batch, batch_idx):
        self.seconds["now"] += 100.0


def test_rates_leave_out_warmup_and_validation(monkeypatch):
    seconds = {"now": 0.0}
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: seconds["now"])

    class Tick(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seconds["now"] += 30.0 if batch_idx == 0 else 0.5

    module = Tokens()
    module.seconds = seconds
    callback = Throughput(warmup_steps=1, window=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[Tick(), callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader([{"input_ids": torch.zeros(4)} for _ in range(12)], batch_size=2)
    trainer.fit(module, data, DataLoader([torch.zeros(1)]))
    assert callback.tokens_seen == 48
    assert callback.mean_tokens_per_s == pytest.approx(16.0)  # 8 tokens every half second
    assert float(trainer.callback_metrics["tokens_per_s"]) == pytest.approx(16.0)
    resumed = Throughput()
    resumed.load_state_dict(callback.state_dict())
    assert resumed.tokens_seen == 48


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="window=0"):
        Throughput(window=0)
