"""A pretrained model from a Hugging Face folder: what is read, what is refused, and how it trains."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import lightning as L
import pytest
import torch
from fitting import QUIET, MegaTrainStrategy, stock
from lightning.pytorch.callbacks import ModelCheckpoint
from matrix import assert_equal
from model_folders import CONFIGS, VOCABULARY, edit_json, model_folder, tensors_in
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatrain.checkpoint import hub
from lightning_megatrain.memory.mapped import FileMappings
from lightning_megatrain.recipes.causal_lm import CausalLM

BF16 = torch.bfloat16


def opened(folder: Path, **arguments: Any) -> CausalLM:
    return CausalLM(pretrained=str(folder), **arguments)


def fitted(
    module: CausalLM, strategy: Any, *, steps: int = 4, resume: Path | None = None, **arguments: Any
) -> L.Trainer:
    rows = torch.randint(3, VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(4))
    data = DataLoader([{"input_ids": row} for row in rows], batch_size=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=steps, **{**QUIET, **arguments})
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return trainer


# What is read


@pytest.mark.parametrize("arch", CONFIGS)
def test_values_and_computations_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    folder = model_folder(tmp_path, arch, shard_size="20KB")
    torch.manual_seed(3)
    random = torch.get_rng_state()
    module = opened(folder)
    assert torch.equal(torch.get_rng_state(), random)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert_equal(module.model.state_dict(), theirs.state_dict(), "state")
    assert_equal(dict(module.model.named_buffers()), dict(theirs.named_buffers()), "buffers")
    assert all(m.training for m in module.model.modules())
    assert all(p.requires_grad for p in module.parameters())
    ids = torch.arange(3, 13).view(1, -1)
    assert_equal(module.eval()(ids), theirs(ids).logits, "logits")


def test_weights_stay_in_their_files(tmp_path: Path) -> None:
    module = opened(model_folder(tmp_path, shard_size="20KB"))
    mappings = FileMappings()
    assert all(mappings.hold(p) for p in module.model.parameters())


def test_a_device_context_of_a_trainer_changes_nothing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", precision="bf16-true", **QUIET).init_module():
        module = opened(folder)
    assert_equal(module.model.state_dict(), opened(folder).model.state_dict(), "state")


def test_on_the_meta_device_only_the_configuration_is_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    count = sum(p.numel() for p in opened(folder).model.parameters())
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        module = opened(folder)
    assert all(p.is_meta for p in module.model.parameters())
    assert sum(p.numel() for p in module.model.parameters()) == count


def test_a_tensor_of_another_dtype_keeps_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tensors = tensors_in(folder)
    fine = torch.rand(32) + 1
    save_file({**tensors, "model.norm.weight": fine}, folder / "model.safetensors", metadata={"format": "pt"})
    module = opened(folder)
    assert_equal(module.model.model.norm.weight.data, fine, "norm")
    assert module.model.lm_head.weight.dtype == BF16


def test_the_files_dtype_counts_and_not_what_the_configuration_says(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, dtype=torch.float32)
    edit_json(folder / "config.json", dtype="bfloat16")
    module = opened(folder)
    assert_equal(dict(module.model.state_dict()), tensors_in(folder), "state")
    assert module.hparams["config"]["dtype"] == "float32"


def test_harmless_leftovers_of_old_releases_are_ignored(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors_in(folder), **old}, folder / "model.safetensors", metadata={"format": "pt"})
    opened(folder)


def test_a_checkpoint_is_loaded_without_the_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen2", max_position_embeddings=77)
    module = opened(folder, lr=0.5)
    fitted(module, MegaTrainStrategy(), precision="bf16-mixed").save_checkpoint(tmp_path / "a.ckpt")
    shutil.rmtree(folder)
    again = CausalLM.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert_equal(again.model.state_dict(), module.model.state_dict(), "state")
    assert again.model.config.max_position_embeddings == 77
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    expected = {"arch": "qwen2", "pretrained": None, "origin": str(folder), "lr": 0.5}
    assert expected.items() <= again.hparams.items()
    json.dumps(again.hparams["config"])


# Training


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3_moe"])
def test_the_same_numbers_as_the_stock_strategy(tmp_path: Path, arch: str) -> None:
    folder = model_folder(tmp_path, arch)
    states = []
    for strategy in (MegaTrainStrategy(), stock()):
        module = opened(folder)
        trainer = fitted(module, strategy, precision="32-true")
        states.append((module.state_dict(), trainer.optimizers[0].state_dict()["state"]))
    assert {v.dtype for v in states[1][0].values()} == {torch.float32}
    assert_equal(*states, "after training")
    assert not torch.equal(module.model.model.norm.weight, tensors_in(folder)["model.norm.weight"].float())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_resumed_training_goes_on_with_the_same_bits(tmp_path: Path, precision: str) -> None:
    """The checkpoint's masters are wider than the parameters that they are loaded into."""
    folder = model_folder(tmp_path / "model")
    straight, resumed = opened(folder), opened(folder)
    six = {"steps": 6, "limit_train_batches": 1, "precision": precision}
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fitted(straight, MegaTrainStrategy(), callbacks=[saver], enable_checkpointing=True, **six)
    fitted(resumed, MegaTrainStrategy(), resume=tmp_path / "step=3.ckpt", **six)
    assert_equal(straight.state_dict(), resumed.state_dict(), "weights")


