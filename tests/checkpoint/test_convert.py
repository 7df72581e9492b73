"""Checkpoints from one format to another, and to safetensors."""

import argparse
import json
import os
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import FORMATS, MegaTrainStrategy, assert_same_optimizer_bits, fit, loader, stock
from matrix import assert_equal
from probing import run_probe
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain.checkpoint.convert import INDEX_FILE, convert
from lightning_megatrain.checkpoint.lazy import PART_BYTES
from lightning_megatrain.checkpoint.sharded import read_sharded, write_sharded
from lightning_megatrain.checkpoint.single import read_single

STRATEGIES = {"megatrain": MegaTrainStrategy, "stock": stock}


class Remembering(zoo.Cosine):
    """Keeps hyperparameters, state that is no tensor, and a value of its own in the checkpoint."""

    def __init__(self, width: int = 32, notes: Any = ("a", {"b": 1.5})) -> None:
        super().__init__(width=width, log_norm=False)
        self.save_hyperparameters()

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        memory = torch.arange(8.0)
        checkpoint["own"] = {"half": memory[2:6], "whole": memory, "list": [torch.ones(3), None]}


def trained(path: Path, strategy: Any, make: Any = Remembering, **arguments: Any) -> L.Trainer:
    _, trainer = fit(make, strategy, max_steps=3, **arguments)
    trainer.save_checkpoint(path)
    return trainer


def plain(path: Path, state: dict[str, Any], **more: Any) -> Path:
    torch.save({"state_dict": state, **more}, path)
    return path


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


# Between checkpoints


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_there_and_back_is_the_same_in_every_bit(tmp_path: Path, name: str, precision: str) -> None:
    trained(tmp_path / "a.ckpt", STRATEGIES[name](), precision=precision)
    there = convert(tmp_path / "a.ckpt", to="sharded")
    back = convert(there.path, to="ckpt")
    first, last = load(tmp_path / "a.ckpt"), load(back.path)
    assert {"loops", "hyper_parameters", "lr_schedulers", "own"} < last.keys()
    assert last["optimizer_states"][0]["state"]
    assert last["state_dict"]["_extra_state"] == {"seen": 3}
    assert_equal(first, last, "checkpoint")
    assert last["state_dict"]._metadata == first["state_dict"]._metadata
    half, whole = last["own"]["half"], last["own"]["whole"]
    assert half.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert there.tensors == back.tensors
    assert there.nbytes == back.nbytes


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("to", FORMATS)
def test_a_training_resumes_from_what_was_written(tmp_path: Path, name: str, to: Any) -> None:
    source = tmp_path / "a.ckpt"
    trained(source, MegaTrainStrategy(checkpoint_format="sharded" if to == "ckpt" else "ckpt"))
    target = convert(source, to=to).path
    if to == "sharded" and name == "stock":  # which reads files
        target = convert(target, to="ckpt").path

    def resumed(path: Path) -> tuple[zoo.Zoo, L.Trainer]:
        module, strategy = Remembering(), MegaTrainStrategy() if path == source else STRATEGIES[name]()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_steps=6, enable_model_summary=False, **quiet
        )
        L.seed_everything(3, verbose=False)
        trainer.fit(module, loader(), ckpt_path=path, weights_only=True)
        return module, trainer

    (a, trainer_a), (b, trainer_b) = resumed(source), resumed(target)
    assert trainer_b.global_step == 6
    if name == "megatrain":
        assert_equal(a.state_dict(), b.state_dict(), "weights")
        assert_same_optimizer_bits(trainer_a, trainer_b)


