"""What is written, when, and by whom it can be read."""

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import FORMATS, QUIET, SCHEDULES, MegaTrainStrategy, fit, loader, stock
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from resuming import Steps, write_slowly
from torch import Tensor

from lightning_megatrain import checkpoints, legality
from lightning_megatrain.checkpoint import saver as saver_module
from lightning_megatrain.checkpoint.sharded import read_sharded
from lightning_megatrain.update.worker import Worker

make = partial(zoo.Encoder, layers=2, log_norm=False)


def read(path: Path) -> dict[str, Any]:
    return read_sharded(path, weights_only=True) if path.is_dir() else torch.load(path, weights_only=True)


def assert_same_values(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][name]), name
    for x, y in zip(a["optimizer_states"], b["optimizer_states"], strict=True):
        assert x["param_groups"] == y["param_groups"]
        for key, state in x["state"].items():
            assert all(torch.equal(v, y["state"][key][n]) for n, v in state.items())


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_the_stock_strategys_checkpoint_holds_the_same(checkpoint_format: str, tmp_path: Path) -> None:
    for name, strategy in (("stock", stock()), ("mine", MegaTrainStrategy(checkpoint_format=checkpoint_format))):
        _, trainer = fit(partial(zoo.Odd, log_norm=False), strategy, max_steps=3)
        trainer.save_checkpoint(tmp_path / name)
    theirs, mine = read(tmp_path / "stock"), read(tmp_path / "mine")
    assert_same_values(theirs, mine)
    assert mine.keys() - theirs.keys() == {"megatrain"}
    assert mine["state_dict"]._metadata == theirs["state_dict"]._metadata