def test_training_leaves_the_files_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, dtype=torch.float32)
    before = (folder / "model.safetensors").read_bytes()
    for strategy in (MegaTrainStrategy(), stock()):
        fitted(opened(folder), strategy, precision="32-true")
        assert (folder / "model.safetensors").read_bytes() == before


# Agreement with what else is set


def test_an_architecture_and_values_that_are_the_folders_are_fine(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, rope_theta=5e5)
    same = {"hidden_size": 32, "rope_theta": 500000.0, "eos_token_id": 9, "rms_norm_eps": 1e-6}
    assert_equal(opened(folder, arch="llama", config=same).state_dict(), opened(folder).state_dict(), "state")


@pytest.mark.parametrize(
    ("arch", "config", "message"),
    [
        (
            "qwen2",
            None,
            r"model\.arch='qwen2' differs from model\.pretrained=.*, which is a 'llama'; set model=pretrained",
        ),
        (
            "llama",
            {"hidden_size": 64},
            r"model\.config differs from .*: hidden_size=64, where the folder has 32; set model",
        ),
        (None, {"rope_theta": 7.0}, r"rope_parameters=.*'rope_theta': 7\.0.*, where the folder has .*10000\.0"),
        (None, {"vocab_size": 32000}, r"vocab_size=32000, where the folder has 64; set model=pretrained"),
        (None, {"num_attention_heads": 7}, r"num_attention_heads=7, where the folder has 4"),
        (None, {"hiden_size": 32}, r"hiden_size=32, where the folder has None"),
        (None, {"rope_scaling": {"rope_type": "linear"}}, r"model\.config does not suit model\.arch='llama'"),
    ],
)
def test_what_differs_from_the_folder_is_named(tmp_path: Path, arch: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(model_folder(tmp_path), arch=arch, config=config)


def test_one_of_the_two_is_needed() -> None:
    with pytest.raises(ValueError, match=r"neither is set; set model\.pretrained=PATH_OR_NAME"):
        CausalLM()


# Names on the Hub


def test_a_name_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)
    asked: list[tuple[str, bool]] = []

    def fetched(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, any("safetensors" in pattern for pattern in allow_patterns)))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetched)
    module = CausalLM(pretrained="somebody/model")
    assert module.hparams["origin"] == "somebody/model"
    assert_equal(dict(module.model.state_dict()), tensors_in(folder), "state")
    with torch.device("meta"):
        CausalLM(pretrained="somebody/model")
    assert asked == [("somebody/model", True), ("somebody/model", False)]


def test_what_the_hub_gave_before_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, cache = "0" * 40, tmp_path / "hub"
    place = cache / "models--somebody--model"
    model_folder(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert CausalLM(pretrained="somebody/model").hparams["origin"] == "somebody/model"


class Wrapped(CausalLM):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


def test_a_subclass_keeps_what_a_checkpoint_needs_and_loads_exact_masters(tmp_path):
    folder = model_folder(tmp_path / "model", "llama", dtype=BF16)
    module = Wrapped(pretrained=str(folder), lr=1e-3)
    assert module.hparams["pretrained"] is None
    assert module.hparams["arch"] == "llama"
    trainer = fitted(module, MegaTrainStrategy(), steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    for arguments in ({}, {"pretrained": str(folder), "arch": None, "config": None}):
        loaded = Wrapped.load_from_checkpoint(tmp_path / "a.ckpt", **arguments)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, state[name])
    shutil.rmtree(folder)
    Wrapped.load_from_checkpoint(tmp_path / "a.ckpt")
