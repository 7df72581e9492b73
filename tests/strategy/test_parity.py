"""`32-true` on the CPU gives the stock strategy's bits."""

from functools import partial
from typing import Any

import pytest
import zoo
from fitting import SCHEDULES, MegaTrainStrategy, assert_same_bits, assert_same_optimizer_bits, fit, stock, under


class Noted(MegaTrainStrategy):
    """Knows after training under which schedule it was."""

    seen_schedule: str | None = None

    def on_train_start(self) -> None:
        self.seen_schedule = self.update_schedule
        super().on_train_start()


def compare(make: Any, arguments: dict[str, Any], *settings: dict[str, Any]) -> list[str | None]:
    """One fit under the stock strategy, and one with its bits under each of the settings. Returns their schedules."""
    a, trainer_a = fit(make, stock(), **arguments)
    schedules = []
    for strategy in settings:
        with under(strategy):
            mine = Noted(**strategy)
            b, trainer_b = fit(make, mine, **arguments)
            assert_same_bits(a, b)
            assert_same_optimizer_bits(trainer_a, trainer_b)
            schedules.append(mine.seen_schedule)
    assert schedules
    return schedules


CLIPPED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
UPDATES: list[dict[str, Any]] = [{"update": update} for update in SCHEDULES]


@pytest.mark.parametrize("name", zoo.ALL)
def test_adamw_scheduler_accumulation_clipping(name: str) -> None:
    schedules = compare(partial(zoo.ALL[name], scheduler=True), CLIPPED, *UPDATES[:2])
    assert schedules == ["blocking", "next_forward"]


@pytest.mark.parametrize("name", zoo.ALL)
def test_in_backward(name: str) -> None:
    schedules = compare(partial(zoo.ALL[name], scheduler=True, log_norm=False), {}, {"update": "in_backward"})
    assert schedules == ["in_backward"]


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("adam", {"weight_decay": 0.1}),
        ("adamw", {"amsgrad": True}),
        ("adamw", {"fused": True}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd", {}),
        ("adafactor", {}),
        ("radam", {}),
    ],
)
def test_optimizers(optimizer: str, hyper: dict[str, Any]) -> None:
    compare(partial(zoo.Encoder, optimizer=optimizer, scheduler=True, log_norm=False, **hyper), {}, *UPDATES)


@pytest.mark.parametrize("update", ["blocking", "in_backward"])
def test_updates_on_the_calling_thread(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MegaTrainStrategy, "update_thread_on_cpu", False)
    arguments = {"accumulate_grad_batches": 2} if update == "blocking" else {}
    compare(partial(zoo.Odd, scheduler=True, log_norm=False), arguments, {"update": update})


def test_auto_takes_in_backward_when_nothing_needs_all_gradients() -> None:
    assert compare(partial(zoo.Llama, log_norm=False), {}, {}) == ["in_backward"]
    assert compare(zoo.Llama, {}, {}) == ["blocking"]  # overrides on_before_optimizer_step


@pytest.mark.parametrize("batches", [1, 2, 3, 7])
def test_accumulation(batches: int) -> None:
    compare(zoo.Tied, {"accumulate_grad_batches": batches, "max_steps": 4}, {})


def test_prefetch_depth_changes_nothing() -> None:
    compare(partial(zoo.Odd, scheduler=True), CLIPPED, *({"prefetch": depth} for depth in (0, 1, 2, 9)))


class OnlyHead(zoo.Encoder):
    """All units are frozen: they are streamed, and nothing of them is pushed or updated."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.net.requires_grad_(False)
        self.embed.requires_grad_(False)


class OnlyEmbedding(zoo.Encoder):
    """All units are frozen and gradients flow through them."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.net.requires_grad_(False)
        self.head.requires_grad_(False)


@pytest.mark.parametrize("make", [OnlyHead, OnlyEmbedding])
def test_only_residents_train(make: Any) -> None:
    compare(partial(make, log_norm=False), {"max_steps": 4}, *UPDATES)


def test_value_clipping() -> None:
    compare(zoo.Gpt2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {})


def test_units_chosen_by_hand() -> None:
    by_name = ["net.layers.0", "net.layers.2.linear1", "Embedding"]
    compare(zoo.Encoder, CLIPPED, {"units": by_name}, {"units": lambda name, module: name == "net.layers.1"})
