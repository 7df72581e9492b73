"""Bad input: one sentence that says what is wrong and what to set, and nothing held."""

import re
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from devices import Room
from fitting import QUIET, MegaTrainStrategy, assert_same_bits, fit, loader, stock
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_megatrain.session


def refused(
    match: str, make: Any = zoo.Encoder, *, precision: Any = "32-true", fit_arguments: Any = None, **strategy: Any
) -> None:
    """Expect one sentence, and a module that was not touched."""
    module = make()
    before = {k: v.data_ptr() for k, v in module.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=match) as error:  # noqa: PT012
        trainer = L.Trainer(
            strategy=MegaTrainStrategy(**strategy),
            accelerator="cpu",
            precision=precision,
            max_steps=2,
            **{"devices": 1, **QUIET, **(fit_arguments or {})},
        )
        trainer.fit(module, loader())
    text = str(error.value)
    assert "\n" not in text
    assert re.search(r"set |use |build |fill |convert |remove |write |choose |make |run |name |pass |give ", text), text
    after = module.state_dict()
    assert all(after[k].device.type == "meta" or after[k].data_ptr() == p for k, p in before.items())
    assert all("forward" not in m.__dict__ for m in module.modules())


class NoBlocks(zoo.Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 8), nn.Linear(8, zoo.VOCAB)

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self.head(self.embed(batch)), batch)


def test_no_unit_found() -> None:
    refused(r"No unit found.*ModuleList.*units=", NoBlocks)
    refused(r"units=\['Nothing'\] matches no module.*TransformerEncoderLayer", units=["Nothing"])


def test_parameters_elsewhere_than_on_the_cpu() -> None:
    def meta() -> zoo.Zoo:
        with torch.device("meta"):
            module = zoo.Encoder()
            module.scale = nn.Parameter(torch.ones(3))  # which the module itself does not fill
            return module

    refused(r"is on the meta device.*configure_model", meta)


def test_compiled_modules() -> None:
    """A module compiled in place, one that was wrapped inside the model, and the whole."""

    def in_place() -> zoo.Zoo:
        module = zoo.Encoder()
        module.net.layers[1].compile()
        return module

    def wrapped() -> zoo.Zoo:
        module = zoo.Encoder()
        module.head = torch.compile(module.head)
        return module

    refused(r"^'net\.layers\.1' was compiled with torch\.compile.*without torch\.compile", in_place)
    for name, module in (("head", wrapped()), ("Encoder", torch.compile(zoo.Encoder()))):
        trainer = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=1, **QUIET)
        with pytest.raises(MisconfigurationException, match=rf"^'{name}' was compiled"):
            trainer.fit(module, loader())


def test_dtype_that_a_master_cannot_hold() -> None:
    refused(r"float64.*\.float\(\)", lambda: zoo.Encoder().double())


def test_devices_and_nodes() -> None:
    refused(r"one device and got 2; set Trainer\(devices=1\)", fit_arguments={"devices": 2})
    refused(r"one node and got 2; set Trainer\(num_nodes=1\)", fit_arguments={"num_nodes": 2})
    refused(r"sync_batchnorm=False", fit_arguments={"sync_batchnorm": True})


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precisions(precision: str) -> None:
    refused(rf"precision='{precision}' is not supported.*set precision='bf16-mixed'", precision=precision)


def test_gradient_scaler() -> None:
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    refused("precision='16-mixed' is not supported.*scaler", precision=None, fit_arguments={"plugins": [scaled]})


