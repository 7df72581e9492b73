"""A Hugging Face directory from nothing."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lightning_megatrain.recipes.offline_model import make_offline_model, offline_tokenizer

SMALL = {"vocab_size": 300, "hidden_size": 32, "layers": 1}


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_transformers_opens_it_without_network(tmp_path):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    path = make_offline_model(tmp_path / "deep" / "model", **SMALL)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    assert (path / "model.safetensors").is_file()
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings == 300
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    text = "def f(x):\n    return '\u00e9\u4e2d'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert model(torch.tensor([tokenizer("Hi")["input_ids"]])).logits.isfinite().all()


def test_equal_settings_give_equal_files_and_leave_the_generator_alone(tmp_path):
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = contents(make_offline_model(tmp_path / "a", **SMALL))
    offline_tokenizer.cache_clear()
    assert torch.equal(torch.get_rng_state(), state)
    assert contents(make_offline_model(tmp_path / "b", **SMALL)) == first
    other = contents(make_offline_model(tmp_path / "c", **SMALL, seed=1))
    assert other["model.safetensors"] != first["model.safetensors"]


def test_a_finished_directory_is_left_and_a_foreign_one_refused(tmp_path):
    path = make_offline_model(tmp_path / "model", **SMALL)
    before = path.stat().st_mtime_ns, (path / "model.safetensors").stat().st_mtime_ns
    make_offline_model(path, **SMALL)
    assert (path.stat().st_mtime_ns, (path / "model.safetensors").stat().st_mtime_ns) == before
    with pytest.raises(FileExistsError, match="remove it or choose another path"):
        make_offline_model(path, **SMALL, seed=1)


def test_it_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(self, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        make_offline_model(tmp_path / "model", **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"vocab_size": 100}, {"hidden_size": 33}, {"layers": 0}])
def test_sizes_out_of_range_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_offline_model(tmp_path / "model", **{**SMALL, **wrong})
