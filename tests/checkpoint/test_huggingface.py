"""From a Hugging Face folder through a training of no steps, and back to one with the same bits."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fitting import FORMATS, QUIET, MegaTrainStrategy, stock
from matrix import assert_equal
from model_folders import CONFIGS, VOCABULARY, edit_json, model_folder, tensors_in
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_megatrain.checkpoint import huggingface
from lightning_megatrain.checkpoint.convert import convert
from lightning_megatrain.checkpoint.huggingface import export_huggingface
from lightning_megatrain.recipes.causal_lm import CausalLM


def loader() -> DataLoader[Any]:
    rows = torch.randint(3, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(4))
    return DataLoader([{"input_ids": row} for row in rows], batch_size=2)


def checkpoint_of(
    module: CausalLM, path: Path, strategy: Any = None, *, steps: int = 0, precision: str = "bf16-mixed"
) -> Path:
    strategy = MegaTrainStrategy() if strategy is None else strategy
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, precision=precision, max_steps=steps, **QUIET)
    trainer.fit(module, loader())
    assert trainer.global_step == steps
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", CONFIGS)
def test_in_and_out_again_is_the_same_in_every_bit(
    tmp_path: Path, arch: str, dtype: torch.dtype, checkpoint_format: Any
) -> None:
    shard_size = "1GB" if checkpoint_format == "ckpt" else "20KB"
    folder = model_folder(tmp_path / "model", arch, dtype, shard_size=shard_size)
    path = tmp_path / "a.ckpt"
    checkpoint_of(CausalLM(pretrained=str(folder)), path, MegaTrainStrategy(checkpoint_format=checkpoint_format))
    done = export_huggingface(path, shard_size=shard_size)
    assert done.path == tmp_path / "a-huggingface"

    original, written = tensors_in(folder), tensors_in(done.path)
    assert_equal(written, original, "files")
    assert done.tensors == len(original)
    assert (done.files > 1) == (checkpoint_format == "sharded")
    loaded = AutoModelForCausalLM.from_pretrained(done.path, dtype="auto")
    assert_equal(loaded.state_dict(), AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict(), "state")
    configs = [AutoConfig.from_pretrained(place).to_dict() for place in (folder, done.path)]
    assert_equal(*({**config, "_name_or_path": None} for config in configs), "config")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_other_precisions_keep_the_bits_too(tmp_path: Path, precision: str) -> None:
    folder = model_folder(tmp_path / "model", "qwen2")
    path = checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt", precision=precision)
    assert_equal(tensors_in(export_huggingface(path).path), tensors_in(folder), "files")


def test_the_stock_strategy_keeps_the_bits_too(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen2")
    path = checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt", stock(), precision="32-true")
    assert_equal(tensors_in(export_huggingface(path).path), tensors_in(folder), "files")


def test_what_was_trained_is_what_is_written(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen3_moe")
    module = CausalLM(pretrained=str(folder))
    path = checkpoint_of(module, tmp_path / "a.ckpt", steps=3)
    done = export_huggingface(path, dtype="float32")
    loaded = AutoModelForCausalLM.from_pretrained(done.path, dtype="auto")
    assert loaded.dtype == torch.float32
    assert_equal(loaded.state_dict(), module.model.state_dict(), "weights")
    before, after = tensors_in(folder), tensors_in(done.path)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name].float(), after[name]) for name in before if "expert" in name)


def test_a_model_that_began_at_random_is_written_too(tmp_path: Path) -> None:
    module = CausalLM("qwen2", CONFIGS["qwen2"])
    path = checkpoint_of(module, tmp_path / "a.ckpt")
    done = export_huggingface(path)
    loaded = AutoModelForCausalLM.from_pretrained(done.path, dtype="auto")
    assert_equal(loaded.state_dict(), module.model.state_dict(), "weights")
    assert done.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert done.notes == (
        "no tokenizer, because the training began with none that is there; set tokenizer=PATH_OR_NAME",
    )
    written = json.loads((done.path / "config.json").read_text())
    assert (written["architectures"], written["dtype"]) == (["Qwen2ForCausalLM"], "float32")


def test_transformers_read_experts_under_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are written where the names of the publisher's files are not known."""
    folder = model_folder(tmp_path / "model", "qwen3_moe")
    path = checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt")
    monkeypatch.setattr(huggingface, "revert_weight_conversion", None)
    done = export_huggingface(path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors_in(done.path)
    a, b = (AutoModelForCausalLM.from_pretrained(place, dtype="auto").state_dict() for place in (folder, done.path))
    assert_equal(a, b, "weights")


def test_tokenizer_and_generation_config_come_from_where_the_training_began(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tokenizer=True)
    edit_json(folder / "generation_config.json", max_new_tokens=7)
    path = checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt")
    done = export_huggingface(path)
    assert done.notes == (f"tokenizer of {folder}",)
    assert AutoTokenizer.from_pretrained(done.path)("w5 w6")["input_ids"] == [5, 6]
    assert GenerationConfig.from_pretrained(done.path).max_new_tokens == 7

    shutil.move(folder, tmp_path / "moved")
    bare = export_huggingface(path, out=tmp_path / "bare")
    assert bare.notes[0].startswith("no tokenizer")
    assert GenerationConfig.from_pretrained(bare.path).eos_token_id == 2
    again = export_huggingface(path, out=tmp_path / "bare", overwrite=True, tokenizer=str(tmp_path / "moved"))
    assert again.notes == (f"tokenizer of {tmp_path / 'moved'}",)
    assert AutoTokenizer.from_pretrained(again.path)("w5 w6")["input_ids"] == [5, 6]
    export_huggingface(path, out=tmp_path / "bare", overwrite=True)
    assert not list((tmp_path / "bare").glob("tokenizer*"))


def test_a_resumed_training_remembers_where_it_began(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tokenizer=True)
    path = checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt")
    again = checkpoint_of(CausalLM.load_from_checkpoint(path), tmp_path / "b.ckpt")
    done = export_huggingface(again)
    assert done.notes == (f"tokenizer of {folder}",)
    assert_equal(tensors_in(done.path), tensors_in(folder), "files")


# Refusals


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "model")
    return checkpoint_of(CausalLM(pretrained=str(folder)), tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "model"}, r"model exists already; set overwrite=true"),
        ({"out": "model", "overwrite": True}, r"model is the folder of the model that the training began with"),
        ({"prefix": "net"}, r"prefix='net' is in no name of .*first is 'model\.model"),
        (
            {"prefix": "model.model"},
            r"does not hold the weights of a LlamaForCausalLM of its config: it lacks 21, the fir",
        ),
        ({"tokenizer": "nobody/nothing"}, r"tokenizer=nobody/nothing is no local folder, and the Hugging Face Hub did"),
        ({"tokenizer": "/nope"}, r"tokenizer=/nope does not exist; set a tokenizer's folder, or a name on the Hugging"),
        ({"tokenizer": "model"}, r"tokenizer=model has no tokenizer\.json and no other vocabulary"),
        ({"shard_size": "much"}, r"shard_size='much' is not valid"),
        ({"out": "s3://bucket/x"}, r"out=s3://bucket/x is not on the local file system"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(trained.parent)
    with pytest.raises(ValueError, match=message):
        export_huggingface(trained, **arguments)
    assert sorted(os.listdir()) == ["a.ckpt", "model"]


def edited(path: Path, **changes: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    for key, change in changes.items():
        change(checkpoint[key])
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hyper_parameters": lambda h: h.clear()}, "no hyper_parameters 'arch' and 'config'.*set to=safetensors"),
        ({"hyper_parameters": lambda h: h.update(arch="nonesuch")}, "do not take arch='nonesuch'"),
        ({"state_dict": lambda s: s.pop("model.model.norm.weight")}, "lacks 1, the first being 'model.norm.weight'"),
        ({"state_dict": lambda s: s.update({"model.x": torch.ones(1)})}, "has beside them 1, the first being 'x'"),
        ({"state_dict": lambda s: s.update({"model.model.norm.weight": torch.ones(3)})}, "in other shapes 1"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(trained: Path, changes: Any, message: str) -> None:
    edited(trained, **changes)
    with pytest.raises(ValueError, match=message):
        export_huggingface(trained)
    assert sorted(os.listdir(trained.parent)) == ["a.ckpt", "model"]


def test_other_files_are_not_overwritten(trained: Path) -> None:
    done = export_huggingface(trained)
    with pytest.raises(ValueError, match=r"holds 'config.json', which would be lost"):
        convert(trained, to="safetensors", out=done.path, overwrite=True)
    (done.path / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.md', which would be lost"):
        export_huggingface(trained, overwrite=True)
