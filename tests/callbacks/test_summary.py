"""The tables at both ends of a fit."""

from lightning.pytorch.strategies import SingleDeviceStrategy
from small_model import train

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks.monitor import Monitor
from lightning_megatrain.callbacks.summary import Summary
from lightning_megatrain.memory.host import format_bytes


def rows(text):
    """First cell: the others; of what rich printed."""
    cells = [[c.strip() for c in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_what_is_planned_is_printed_before_and_what_was_reached_after(capsys):
    strategy = MegaTrainStrategy(units=["Block"], update="in_backward")
    monitor = Monitor(warmup_steps=1)
    train([monitor, Summary(predicted_tokens_per_s=12_345.0)], steps=3, strategy=strategy)
    before, _, after = capsys.readouterr().out.partition("megatrain: what became of it")
    planned, reached = rows(before), rows(after)
    assert planned["parameters"] == ["67,584, 32-true"]
    assert planned["streamed"] == ["4 units, blocks.0 to blocks.3"]
    assert planned["computes on"] == ["cpu"]
    assert planned["update"] == ["in_backward (as asked)"]
    assert planned["host memory"][0].startswith(f"{format_bytes(strategy.plan.host_bytes)} (weights ")
    assert planned["device memory"][0].startswith(f"{format_bytes(strategy.plan.device_bytes)} (resident weights ")
    assert "thread" in planned["optimizer"][0]
    assert planned["predicted tokens/s"] == ["12,345"]
    assert reached["tokens/s"] == ["12,345", f"{monitor.mean_tokens_per_s:,.0f}"]
    assert reached["host memory; measured: the whole process"][0] == format_bytes(strategy.plan.host_bytes)
    assert "peak device memory" not in reached  # the CPU has none of its own


def test_what_is_not_known_is_left_out(capsys):
    train([Summary()], steps=1)
    printed = capsys.readouterr().out
    assert "became of it" in printed
    assert "tokens/s" not in printed


def test_another_strategy_has_nothing_to_say(capsys):
    train([Summary()], steps=1, strategy=SingleDeviceStrategy("cpu"))
    assert "planned" not in capsys.readouterr().out
