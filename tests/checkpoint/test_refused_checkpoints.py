"""What is not whole, or belongs elsewhere, is refused by name, and nothing was overwritten."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import FORMATS, QUIET, MegaTrainStrategy, fit, loader
from safetensors.torch import save_file

make = partial(zoo.Encoder, layers=2, log_norm=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for checkpoint_format in ("ckpt", "sharded"):
        strategy = MegaTrainStrategy(checkpoint_format=checkpoint_format)
        _, trainer = fit(make, strategy, max_steps=2)
        trainer.save_checkpoint(folder / checkpoint_format)
    return {name: folder / name for name in ("ckpt", "sharded")}


def copied(saved: Path, tmp_path: Path) -> Path:
    target = tmp_path / "x.ckpt"
    shutil.copytree(saved, target) if saved.is_dir() else shutil.copy(saved, target)
    return target


def refused(path: Path, match: str, make: Callable[[], zoo.Zoo] = make, error: Any = ValueError) -> None:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=4, **QUIET)
    with pytest.raises(error, match=match):
        trainer.fit(module, loader(), ckpt_path=path, weights_only=True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_is_cut_short(saved: dict[str, Path], share: float, tmp_path: Path) -> None:
    path = copied(saved["ckpt"], tmp_path)
    cut(path, share)
    refused(path, r"x\.ckpt cannot be read as a checkpoint; it was cut short or is of another kind")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_a_folder_of_which_a_file_is_cut_short(saved: dict[str, Path], name: str, share: float, tmp_path: Path) -> None:
    path = copied(saved["sharded"], tmp_path)
    cut(path / name, share)
    refused(path, rf"x\.ckpt/{name}.*(cut short|not whole)")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_a_folder_of_which_a_file_is_missing(saved: dict[str, Path], name: str, tmp_path: Path) -> None:
    path = copied(saved["sharded"], tmp_path)
    (path / name).unlink()
    refused(path, rf"x\.ckpt.*{name}")


def test_other_things_than_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("weights: none\n")
    refused(tmp_path / "text", "text cannot be read as a checkpoint")
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", r"a\.safetensors (cannot be read as a checkpoint|has no 'state_dict')")
    torch.save([1, 2], tmp_path / "list")
    refused(tmp_path / "list", "list holds a list and no Lightning checkpoint")
    torch.save({"weights": torch.ones(2)}, tmp_path / "dict")
    refused(tmp_path / "dict", "dict has no 'state_dict', so it is not a Lightning checkpoint")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty has no \.metadata")
    refused(tmp_path / "nowhere", "nowhere does not exist", error=FileNotFoundError)


def test_an_index_that_would_run_code_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    path = copied(saved["sharded"], tmp_path)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    refused(path, r"refers to (os|posix)\.system")
    assert not (tmp_path / "ran").exists()


class Wider(zoo.Encoder):
    """Its last weight has another shape than the one saved; all before it fit."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)
        self.head = torch.nn.Linear(32, zoo.VOCAB + 1)


class More(zoo.Encoder):
    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)
        self.extra = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_another_model(saved: dict[str, Path], checkpoint_format: str) -> None:
    path = saved[checkpoint_format]
    error = rf"{checkpoint_format} belongs to another model, so nothing was loaded(?s:.*)"
    refused(path, error + "head.weight.*shape", make=Wider, error=RuntimeError)
    refused(path, error + "Missing key.*extra", make=More, error=RuntimeError)
    refused(path, error + "Unexpected key", make=partial(make, layers=1), error=RuntimeError)


class SgdFor(zoo.Encoder):
    """Gives the optimizer other groups than the run that saved."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": list(self.parameters())}], lr=1e-2)


def test_another_optimizer(saved: dict[str, Path]) -> None:
    module = SgdFor(layers=2, log_norm=False)
    trainer = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=4, **QUIET)
    with pytest.raises(ValueError, match=r"parameter groups of \[.*\] parameters where AdamW has \[.*\]; nothing"):
        trainer.fit(module, loader(), ckpt_path=saved["ckpt"], weights_only=True)
    assert not trainer.optimizers[0].state


class Sgd(zoo.Encoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Adam(zoo.Encoder):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_the_state_of_another_kind_of_optimizer(tmp_path: Path) -> None:
    _, trainer = fit(partial(Sgd, layers=2, log_norm=False), MegaTrainStrategy(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "sgd.ckpt")
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=2, **QUIET)
    with pytest.raises(ValueError, match=r"has no 'step', which AdamW needs; nothing of it was loaded"):
        again.fit(Adam(layers=2, log_norm=False), loader(), ckpt_path=tmp_path / "sgd.ckpt", weights_only=True)
    assert "momentum" not in again.optimizers[0].param_groups[0]