def test_lightnings_own_tool_reads_the_folder(tmp_path: Path) -> None:
    module, trainer = fit(make, MegaTrainStrategy(checkpoint_format="sharded"), max_steps=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    whole = _load_distributed_checkpoint(tmp_path / "x.ckpt")
    assert all(torch.equal(v, whole["model"][n]) for n, v in module.state_dict().items())
    assert whole["global_step"] == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_what_is_saved_beside_training_is_the_step_named(
    checkpoint_format: str, update: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is slow, so that training would overtake it if it could."""
    beside = write_slowly(monkeypatch)
    strategy = MegaTrainStrategy(update=update, checkpoint_format=checkpoint_format, save_async=True)
    saver, steps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1), Steps()
    fit(make, strategy, max_steps=8, precision=precision, callbacks=[steps, saver], enable_checkpointing=True)
    assert beside == [True] * 4
    for step in (2, 4, 6, 8):
        saved = read(tmp_path / f"step={step}.ckpt")
        assert saved["global_step"] == step
        for name, value in saved["state_dict"].items():
            assert torch.equal(value, steps.states[step][name]), (step, name)
        assert {int(s["step"]) for s in saved["optimizer_states"][0]["state"].values()} == {step}


def test_updates_go_on_behind_a_save_and_wait_for_what_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of groups that were read run while others are still being written."""
    strategy = MegaTrainStrategy(update="next_forward", checkpoint_format="sharded", save_async=True)
    saver = strategy._checkpoints.saver
    order: list[tuple[str, int]] = []
    hold, do = saver.hold, Worker._do

    def noted(group: int) -> Any:
        let_go = hold(group)

        def done() -> None:
            time.sleep(0.01)
            let_go()
            if saver._unread[group] == 0:
                order.append(("read", group))

        return done

    monkeypatch.setattr(saver, "hold", noted)
    original = strategy._checkpoints.saver.wait_read
    monkeypatch.setattr(saver, "wait_read", lambda group: (original(group), order.append(("updated", group))))
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)]
    fit(make, strategy, max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    assert Worker._do is do
    after = order[order.index(("read", order[[kind for kind, _ in order].index("read")][1])) :]
    reads = [g for kind, g in after if kind == "read"]
    updates = [g for kind, g in after if kind == "updated"]
    assert sorted(reads) == sorted(set(updates))
    for group in reads:
        assert after.index(("read", group)) < after.index(("updated", group))
    assert after.index(("updated", updates[0])) < after.index(("read", reads[-1]))


class Writes(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        with torch.no_grad():
            pl_module.head.bias.add_(1)


def test_nothing_is_written_beside_training_where_others_change_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    write = checkpoints._write
    monkeypatch.setattr(
        checkpoints, "_write", lambda *a, **k: (threads.append(threading.current_thread()), write(*a, **k))
    )
    for callbacks in (
        [Writes(), ModelCheckpoint(tmp_path / "a", every_n_train_steps=2)],
        [ModelCheckpoint(tmp_path / "b", every_n_train_steps=2, save_last="link")],
    ):
        fit(make, MegaTrainStrategy(save_async=True), max_steps=4, callbacks=callbacks, enable_checkpointing=True)
    assert len(threads) == 4
    assert set(threads) == {threading.main_thread()}


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_and_deletes(
    save_last: Any, checkpoint_format: str, save_async: bool, tmp_path: Path
) -> None:
    strategy = MegaTrainStrategy(checkpoint_format=checkpoint_format, save_async=save_async)
    saver = ModelCheckpoint(
        tmp_path,
        filename="{step}",
        monitor="step",
        mode="max",
        every_n_train_steps=2,
        save_top_k=2,
        save_last=save_last,
    )
    fit(make, strategy, max_steps=10, callbacks=[saver], enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]
    for name, step in (("last", 10), ("step=8", 8), ("step=10", 10)):
        assert read(tmp_path / f"{name}.ckpt")["global_step"] == step
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    module = make()
    again = L.Trainer(
        strategy=MegaTrainStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=12,
        callbacks=[ModelCheckpoint(tmp_path)],
        **{**QUIET, "enable_checkpointing": True},
    )
    again.fit(module, loader(), ckpt_path="last", weights_only=True)
    assert again.global_step == 12


def test_an_error_of_a_save_beside_training_surfaces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    old = tmp_path / "step=2.ckpt"
    strategy = MegaTrainStrategy(save_async=True)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)

    class Full(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                strategy._checkpoints.saver.wait()
                monkeypatch.setattr(checkpoints, "_write", fail)

        reads_weights = False

    with pytest.raises(OSError, match="No space left"):
        fit(make, strategy, max_steps=8, callbacks=[Full(), saver], enable_checkpointing=True)
    assert read(old)["global_step"] == 2  # its successor never came, so it was not removed
    assert not [t for t in threading.enumerate() if t.name.startswith("megatrain")]


def test_a_rescue_is_whole(tmp_path: Path) -> None:
    class Failing(zoo.Encoder):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    for checkpoint_format in FORMATS:
        rescue = OnExceptionCheckpoint(tmp_path, filename=checkpoint_format)
        strategy = MegaTrainStrategy(checkpoint_format=checkpoint_format, save_async=True)
        with pytest.raises(ZeroDivisionError):
            fit(partial(Failing, log_norm=False), strategy, callbacks=[rescue], enable_checkpointing=True)
        assert read(tmp_path / f"{checkpoint_format}.ckpt")["global_step"] == 5


def test_hooks_and_plugins_meet_ordinary_values(tmp_path: Path) -> None:
    """In bf16-mixed a checkpoint's masters are read late; whoever looks before that sees the true fp32 values."""

    class Hooked(zoo.Encoder):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["halves"] = {k: v.half() for k, v in state.items()}
            checkpoint["nested"] = [{"head": state["head.weight"]}]
            state["head.bias"] = state["head.bias"] + 1

    module, _ = fit(partial(Hooked, log_norm=False), MegaTrainStrategy(), max_steps=2, precision="bf16-mixed",
                          callbacks=[Saves(tmp_path / "x.ckpt")])  # fmt: skip
    saved = read(tmp_path / "x.ckpt")
    final = module.state_dict()
    assert torch.equal(saved["nested"][0]["head"], final["head.weight"])
    assert torch.equal(saved["state_dict"]["head.bias"], final["head.bias"] + 1)
    assert all(torch.equal(v, final[k].half()) for k, v in saved["halves"].items())
    assert all(type(v) is Tensor for v in saved["state_dict"].values())

    strategy = MegaTrainStrategy(checkpoint_io=AsyncCheckpointIO())
    module, _ = fit(make, strategy, max_steps=2, precision="bf16-mixed", callbacks=[Saves(tmp_path / "y.ckpt")])
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in read(tmp_path / "y.ckpt")["state_dict"].items())


class Saves(L.Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_other_file_systems(tmp_path: Path) -> None:
    url = "memory://checkpoints/x.ckpt"
    module, _ = fit(make, MegaTrainStrategy(), max_steps=2, precision="bf16-mixed", callbacks=[Saves(url)])
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=2, **QUIET)
    resumed = make()
    again.fit(resumed, loader(), ckpt_path=url, weights_only=True)
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in module.state_dict().items())
    with pytest.raises(ValueError, match=r"local file system.*checkpoint_format='ckpt'"):
        fit(make, MegaTrainStrategy(checkpoint_format="sharded"), max_steps=1, callbacks=[Saves(url)])


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_a_folder_with_anything_else_in_it_is_not_replaced(
    checkpoint_format: str, save_async: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "notes.txt").write_text("mine")
    strategy = MegaTrainStrategy(checkpoint_format=checkpoint_format, save_async=save_async)
    with pytest.raises(ValueError, match=r"runs is a folder .* holds 'deep', .*; move that, or set another path"):
        fit(make, strategy, max_steps=1, callbacks=[Saves(folder)])
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "runs", "runs/deep", "runs/deep/notes.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("new", FORMATS)
def test_a_checkpoint_replaces_one_of_either_format(new: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for checkpoint_format in (*FORMATS, new):
        fit(make, MegaTrainStrategy(checkpoint_format=checkpoint_format), max_steps=1, callbacks=[Saves(path)])
        assert path.is_dir() == (checkpoint_format == "sharded")
        assert read(path)["global_step"] == 1
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_large_checkpoints_are_folders_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "rank_zero_info", said.append)
    _, trainer = fit(make, MegaTrainStrategy(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    monkeypatch.setattr(checkpoints, "SHARDED_FROM", 1000)
    trainer.save_checkpoint(tmp_path / "large.ckpt")
    assert (tmp_path / "small.ckpt").is_file()
    assert (tmp_path / "large.ckpt").is_dir()
    assert len(said) == 1
    assert "folders (sharded)" in said[0]


class EveryHook(L.Callback):
    """Writes weights in one hook."""

    def __init__(self, hook: str) -> None:
        def write(trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            with torch.no_grad():
                pl_module.head.bias.add_(1)

        setattr(self, hook, write)


@pytest.mark.parametrize(
    "callback",
    [
        partial(EveryHook, "on_train_epoch_start"),
        partial(EveryHook, "on_train_epoch_end"),
        partial(EveryHook, "on_before_optimizer_step"),
        partial(EveryHook, "on_validation_start"),
        partial(StochasticWeightAveraging, 1e-3, swa_epoch_start=1),
    ],
)
def test_whoever_may_write_makes_saves_wait(callback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "rank_zero_info", said.append)
    monkeypatch.setattr(legality, "rank_zero_warn", said.append)
    strategy = MegaTrainStrategy(save_async=True)
    seen = []
    prepare = strategy._checkpoints.prepare
    strategy._checkpoints.prepare = lambda trainer: (prepare(trainer), seen.append(strategy._checkpoints._beside))
    fit(make, strategy, max_steps=2, callbacks=[callback()])
    assert seen == [False]
    assert any("written before training goes on" in text for text in said)


def test_what_a_hook_takes_from_the_state_is_of_the_step_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Takes(zoo.Encoder):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = dict(checkpoint["state_dict"])

    write_slowly(monkeypatch)
    for checkpoint_format in FORMATS:
        strategy = MegaTrainStrategy(save_async=True, checkpoint_format=checkpoint_format, update="next_forward")
        saver = ModelCheckpoint(tmp_path / checkpoint_format, filename="x", every_n_train_steps=2)
        fit(
            partial(Takes, layers=2, log_norm=False), strategy, max_steps=3, precision="bf16-mixed", callbacks=[saver],
            enable_checkpointing=True,
        )  # fmt: skip
        saved = read(tmp_path / checkpoint_format / "x.ckpt")
        assert all(torch.equal(value, saved["state_dict"][name]) for name, value in saved["mine"].items())


def test_ties_stay_ties_beside_training(tmp_path: Path) -> None:
    sizes = []
    for save_async in (False, True):
        saver = ModelCheckpoint(tmp_path / str(save_async), filename="x", every_n_train_steps=2)
        strategy = MegaTrainStrategy(save_async=save_async)
        fit(partial(zoo.Tied, log_norm=False), strategy, max_steps=2, callbacks=[saver], enable_checkpointing=True)
        path = tmp_path / str(save_async) / "x.ckpt"
        state = read(path)["state_dict"]
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        sizes.append(path.stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 2000


def test_an_error_while_a_save_is_prepared_leaves_nothing_held(tmp_path: Path) -> None:
    class Locked(zoo.Encoder):
        broken = True

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.broken:
                checkpoint["lock"] = threading.Lock()

    module = Locked(layers=2, log_norm=False)
    saver = ModelCheckpoint(tmp_path, filename="x", every_n_train_steps=2)
    trainer = L.Trainer(strategy=MegaTrainStrategy(save_async=True), accelerator="cpu", devices=1, max_steps=4,
                        callbacks=[saver], **{**QUIET, "enable_checkpointing": True})  # fmt: skip
    with pytest.raises(TypeError, match="lock"):
        trainer.fit(module, loader())
    module.broken = False
    trainer.fit(module, loader())
    assert trainer.global_step == 4


def test_a_rescue_is_written_though_the_save_before_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoints._write

    def fails_once(checkpoint: Any, target: Path, **kwargs: Any) -> None:
        if checkpoint["global_step"] == 2:
            raise OSError(28, "No space left on device")
        write(checkpoint, target, **kwargs)

    class Failing(zoo.Encoder):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(checkpoints, "_write", fails_once)
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "rank_zero_warn", said.append)
    callbacks = [
        OnExceptionCheckpoint(tmp_path, filename="rescue"),
        ModelCheckpoint(tmp_path, filename="x", every_n_train_steps=2),
    ]
    with pytest.raises(ZeroDivisionError):
        fit(partial(Failing, layers=2, log_norm=False), MegaTrainStrategy(save_async=True), callbacks=callbacks,
            enable_checkpointing=True)  # fmt: skip
    assert read(tmp_path / "rescue.ckpt")["global_step"] == 3
    assert "No space left" in said[0]


def test_an_error_of_a_removal_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(path)

    write_slowly(monkeypatch)
    monkeypatch.setattr(saver_module, "remove_whole", denied)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)
    with pytest.raises(PermissionError):
        fit(make, MegaTrainStrategy(save_async=True), max_steps=4, callbacks=[saver], enable_checkpointing=True)