def test_large_tensors_views_and_odd_forms_survive(tmp_path: Path) -> None:
    fused = torch.randn(3, 40)
    state = OrderedDict(
        large=torch.randn(PART_BYTES // 1024 + 7, 512),
        mapped=torch.randn(600, 1024),
        q=fused[0],
        k=fused[1],
        turned=torch.randn(1024, 600).t(),
        square=torch.arange(2.0**20).view(1024, 1024),
        scalar=torch.tensor(3),
        empty=torch.empty(0, 4),
        flags=torch.tensor([True, False]),
        half=torch.randn(5).half(),
    )
    state["turned_square"] = state["square"].t()
    averages = {"again": [state["mapped"].clone()], "pair": (torch.ones(2), torch.zeros(1))}
    averages["same"] = averages["again"]
    path = plain(tmp_path / "a.ckpt", state, averages=averages, epoch=2)
    back = convert(convert(path, to="sharded").path, to="ckpt").path
    assert_equal(load(path), load(back), "checkpoint")
    again = load(back)["averages"]
    assert again["same"] is again["again"]


def test_a_folder_of_sharded_weights_without_optimizer_becomes_a_file(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"w": torch.randn(4)}, "epoch": 1}
    write_sharded(checkpoint, tmp_path / "weights")
    done = convert(tmp_path / "weights", to="ckpt")
    assert done.path == tmp_path / "weights-single.ckpt"
    assert_equal(load(done.path), checkpoint, "checkpoint")


def test_objects_of_other_classes_are_read_only_on_request(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.ckpt", {"w": torch.ones(2)}, hyper_parameters=argparse.Namespace(lr=0.1))
    with pytest.raises(ValueError, match=r"argparse.Namespace.*weights_only=false"):
        convert(path, to="sharded")
    sharded = convert(path, to="sharded", weights_only=False).path
    assert read_sharded(sharded, weights_only=False)["hyper_parameters"].lr == 0.1
    with pytest.raises(ValueError, match=r"argparse.Namespace.*weights_only=false"):
        convert(sharded, to="ckpt")


# Safetensors


@pytest.mark.parametrize("source", FORMATS)
def test_safetensors_hold_the_weights(tmp_path: Path, source: str) -> None:
    trained(tmp_path / "a.ckpt", MegaTrainStrategy(checkpoint_format=source), precision="bf16-mixed")
    done = convert(tmp_path / "a.ckpt", to="safetensors")
    assert done.path == tmp_path / "a-safetensors"
    assert [p.name for p in done.path.iterdir()] == ["model.safetensors"]
    assert done.no_tensors == ("_extra_state",)
    whole = tmp_path / "a.ckpt" if source == "ckpt" else convert(tmp_path / "a.ckpt", to="ckpt").path
    expected = {k: v for k, v in load(whole)["state_dict"].items() if isinstance(v, Tensor)}
    found = load_file(done.path / "model.safetensors")
    assert_equal(found, expected, "weights")
    assert done.tensors == len(found)
    assert done.nbytes == sum(t.nbytes for t in found.values())
    with safe_open(done.path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_are_of_the_size_asked_for_and_indexed(tmp_path: Path) -> None:
    state = {name: torch.randn(count) for name, count in zip("abcde", (256, 256, 512, 4096, 16), strict=True)}
    done = convert(plain(tmp_path / "a.ckpt", state), to="safetensors", shard_size="2KiB")
    index = json.loads((done.path / INDEX_FILE).read_text())
    files = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in state.values())}
    assert index["weight_map"] == dict(zip("abcde", (files[0], *files), strict=True))
    assert sorted(p.name for p in done.path.iterdir()) == sorted([*files, INDEX_FILE])
    assert done.files == 4
    found = {k: v for file in files for k, v in load_file(done.path / file).items()}
    assert_equal(found, state, "weights")


class Llama(L.LightningModule):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        small = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **small, **config))
        self.loss_weight = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "model"])
