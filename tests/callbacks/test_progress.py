"""What the progress bar writes."""

import pytest
from small_model import train

from lightning_megatrain.callbacks.monitor import Monitor
from lightning_megatrain.callbacks.progress import ProgressBar


def test_rates_are_written_for_people(monkeypatch):
    bar = ProgressBar()
    metrics = {"train_loss": 2.5, "tokens_per_s": 12_345.6, "model_tflops": 430.12, "waited": 0.0349}
    monkeypatch.setattr("lightning.pytorch.callbacks.TQDMProgressBar.get_metrics", lambda *args: dict(metrics))
    assert bar.get_metrics(None, None) == {
        "train_loss": 2.5,
        "tokens_per_s": "12,346",
        "TFLOP/s": "430.1",
        "waited": "3%",
    }


def test_a_run_with_a_monitor_shows_them(capsys):
    monitor = Monitor(1, every_n_steps=1, flops_per_token=1e9)
    train([monitor, ProgressBar(refresh_rate=1)], steps=4, enable_progress_bar=True)
    line = capsys.readouterr().out.replace("\r", "\n").strip().rpartition("\n")[2]
    for part in ("tokens_per_s=", "TFLOP/s=", "waited=0%"):
        assert part in line
    assert "model_tflops" not in line


@pytest.mark.parametrize("name", ["TFLOP/s", "waited"])
def test_without_a_monitor_they_are_left_out(name, capsys):
    train([ProgressBar(refresh_rate=1)], steps=2, enable_progress_bar=True)
    assert f"{name}=" not in capsys.readouterr().out
