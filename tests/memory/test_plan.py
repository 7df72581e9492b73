"""The plan is what the run then holds."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import zoo
from fitting import MegaTrainStrategy, fit

from lightning_megatrain.memory.plan import Plan


class Held(L.Callback):
    """Compares the plan with the bytes held once training runs."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        store, updater, engine = strategy._store, strategy._updater, strategy._engine
        self.host = store.nbytes + updater.nbytes
        self.slabs = updater.gradients.slab_nbytes
        self.device = engine.residents.nbytes + engine._fetcher.ring.nbytes + engine._gradients.nbytes
        self.plan = strategy.plan


# fp32 sums of bf16 gradients, sums in the wire's dtype, and no sums at all.
@pytest.mark.parametrize(
    ("update", "batches", "sums"),
    [("blocking", 1, "auto"), ("in_backward", 1, "auto"), ("blocking", 2, "auto"), ("next_forward", 2, "bfloat16")],
)
@pytest.mark.parametrize(
    ("precision", "low", "high"), [("32-true", 12, 16), ("bf16-mixed", 12, 14), ("bf16-true", 10, 12)]
)
@pytest.mark.parametrize("name", ["llama", "frozen", "gpt2"])
def test_plan_counts_what_is_held(
    name: str, precision: str, low: int, high: int, update: str, batches: int, sums: str
) -> None:
    held = Held()
    fit(
        partial(zoo.ALL[name], log_norm=False),
        MegaTrainStrategy(update=update, accumulate_dtype=sums),
        precision=precision,
        callbacks=[held],
        max_steps=1,
        accumulate_grad_batches=batches,
    )
    assert held.host == held.plan.host_bytes - held.plan.host["slabs"]
    assert held.slabs == held.plan.host["slabs"]
    assert held.device == held.plan.device_bytes - held.plan.device["resident gradients"]


def test_bytes_per_parameter() -> None:
    make = partial(zoo.Encoder, width=256, layers=8, log_norm=False)  # wide enough for padding not to count
    for precision, update, expected in (
        ("bf16-mixed", "in_backward", 12),
        ("bf16-mixed", "blocking", 14),
        ("32-true", "in_backward", 12),
        ("32-true", "blocking", 16),
        ("bf16-true", "in_backward", 10),
    ):
        strategy = MegaTrainStrategy(update=update)
        fit(make, strategy, precision=precision, max_steps=1)
        assert strategy.host_bytes_per_parameter == pytest.approx(expected, rel=0.03)


def test_refusal_names_needed_available_items_and_what_to_set() -> None:
    plan = Plan({"weights": 4 * 2**30, "moments": 8 * 2**30, "gradients": 0, "slabs": 2**20}, {}, 10**9)
    plan.require_host(13 * 2**30, "buy more")
    with pytest.raises(
        RuntimeError,
        match=r"1 billion .* needs 12\.0 GiB .*moments 8\.0 GiB and weights 4\.0 GiB.*2\.0 GiB.*buy more\.",
    ):
        plan.require_host(2 * 2**30, "buy more")


def test_what_is_only_held_is_not_called_training_and_close_sizes_print_apart() -> None:
    plan = Plan({"weights": 2**34, "moments": 0, "gradients": 0, "slabs": 0}, {"slots": 2**30}, 18_600)
    with pytest.raises(
        RuntimeError,
        match=r"^Holding 18,600 parameters needs 16\.00 GiB of host memory \(weights 16\.0 GiB\), but 15\.99 GiB are",
    ):
        plan.require_host(2**34 - 2**23, "buy more")
    with pytest.raises(RuntimeError, match=r"^Streaming 18,600 .* needs 1\.0 GiB .* 1023\.0 MiB are free"):
        plan.require_device(2**30 - 2**20)
    assert "18.6 million parameters" in Plan(plan.host, plan.device, 18_600_000).describe()
