"""Callbacks that average, unfreeze or prune weights, under every schedule, against the stock strategy."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import SCHEDULES, MegaTrainStrategy, loader
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from matrix import (
    BF16,
    COLLECTING,
    EAGER,
    SMALL,
    Encoder,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    fitting,
    play,
    weights,
)
from torch import Tensor, nn
from torch.optim import Optimizer


def averages(outcome: Outcome) -> dict[str, Tensor]:
    (callback,) = (c for c in outcome.trainer.callbacks if hasattr(c, "_average_model"))
    state = callback._average_model.state_dict()
    assert {v.device.type for v in state.values()} == {"cpu"}
    return {k: v.clone() for k, v in state.items()}


pytestmark = pytest.mark.filterwarnings("ignore:.* in a second copy of the model")

AVERAGING: dict[str, Any] = {
    "every step": lambda: WeightAveraging(),
    "moving": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=1),
    "moving, every other step": lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=2, use_buffers=False),
    "epoch ends": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0),
}


def averaging(how: str, make: Any = Encoder) -> Scenario:
    """Validation in the middle of epochs exchanges the weights for their average and back."""
    return fitting(make, callbacks=lambda m: [AVERAGING[how]()], facts=averages, val_check_interval=2)


@pytest.mark.parametrize("how", AVERAGING)
def test_weight_averaging(how: str) -> None:
    for mine in assert_like_stock(averaging(how), *EAGER):
        average = torch.cat([mine.facts[f"module.{n}"].flatten() for n, _ in mine.module.named_parameters()])
        assert torch.equal(average, weights(mine.module))


@pytest.mark.parametrize("kind", [StochasticWeightAveraging, EMAWeightAveraging, WeightAveraging])
def test_the_bytes_of_an_average_are_announced(kind: Any) -> None:
    """80.2 KiB are 20 533 parameters in fp32."""
    arguments = {"swa_lrs": 1e-3} if kind is StochasticWeightAveraging else {}
    with pytest.warns(UserWarning, match=rf"{kind.__name__} keeps an average in a second copy of the model: 80\.2 KiB"):
        play(fitting(Encoder, callbacks=lambda m: [kind(**arguments)], max_steps=1), MegaTrainStrategy())


def test_weight_averaging_with_buffers_and_shared_weights() -> None:
    assert_like_stock(averaging("moving", partial(zoo.Odd, log_norm=False)), *EAGER)


@pytest.mark.parametrize(("how", "precision"), zip(["every step", "moving"], BF16, strict=True))
def test_weight_averaging_in_bf16(how: str, precision: str) -> None:
    assert_schedules_agree(averaging(how), precision, learns=False)


@pytest.mark.parametrize("update", EAGER)
def test_exchanging_weights_for_their_average_keeps_the_masters(update: str) -> None:
    """Of `bf16-mixed`: what validation put in their place goes to the last bit. At the end the average stays."""

    class Unmoved(EMAWeightAveraging):
        def on_train_end(self, *args: Any) -> None:
            pass

    def left_by(*callbacks: L.Callback) -> Tensor:
        scenario = fitting(partial(Encoder, dropout=0.0), callbacks=lambda m: list(callbacks), val_check_interval=2)
        return weights(play(scenario, MegaTrainStrategy(update=update), "bf16-mixed").module)

    plain, averaged, callback = left_by(), left_by(Unmoved(decay=0.8)), EMAWeightAveraging(decay=0.8)
    assert torch.equal(plain, averaged)
    torch.testing.assert_close(left_by(callback), weights(callback._average_model), rtol=2**-7, atol=1e-37)


def stochastic(make: Any, **arguments: Any) -> Scenario:
    return fitting(
        make,
        callbacks=lambda m: [StochasticWeightAveraging(1e-3, swa_epoch_start=1, **arguments)],
        facts=averages,
        max_epochs=4,
    )


@pytest.mark.parametrize(
    "arguments", [{"annealing_epochs": 2}, {"annealing_strategy": "linear", "annealing_epochs": 1}]
)
def test_stochastic_weight_averaging(arguments: dict[str, Any]) -> None:
    assert_like_stock(stochastic(partial(Encoder, scheduler=True), **arguments), *SCHEDULES)


class Normalised(zoo.Encoder):
    """Batch normalization outside units, whose statistics the callback takes anew with an epoch that does not train."""

    def __init__(self) -> None:
        super().__init__(**SMALL)
        self.norm = nn.BatchNorm1d(32)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net(self.embed(batch))
        return zoo.token_loss(self.head(self.norm(x.flatten(0, 1)).view_as(x)), batch)


@pytest.mark.parametrize("make", [Normalised, partial(zoo.Odd, log_norm=False)])
def test_stochastic_weight_averaging_with_batch_norm(make: Any) -> None:
    assert_like_stock(stochastic(make, annealing_epochs=1), *EAGER)


@pytest.mark.parametrize("precision", BF16)
def test_stochastic_weight_averaging_in_bf16(precision: str) -> None:
    assert_schedules_agree(stochastic(Normalised, annealing_epochs=1), precision)


class Transfer(zoo.Zoo):
    """A backbone that is a whole encoder, and a head. The optimizer starts with what trains at first."""

    def __init__(self, optimizer: str = "adamw", **kw: Any) -> None:
        super().__init__(optimizer=optimizer, log_norm=False, **kw)
        encoder = zoo.Encoder(layers=3)
        self.backbone = nn.Sequential(encoder.embed, *encoder.net.layers)
        self.head = encoder.head

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self.head(self.backbone(batch)), batch)


def backbone() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_lr=1e-3)


class OneByOne(BaseFinetuning):
    """Unfreezes the blocks from the last to the first, one an epoch; the embedding stays frozen."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if 0 < epoch < len(pl_module.backbone):
            self.unfreeze_and_add_param_group(pl_module.backbone[-epoch], optimizer, lr=1e-3)


