"""Before, between and after fits the module is ordinary; errors surface once and leave nothing behind."""

import copy
import gc
import threading
import weakref
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import QUIET, SCHEDULES, MegaTrainStrategy, assert_same_bits, fit, loader, stock, under
from torch import Tensor, nn

from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.update.optimizers import TorchUpdate

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]


def assert_ordinary(module: zoo.Zoo, reference: nn.Module) -> None:
    assert module.state_dict().keys() == reference.state_dict().keys()
    assert module.device.type == "cpu"
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, nn.Parameter)
        assert (p.dtype, p.device.type, p.shape) == (torch.float32, "cpu", q.shape), name
        assert p.requires_grad == q.requires_grad, name
        assert p.untyped_storage().nbytes() == p.numel() * 4, name
    for m in module.modules():
        assert "forward" not in m.__dict__
        assert not m._forward_pre_hooks
    assert not [t for t in threading.enumerate() if t.name.startswith("megatrain")]
    copy.deepcopy(module).loss(torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", zoo.ALL)
def test_module_is_ordinary_after_fit(name: str, precision: str) -> None:
    module, _ = fit(zoo.ALL[name], MegaTrainStrategy(), precision=precision, max_steps=2)
    assert_ordinary(module, zoo.ALL[name]())


@pytest.mark.parametrize("update", SCHEDULES)
def test_device_memory_is_free_when_the_run_is_over(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when Python collects cycles: what follows in the process may need it."""
    made = []
    init = Engine.__init__

    def noted(self: Engine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.extend(weakref.ref(part) for part in (self, self.residents, self._fetcher.ring, self._gradients))

    monkeypatch.setattr(Engine, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        make = partial(zoo.Tied, log_norm=False)
        trained = fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", max_steps=2)
        assert [part() for part in made] == [None] * 4
        del trained  # only now: whoever keeps the trainer keeps no device memory
    finally:
        gc.enable()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_untrained_weights_come_back_exactly(precision: str) -> None:
    module = zoo.Frozen()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    trainer = L.Trainer(strategy="megatrain", accelerator="cpu", devices=1, precision=precision, **QUIET)
    trainer.validate(module, loader(8), verbose=False)
    for name, value in module.state_dict().items():
        expected = before[name].bfloat16().float() if precision == "bf16-true" else before[name]
        assert torch.equal(value, expected), name


def test_every_mode_gives_the_stock_numbers() -> None:
    results = []
    for strategy in (stock(), MegaTrainStrategy()):
        L.seed_everything(1, verbose=False)
        module = zoo.Tied()
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_steps=4,
            limit_val_batches=3,
            val_check_interval=2,
            **QUIET,
        )
        outputs: list[Any] = [trainer.validate(module, loader(16), verbose=False)]
        trainer.fit(module, loader(), loader(16))
        outputs.append(trainer.callback_metrics["val_loss"].item())
        outputs.append(trainer.test(module, loader(16), verbose=False))
        outputs.append([x.item() for x in trainer.predict(module, loader(16))])
        outputs.append(trainer.validate(module, loader(16), verbose=False))
        trainer.fit_loop.epoch_loop.max_steps = 8
        trainer.fit(module, loader(), loader(16))
        outputs.append(trainer.validate(module, loader(16), verbose=False))
        results.append((outputs, module))
    assert results[0][0] == results[1][0]
    assert_same_bits(results[0][1], results[1][1])


def test_validation_during_training_changes_nothing() -> None:
    make = partial(zoo.Encoder, dropout=0.0)
    a, _ = fit(make, MegaTrainStrategy())
    L.seed_everything(1, verbose=False)
    module = make()
    trainer = L.Trainer(
        strategy=MegaTrainStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=10,
        val_check_interval=2,
        num_sanity_val_steps=2,
        **QUIET,
    )
    trainer.fit(module, loader(), loader(8))
    assert_same_bits_but_losses(a, module)


def assert_same_bits_but_losses(a: zoo.Zoo, b: zoo.Zoo) -> None:
    a.losses = b.losses = []  # validation's are among them
    assert_same_bits(a, b)


class Meddler(L.Callback):
    """Reads and writes weights between steps, as users' callbacks do."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                assert p.device.type == "cpu"
                p.data.mul_(0.99)
            pl_module.head.bias.clamp_(-0.01, 0.01)
        self.seen.append(sum(p.double().abs().sum() for p in pl_module.parameters()))
        with torch.no_grad():  # a forward outside any step, then another write
            self.seen.append(pl_module.loss(torch.zeros(1, 4, dtype=torch.long, device=pl_module.device)))
        self.seen.append(torch.cat([v.flatten() for v in pl_module.state_dict().values()]).clone())


def test_callbacks_meet_the_true_weights() -> None:
    theirs = Meddler()
    make = partial(zoo.Encoder, log_norm=False)
    a, _ = fit(make, stock(), callbacks=[theirs])
    for update in SCHEDULES:
        with under(update):
            mine = Meddler()
            b, _ = fit(make, MegaTrainStrategy(update=update), callbacks=[mine])
            assert_same_bits(a, b)
            assert all(torch.equal(x, y) for x, y in zip(theirs.seen, mine.seen, strict=True))


class Copier(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        twin = copy.deepcopy(pl_module)
        batch = torch.ones(2, 4, dtype=torch.long)
        with torch.no_grad():
            before = twin.loss(batch)
            for p in twin.parameters():
                p.zero_()
            assert not torch.equal(twin.loss(batch), before)
        assert trainer.strategy._engine is not None


def test_a_copy_made_during_training_is_a_plain_module() -> None:
    make = partial(zoo.Llama, log_norm=False)
    a, _ = fit(make, stock())
    b, _ = fit(make, MegaTrainStrategy(), callbacks=[Copier()])
    assert_same_bits(a, b)


class Skipping(zoo.Encoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


def test_training_step_returning_none() -> None:
    make = partial(Skipping, log_norm=False)
    a, _ = fit(make, stock())
    for update in SCHEDULES:
        with under(update):
            b, _ = fit(make, MegaTrainStrategy(update=update))
            assert_same_bits(a, b)


class Gan(zoo.Zoo):
    """Two networks, two optimizers, manual optimization, toggling, clipping by hand, several backwards a step."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.automatic_optimization = False
        self.generator, self.critic = zoo.Encoder(dropout=0.0), zoo.Encoder(dropout=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, network, other in zip(
            self.optimizers(), (self.generator, self.critic), (self.critic, self.generator), strict=True
        ):
            self.toggle_optimizer(optimizer)
            mixed = other.net(network.net(network.embed(batch)))
            loss = zoo.token_loss(network.head(mixed), batch)
            self.losses.append(loss.detach())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.manual_backward(0.1 * network.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (self.generator, self.critic)], []


def test_manual_optimization_with_two_toggled_optimizers() -> None:
    a, _ = fit(Gan, stock())
    b, _ = fit(Gan, MegaTrainStrategy())
    assert_same_bits(a, b)


class StaleGraph(zoo.Encoder):
    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.optimizers().step()
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)  # of residents autograd itself would notice


def test_backward_after_an_update_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"updated between this forward and its backward"):
        fit(StaleGraph, MegaTrainStrategy(), max_steps=2)


class Failing(zoo.Encoder):
    """Fails in the third step, inside a unit, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__(log_norm=False)
        self.where = where

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            block = self.net.layers[1].linear1
            if self.where == "forward":
                self.handle = block.register_forward_pre_hook(_fail)
            else:
                self.handle = block.register_full_backward_hook(_fail)
        return super().training_step(batch, batch_idx)


def _fail(*args: Any) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_unit_surfaces_and_leaves_an_ordinary_module(where: str, update: str) -> None:
    L.seed_everything(1, verbose=False)
    module = Failing(where)
    trainer = L.Trainer(strategy=MegaTrainStrategy(update=update), accelerator="cpu", devices=1, max_steps=9, **QUIET)
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer.fit(module, loader())
    module.handle.remove()
    assert_ordinary(module, Failing(where))
    fresh, _ = fit(partial(zoo.Encoder, log_norm=False), MegaTrainStrategy(update=update), max_steps=2)
    assert_ordinary(fresh, zoo.Encoder())


class Rescue(L.Callback):
    """Tries to save when the fit fails, as OnExceptionCheckpoint does."""

    def __init__(self, path: Any) -> None:
        self.path, self.error = path, None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except RuntimeError as error:
            self.error = error


def test_an_error_in_the_worker_surfaces_once_as_itself_and_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    original = TorchUpdate.update

    def update(self: TorchUpdate, group: Any, *args: Any) -> None:
        if group.index == 1:
            raise ZeroDivisionError("planted in the worker")
        original(self, group, *args)

    rescue = Rescue(tmp_path / "torn.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(TorchUpdate, "update", update)
        with pytest.raises(ZeroDivisionError, match="planted in the worker"):
            fit(partial(zoo.Encoder, log_norm=False), MegaTrainStrategy(update="in_backward"), callbacks=[rescue])
    assert "half-way" in str(rescue.error)
    assert not (tmp_path / "torn.ckpt").exists()
    module, _ = fit(partial(zoo.Encoder, log_norm=False), MegaTrainStrategy(update="in_backward"), max_steps=2)
    assert_ordinary(module, zoo.Encoder())


def test_an_error_between_updates_in_backward_is_not_saved(tmp_path: Any) -> None:
    rescue = Rescue(tmp_path / "torn.ckpt")
    make = partial(Failing, "backward")
    with pytest.raises(ZeroDivisionError):
        fit(make, MegaTrainStrategy(update="in_backward"), callbacks=[rescue])
    assert "half-way" in str(rescue.error)
    rescue = Rescue(tmp_path / "whole.ckpt")
    with pytest.raises(ZeroDivisionError):
        fit(make, MegaTrainStrategy(update="blocking"), callbacks=[rescue])
    assert rescue.error is None
    assert (tmp_path / "whole.ckpt").exists()


@pytest.mark.parametrize("order", ["mine-theirs", "theirs-mine"])
def test_resume_across_strategies_keeps_every_bit(order: str, tmp_path: Any) -> None:
    make = partial(zoo.Encoder, dropout=0.0, scheduler=True)
    straight, _ = fit(make, stock(), max_steps=-1, max_epochs=2, samples=16)
    first, second = (MegaTrainStrategy(), stock()) if order == "mine-theirs" else (stock(), MegaTrainStrategy())
    _, trainer = fit(make, first, max_steps=-1, max_epochs=1, samples=16)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module = make()
    again = L.Trainer(strategy=second, accelerator="cpu", devices=1, max_epochs=2, **QUIET)
    again.fit(module, loader(16), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(straight.losses[4:], module.losses, strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_resume_in_bf16_keeps_every_bit(precision: str, tmp_path: Any) -> None:
    make = partial(zoo.Llama, scheduler=True)
    straight, _ = fit(make, MegaTrainStrategy(), max_steps=-1, max_epochs=2, precision=precision, samples=16)
    saver = SaveAtEpochEnd(tmp_path / "half.ckpt")
    fit(make, MegaTrainStrategy(), max_steps=-1, max_epochs=1, precision=precision, callbacks=[saver], samples=16)
    module = make()
    again = L.Trainer(strategy="megatrain", accelerator="cpu", devices=1, max_epochs=2, precision=precision, **QUIET)
    again.fit(module, loader(16), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert {v.dtype for v in saved.values()} == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


class SaveAtEpochEnd(L.Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_forked_data_loader_workers() -> None:
    L.seed_everything(1, verbose=False)
    module = zoo.Encoder()
    trainer = L.Trainer(strategy="megatrain", accelerator="cpu", devices=1, max_steps=10, **QUIET)
    L.seed_everything(2, verbose=False)
    data = loader()
    trainer.fit(module, torch.utils.data.DataLoader(data.dataset, batch_size=4, num_workers=2))
    assert torch.isfinite(module.losses[-1])
    assert_ordinary(module, zoo.Encoder())
