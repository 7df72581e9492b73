"""Where the module comes from and which fit it is, against the stock strategy; what an evaluation allocates."""

from typing import Any

import lightning as L
import pytest
import zoo
from fitting import SCHEDULES, MegaTrainStrategy, loader
from matrix import (
    BF16,
    EAGER,
    SMALL,
    Encoder,
    Outcome,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    play,
    weights,
)
from torch import Tensor, nn

from lightning_megatrain.memory.arena import Arena


class BuiltLate(zoo.Zoo):
    """All layers are made in `configure_model`, which every stage calls."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.net: nn.Module | None = None
        self.times_built = 0

    def configure_model(self) -> None:
        if self.net is None:
            self.net = zoo.Encoder(layers=2)
            self.times_built += 1

    def loss(self, batch: Tensor) -> Tensor:
        assert isinstance(self.net, zoo.Encoder)
        return self.net.loss(batch)


def built_late(stage: Stage) -> Outcome:
    module = BuiltLate()
    trainer = stage.trainer()
    trainer.fit(module, loader(12), loader(8))
    facts = trainer.test(module, loader(8), verbose=False)
    assert module.times_built == 1
    return Outcome(module, trainer, facts)


def test_configure_model() -> None:
    assert_like_stock(built_late, *EAGER)


@pytest.mark.parametrize("precision", BF16)
def test_configure_model_in_bf16(precision: str) -> None:
    assert_schedules_agree(built_late, precision)


def made_empty(stage: Stage) -> Outcome:
    trained = zoo.Encoder(**SMALL).state_dict()
    trainer = stage.trainer()
    with trainer.init_module(empty_init=True):
        module = Encoder()
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    module.load_state_dict(trained)
    trainer.fit(module, loader(12), loader(8))
    return Outcome(module, trainer)


def test_init_module_empty_then_loaded() -> None:
    assert_like_stock(made_empty, *EAGER)


@pytest.mark.parametrize("precision", BF16)
def test_init_module_empty_then_loaded_in_bf16(precision: str) -> None:
    assert_schedules_agree(made_empty, precision)


def two_modules(stage: Stage) -> Outcome:
    """One trainer fits one module, goes on with it, and then fits another kind."""
    trainer, first = stage.trainer(max_epochs=1), Encoder(scheduler=True)
    trainer.fit(first, loader(12))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, loader(12))
    second = zoo.Frozen(log_norm=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(second, loader(12), loader(8))
    return Outcome(second, trainer, [first.losses, weights(first), trainer.global_step])


def test_one_trainer_fits_again_and_then_another_module() -> None:
    for mine in assert_like_stock(two_modules, *SCHEDULES):
        assert mine.trainer.global_step == 9


@pytest.mark.parametrize("precision", BF16)
def test_one_trainer_fits_again_in_bf16(precision: str) -> None:
    assert_schedules_agree(two_modules, precision)


class Witness(L.Callback):
    """Looks at the strategy in the middle of an evaluation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: L.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        assert strategy.plan is not None
        self.seen.append((strategy.update_schedule, dict(strategy.plan.host)))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = look


@pytest.mark.parametrize("precision", ["32-true", *BF16])
@pytest.mark.parametrize("mode", ["validate", "test", "predict"])
def test_evaluation_alone_allocates_weights_and_nothing_else(
    mode: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    make_arena = Arena.__init__

    def noted(self: Arena, nbytes: int, **arguments: Any) -> None:
        sizes.append(nbytes)
        make_arena(self, nbytes, **arguments)

    monkeypatch.setattr(Arena, "__init__", noted)
    witness = Witness()

    def scenario(stage: Stage) -> Outcome:
        module, trainer = Encoder(), stage.trainer(callbacks=[witness])
        getattr(trainer, mode)(module, loader(8), **({} if mode == "predict" else {"verbose": False}))
        return Outcome(module, trainer)

    outcome = play(scenario, MegaTrainStrategy(), precision)
    assert len(witness.seen) == 2
    for schedule, host in witness.seen:
        assert schedule is None
        assert host["moments"] == host["gradients"] == host["slabs"] == 0
        assert sum(sizes) == host["weights"]
    assert outcome.trainer.strategy.update_schedule is None
    assert outcome.trainer.optimizers == []


def test_training_after_evaluation_does_allocate_optimizer_bytes() -> None:
    def scenario(stage: Stage) -> Outcome:
        module, trainer = Encoder(), stage.trainer()
        trainer.validate(module, loader(8), verbose=False)
        trainer.fit(module, loader(12))
        return Outcome(module, trainer)

    (mine,) = assert_like_stock(scenario)
    parameters = sum(p.numel() for p in mine.module.parameters())
    assert mine.trainer.strategy.plan.host["moments"] >= 8 * parameters
