"""From a Hugging Face folder to a plan, a training and a Hugging Face folder again, as a person runs it."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from model_folders import model_folder, tensors_in
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.main import main
from lightning_megatrain.recipes.pretrained import Pretrained

pytestmark = pytest.mark.timeout(240)

DATA = ["data.seq_len=32", "data.max_train_bytes=65536", "data.val_windows=8"]
RUN = [*DATA, "trainer.accelerator=cpu", "trainer.max_steps=2", "sample.max_new_tokens=4"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return model_folder(tmp_path / "a=b", "qwen2", tokenizer=True, vocab_size=256)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_a_pretrained_model_is_planned_trained_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["model=pretrained", f"model.pretrained={folder}"]
    assert main(["plan", *model, *DATA, "host=workstation_64gb", "gpu=h100", "output=json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"] == sum(t.numel() for t in tensors_in(folder).values())

    assert main(["train", *model, *RUN, "precision=bf16_mixed"]) == 0
    [checkpoint] = Path("outputs").glob("*/*/checkpoints/*.ckpt")
    capsys.readouterr()
    assert main(["export", f"ckpt={checkpoint}", "to=huggingface", "out=mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {Path('mine').absolute()}"
    assert lines[1].startswith("26 tensors, ")
    assert lines[2:] == [
        "1 tied, so not written again: lm_head.weight (is model.embed_tokens.weight)",
        f"tokenizer of {folder}",
    ]
    loaded = AutoModelForCausalLM.from_pretrained("mine", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert tensors_in(Path("mine")).keys() == tensors_in(folder).keys()
    assert Path("mine/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()

    assert main(["train", "model=pretrained", "model.pretrained=mine", *RUN]) == 0


def test_what_is_wrong_is_said_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "plan"):
        arguments = [command, *DATA, *(["host=workstation_64gb", "gpu=h100"] if command == "plan" else [])]
        error = refusal(capsys, *arguments, f"model.pretrained={folder}")
        assert "model.arch='llama' differs from model.pretrained=" in error
        assert "set model=pretrained" in error
        assert "model.pretrained=PATH_OR_NAME" in refusal(capsys, *arguments, "model=pretrained")
        missing = refusal(capsys, *arguments, "model=pretrained", "model.pretrained=nobody/nothing")
        assert "nobody/nothing is no local folder" in missing
    torch.save({"state_dict": {"model.w": torch.ones(2)}}, "a.ckpt")
    assert "no hyper_parameters 'arch' and 'config'" in refusal(capsys, "export", "ckpt=a.ckpt", "to=huggingface")
    error = refusal(capsys, "export", "ckpt=a.ckpt", "to=sharded", "tokenizer=x")
    assert "tokenizer='x' applies to to=huggingface only" in error
    error = refusal(capsys, "export", "ckpt=a.ckpt", "to=huggingface", "dtype=int8")
    assert "dtype='int8' is not valid: it must be float32 or" in error


def test_a_published_shape_refuses_weights_of_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "train", *RUN, "model=qwen2_5_0_5b", f"model.pretrained={folder}")
    assert "hidden_size=896, where the folder has 32" in error


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_dir() / "model").glob("*.yaml")))
def test_every_shape_agrees_with_a_folder_that_has_it(tmp_path: Path, name: str) -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        model = OmegaConf.to_container(compose("train", overrides=[f"model={name}"]).model, resolve=True)
    assert model["pretrained"] is None
    if name == "pretrained":
        assert model["arch"] is model["config"] is None
        return
    AutoConfig.for_model(model["arch"], **model["config"]).save_pretrained(tmp_path)
    found = Pretrained(str(tmp_path), arch=model["arch"], config=model["config"], weights=False)
    assert found.arch == model["arch"]