class FreezesAgain(OneByOne):
    """The last block trains in the second epoch alone, and keeps its group and state."""

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[-1], optimizer, lr=1e-3)
        if epoch == 2:
            self.freeze(pl_module.backbone[-1])


FINETUNING: dict[str, Any] = {"backbone": backbone, "one by one": OneByOne, "and frozen again": FreezesAgain}


def finetuning(how: str, **arguments: Any) -> Scenario:
    def groups(outcome: Outcome) -> list[Any]:
        return [[g["lr"], len(g["params"])] for g in outcome.trainer.optimizers[0].param_groups]

    make = arguments.pop("make", Transfer)
    return fitting(make, callbacks=lambda m: [FINETUNING[how]()], facts=groups, max_epochs=4, **arguments)


@pytest.mark.parametrize("how", FINETUNING)
def test_finetuning(how: str) -> None:
    for mine in assert_like_stock(finetuning(how), *SCHEDULES):
        assert len(mine.facts) == {"backbone": 3, "one by one": 5, "and frozen again": 3}[how]


def test_finetuning_with_clipping_accumulation_and_a_scheduler() -> None:
    make = partial(Transfer, scheduler=True)
    scenario = finetuning("one by one", make=make, gradient_clip_val=0.2, accumulate_grad_batches=2, samples=16)
    assert_like_stock(scenario, *COLLECTING)


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_finetuning_with_other_optimizers(optimizer: str) -> None:
    assert_like_stock(finetuning("backbone", make=partial(Transfer, optimizer)), "in_backward")


@pytest.mark.parametrize(("how", "precision"), zip(["backbone", "and frozen again"], BF16, strict=True))
def test_finetuning_in_bf16(how: str, precision: str) -> None:
    assert_schedules_agree(finetuning(how), precision)


def test_finetuning_saves_what_was_unfrozen() -> None:
    def scenario(stage: Stage) -> Outcome:
        module, checkpoint = Transfer(), ModelCheckpoint(stage.directory, save_last=True)
        trainer = stage.trainer(callbacks=[backbone(), checkpoint], enable_checkpointing=True, max_epochs=3)
        trainer.fit(module, loader(12))
        saved = torch.load(stage.directory / "last.ckpt", weights_only=True)
        return Outcome(module, trainer, [saved["state_dict"], saved["optimizer_states"]])

    for mine in assert_like_stock(scenario, *EAGER):
        assert len(mine.facts[1][0]["state"]) == len(list(mine.module.parameters()))


def pruned(module: zoo.Zoo) -> Iterator[tuple[nn.Module, str]]:
    yield module.net.layers[0].linear1, "weight"
    yield module.net.layers[1].linear2, "weight"
    yield module.head, "weight"


def test_model_pruning() -> None:
    def callbacks(module: zoo.Zoo) -> list[L.Callback]:
        return [
            ModelPruning(
                "l1_unstructured", list(pruned(module)), amount=0.3, use_lottery_ticket_hypothesis=False, verbose=0
            )
        ]

    for mine in assert_like_stock(fitting(Encoder, callbacks=callbacks, max_epochs=3), *EAGER):
        for module, name in pruned(mine.module):
            assert (getattr(module, name) == 0).float().mean() > 0.3