def test_transformers_loads_what_is_left_of_the_prefix(tmp_path: Path, tied: bool, prefix: str) -> None:
    module = Llama(tie_word_embeddings=tied)
    path = plain(tmp_path / "a.ckpt", module.state_dict())
    done = convert(path, to="safetensors", prefix=prefix, shard_size="16KiB")
    assert done.without_prefix == ("loss_weight",)
    assert done.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    module.model.config.save_pretrained(done.path)
    loaded = LlamaForCausalLM.from_pretrained(done.path)
    assert_equal(loaded.state_dict(), module.model.state_dict(), "weights")


def test_ties_are_unknown_in_a_sharded_checkpoint(tmp_path: Path) -> None:
    shared = torch.randn(3)
    path = plain(tmp_path / "a.ckpt", {"first": shared, "part": shared[:2], "second": shared.detach()})
    done = convert(path, to="safetensors")
    assert done.tied == {"second": "first"}
    assert load_file(done.path / "model.safetensors").keys() == {"first", "part"}
    both = convert(convert(path, to="sharded").path, to="safetensors")
    assert both.tied == {}
    assert_equal(load_file(both.path / "model.safetensors"), load(path)["state_dict"], "weights")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floating_point_weights_are_converted(tmp_path: Path, dtype: Any) -> None:
    state = {
        "w": torch.randn(9, 3),
        "b": torch.randn(4).bfloat16(),
        "d": torch.tensor(1 / 3, dtype=torch.float64),
        "inf": torch.tensor([float("inf"), float("nan")]),
        "count": torch.tensor([1, 2]),
        "mask": torch.tensor([True]),
    }
    done = convert(plain(tmp_path / "a.ckpt", state), to="safetensors", dtype=dtype)
    wanted = getattr(torch, dtype)
    found = load_file(done.path / "model.safetensors")
    for name in ("w", "b", "d"):
        assert_equal(found[name], state[name].to(wanted), name)
    assert found["inf"].isinf().tolist() == [True, False]
    assert [found["count"].dtype, found["mask"].dtype] == [torch.int64, torch.bool]
    assert done.nbytes == sum(t.nbytes for t in found.values())


def test_values_that_a_dtype_cannot_hold_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.ckpt", {"fine": torch.ones(2), "w": torch.tensor([1.0, 1e5])})
    with pytest.raises(ValueError, match=r"'w' has values of up to 1e\+05, too large for torch.float16.*another dtype"):
        convert(path, to="safetensors", dtype="float16", shard_size=8)
    assert os.listdir(tmp_path) == ["a.ckpt"]


# Refusals


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return plain(tmp_path / "a.ckpt", {"model.w": torch.ones(2)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "gguf"}, r"to='gguf' is not valid: it must be ckpt or sharded or safetensors"),
        ({"to": "ckpt"}, r"is a single file already; set to=sharded or to=safetensors"),
        ({"to": "sharded", "dtype": "bfloat16"}, r"dtype='bfloat16' applies to to=safetensors and to=huggingface"),
        ({"to": "sharded", "prefix": "model."}, r"prefix='model.' applies to to=safetensors and to=huggingface"),
        ({"to": "safetensors", "prefix": "net."}, r"prefix='net.' is in no name of .*first is 'model.w'"),
        ({"to": "safetensors", "prefix": "mod"}, r"prefix='mod' is in no name"),
        ({"to": "safetensors", "shard_size": "much"}, r"shard_size='much' is not valid"),
        ({"to": "safetensors", "shard_size": 0}, r"shard_size=0 is not valid"),
        ({"to": "safetensors", "out": "s3://bucket/x"}, r"out=s3://bucket/x is not on the local file system"),
    ],
)
def test_arguments_that_do_not_fit_are_named(small: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(small, **arguments)
    assert os.listdir(small.parent) == ["a.ckpt"]


def test_a_sharded_checkpoint_is_not_written_as_one_again(small: Path) -> None:
    sharded = convert(small, to="sharded").path
    with pytest.raises(ValueError, match="is a sharded checkpoint already; set to=ckpt or to=safetensors"):
        convert(sharded, to="sharded")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.ckpt does not exist; set ckpt"):
        convert(tmp_path / "nowhere.ckpt", to="sharded")
    torch.save({"weights": torch.ones(1)}, tmp_path / "bare.ckpt")
    with pytest.raises(ValueError, match="has no 'state_dict'"):
        convert(tmp_path / "bare.ckpt", to="sharded")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"has no \.metadata"):
        convert(tmp_path / "folder", to="ckpt")
    with pytest.raises(ValueError, match="holds no tensor"):
        convert(plain(tmp_path / "hollow.ckpt", {}), to="safetensors")
    sparse = plain(tmp_path / "sparse.ckpt", {"s": torch.eye(2).to_sparse()})
    with pytest.raises(ValueError, match=r"'s' .*cannot be kept in safetensors"):
        convert(sparse, to="safetensors")