class WithLbfgs(zoo.Encoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sign(torch.optim.Optimizer):
    """Somebody's own optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
        return loss


class WithSign(zoo.Encoder):
    def configure_optimizers(self) -> Any:
        return Sign(self.parameters())


def test_optimizers() -> None:
    refused(r"LBFGS.*use AdamW", WithLbfgs)
    refused(
        r"Sign is not known to update each parameter by itself.*set precision='32-true'",
        WithSign,
        precision="bf16-mixed",
    )
    fit(WithSign, MegaTrainStrategy())  # blocking, on the fp32 store, anything goes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"gradient_clip_val": 1.0}, "gradients are clipped"),
        ({"accumulate_grad_batches": 2}, "gradients are accumulated"),
    ],
)
def test_in_backward_where_it_is_not_legal(arguments: dict[str, Any], why: str) -> None:
    make = partial(zoo.Encoder, log_norm=False)
    refused(rf"in_backward.*{why}.*update='blocking'", make, update="in_backward", fit_arguments=arguments)


def test_in_backward_with_a_hook_that_reads_gradients() -> None:
    class Reader(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pass

    make = partial(zoo.Encoder, log_norm=False)
    refused(r"Reader overrides on_after_backward", make, update="in_backward", fit_arguments={"callbacks": [Reader()]})
    refused(r"module overrides on_before_optimizer_step", zoo.Encoder, update="in_backward")


def test_host_memory_too_small() -> None:
    refused(r"needs .* of host memory .*but 10\.0 KiB are available; set precision='bf16-true'", host_memory="10KiB")


@pytest.mark.parametrize("value", ["lots", "-3GiB", "", "1.5.2GB"])
def test_sizes_that_are_none(value: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        MegaTrainStrategy(host_memory=value)


@pytest.mark.parametrize("arguments", [{"prefetch": -1}, {"microbatch": 0}, {"update": "sometimes"}])
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"; set "):
        MegaTrainStrategy(**arguments)


def test_hook_that_would_never_fire() -> None:
    def make() -> zoo.Zoo:
        module = zoo.Encoder()
        module.net.layers[0].linear1.weight.register_post_accumulate_grad_hook(lambda p: None)
        return module

    refused("post-accumulate-grad hook", make)


class InPlace(zoo.Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.net.layers[0].register_forward_pre_hook(lambda m, a: None)
        self.net.layers[0].linear1.register_forward_pre_hook(lambda m, a: self.seen.add_(1.0))

    def loss(self, batch: Tensor) -> Tensor:
        self.seen = self.embed(batch)
        return zoo.token_loss(self.head(self.net(self.seen)), batch)


def test_a_block_that_changes_its_input() -> None:
    with pytest.raises(RuntimeError, match=r"'net.layers.0' changes one of its inputs in place"):
        fit(InPlace, MegaTrainStrategy())


class Penalised(zoo.Encoder):
    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).requires_grad_()
        loss = zoo.token_loss(self.head(self.net(x)), batch)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + g.square().sum()


def test_double_backward() -> None:
    with pytest.raises(RuntimeError, match=r"Double backward through unit 'net.layers.2'.*create_graph"):
        fit(Penalised, MegaTrainStrategy())


def test_registered_once_and_by_name() -> None:
    import importlib

    import lightning_megatrain

    importlib.reload(lightning_megatrain)
    assert "megatrain" in StrategyRegistry
    trainer = L.Trainer(strategy="megatrain", accelerator="cpu", **QUIET)
    assert type(trainer.strategy).__name__ == "MegaTrainStrategy"


class Later(L.Callback):
    """Asks the trainer for something in the middle of the fit."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            for name, value in self.settings.items():
                setattr(trainer, name, value)


EPOCHS: dict[str, Any] = {"max_epochs": 3, "max_steps": -1, "samples": 20}
make_still = partial(zoo.Encoder, layers=2, log_norm=False, dropout=0.0)


@pytest.mark.parametrize("settings", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("update", ["blocking", "next_forward", "in_backward"])
def test_what_the_trainer_is_asked_for_in_the_middle_is_done_or_refused(update: str, settings: dict[str, Any]) -> None:
    if update == "in_backward":
        with pytest.raises(
            MisconfigurationException, match=r"became .* during fit.* set MegaTrainStrategy\(update='bl"
        ):
            fit(make_still, MegaTrainStrategy(update=update), callbacks=[Later(**settings)], **EPOCHS)
        return
    a, _ = fit(make_still, stock(), callbacks=[Later(**settings)], **EPOCHS)
    b, _ = fit(make_still, MegaTrainStrategy(update=update), callbacks=[Later(**settings)], **EPOCHS)
    assert_same_bits(a, b)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": GradClipAlgorithmType.VALUE},
    ],
)
def test_where_the_device_may_update_what_it_cannot_do_is_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room())
    strategy = partial(MegaTrainStrategy, update="blocking")
    with pytest.raises(MisconfigurationException, match=r"during fit.* set MegaTrainStrategy\(device_update='never'\)"):
        fit(make_still, strategy(), precision="bf16-mixed", callbacks=[Later(**settings)], **EPOCHS)
    fit(make_still, strategy(device_update="never"), precision="bf16-mixed", callbacks=[Later(**settings)], **EPOCHS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prefetch", value) for value in ("2", 1.5, -1, True, None)),
        *(("microbatch", value) for value in (2.5, "4", 0, [1])),
        *(("sequence_chunks", value) for value in ("a", 1.5, 0)),
        *(("threads", value) for value in ("4", 2.5, 0, None)),
        *(("units", value) for value in (None, 5, [nn.Linear], nn.Linear, ["Block", 3])),
        *(("device_memory", value) for value in (0, "0GiB", "much", None, True)),
        *(("host_memory", value) for value in ("much", 0.5, None, True)),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name_at_once(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} .*; (set|write) [^;]*\.$"):
        MegaTrainStrategy(**{name: value})


def test_a_fraction_is_offered_where_it_is_one_of_something() -> None:
    with pytest.raises(ValueError, match="fraction such as"):
        MegaTrainStrategy(device_memory="much")
    with pytest.raises(ValueError, match=r"or a size such as '64GiB'\.$"):
        MegaTrainStrategy(host_memory="much")


@pytest.mark.parametrize("units", ["auto", "Block", ["Block"], ("a.b",), {"Block"}, lambda name, module: True])
def test_units_may_be_chosen_in_each_of_these_ways(units: Any) -> None:
    MegaTrainStrategy(units=units, prefetch=0, microbatch="auto", threads=1, device_memory=1.0, host_memory=10**9)