@pytest.mark.parametrize("to", ["sharded", "safetensors"])
def test_an_earlier_export_is_replaced_only_on_request(small: Path, to: Any) -> None:
    out = small.parent / "out"
    convert(small, to=to, out=out)
    before = sorted(os.listdir(out))
    plain(small, {"model.w": torch.zeros(2)})
    with pytest.raises(ValueError, match="exists already; set overwrite=true"):
        convert(small, to=to, out=out)
    convert(small, to=to, out=out, overwrite=True)
    assert sorted(os.listdir(out)) == before
    assert sorted(os.listdir(small.parent)) == ["a.ckpt", "out"]
    if to == "safetensors":
        assert_equal(load_file(out / "model.safetensors"), {"model.w": torch.zeros(2)}, "weights")
    else:
        values = read_sharded(out, weights_only=True)["state_dict"]
        assert not values["model.w"].any()


def test_neither_the_checkpoint_nor_other_files_are_overwritten(small: Path) -> None:
    sharded = convert(small, to="sharded").path
    for out in (sharded, sharded / "inside", small.parent):
        with pytest.raises(ValueError, match="each other's place"):
            convert(sharded, to="safetensors", out=out, overwrite=True)
    done = convert(small, to="safetensors")
    (done.path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds 'config.json', which would be lost"):
        convert(small, to="safetensors", overwrite=True)
    assert read_single(small, weights_only=True)["state_dict"].keys() == {"model.w"}


# Memory


@pytest.mark.timeout(240)
def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    """192 MiB of weights and, in a whole checkpoint, as much of optimizer states, in tensors of 8 MiB."""
    code = """
        import gc, json, re, sys
        from pathlib import Path
        import torch
        from lightning_megatrain.checkpoint.convert import convert

        def status(field):
            return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

        def write(path, tensors):
            state = {f"w{i}": torch.full((256, 8192), float(i)) for i in range(tensors)}
            moments = {i: {"exp_avg": torch.full((256, 8192), float(i))} for i in range(tensors)}
            torch.save({"state_dict": state, "optimizer_states": [{"state": moments, "param_groups": []}]}, path)

        def rise(source, to, out):
            gc.collect()
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            convert(source, to=to, out=out, shard_size="32MiB")
            return status("VmHWM") - before

        def rises(folder, tensors):
            folder.mkdir()
            write(folder / "a.ckpt", tensors)
            return {
                "ckpt to sharded": rise(folder / "a.ckpt", "sharded", folder / "b.ckpt"),
                "sharded to ckpt": rise(folder / "b.ckpt", "ckpt", folder / "c.ckpt"),
                "ckpt to safetensors": rise(folder / "a.ckpt", "safetensors", folder / "d"),
                "sharded to safetensors": rise(folder / "b.ckpt", "safetensors", folder / "e"),
            }

        folder = Path(sys.argv[1])
        rises(folder / "small", 1)  # imports
        print(json.dumps(rises(folder / "large", 24)))
    """
    found = run_probe("-c", textwrap.dedent(code), tmp_path)
    assert len(found) == 4
    assert max(found.values()) < 80 * 2**20, found
