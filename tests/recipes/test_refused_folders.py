"""Folders and names that no pretrained model comes from, each refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import edit_json, model_folder, tensors_in
from safetensors.torch import save_file

from lightning_megatrain.checkpoint.hub import INDEX_FILE
from lightning_megatrain.recipes.causal_lm import CausalLM

Change = Callable[[Path], Any]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


def tensors(**changes: torch.Tensor | None) -> Change:
    """Leave out the tensors that are None, and add the others."""

    def change(folder: Path) -> None:
        changed = {**tensors_in(folder), **changes}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def cut(size: int) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])

    return change


def config(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / CONFIG, **changes)


def text(content: str) -> Change:
    return lambda folder: (folder / CONFIG).write_text(content)


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def only_pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


FAULTS: list[tuple[str, Change, str]] = [
    (
        "llama",
        tensors(**{"model.norm.weight": None, "lm_head.weight": None}),
        r"do not fit its config\.json as a LlamaForCausalLM: "
        r"2 missing \(lm_head\.weight \[64, 32\], model\.norm\.weight \[32\]\); ",
    ),
    (
        "qwen2",
        tensors(**{"model.embed_tokens.weight": None}),
        r": 1 missing \(model\.embed_tokens\.weight \[64, 32\]\)",
    ),
    (
        "llama",
        tensors(**{name: torch.ones(1, 2) for name in "abcd"}),
        r"4 unexpected \(a \[1, 2\], b \[1, 2\], c .*\.\.\.\)",
    ),
    (
        "llama",
        tensors(**{"model.norm.weight": torch.ones(33)}),
        r"1 of another shape \(model.* is \[33\] and not \[32\]\)",
    ),
    ("llama", config(num_hidden_layers=1), r"9 unexpected \(model\.layers\.1\."),
    ("llama", config(tie_word_embeddings=True), r"hold two that differ; set tie_word_embeddings"),
    (
        "qwen3_moe",
        tensors(**{EXPERT: None}),
        r"1 missing \(model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight \[16, 32\]\)",
    ),
    (
        "qwen3_moe",
        tensors(**{EXPERT: torch.ones(3, 3)}),
        r"1 of another shape \(.*up_proj\.weight is \[3, 3\] and not \[16",
    ),
    ("llama", cut(5), r"model\.safetensors cannot be read as safetensors; it was cut short or is of another kind"),
    ("llama", cut(5000), r"model\.safetensors cannot be read as safetensors; it was cut short or is of another kind"),
    ("llama", gone(CONFIG), r"has no config\.json, so it is no model's folder"),
    ("llama", text("{"), r"config\.json cannot be read as JSON"),
    ("llama", text("[]"), r"config\.json holds a list and no JSON object"),
    ("llama", config(model_type="unheard_of"), r"model_type='unheard_of', which is no causal language model"),
    ("llama", config(num_attention_heads=7), r"does not suit model_type='llama'"),
    ("llama", config(quantization_config={"quant_method": "mxfp4"}), r"is quantized \(mxfp4\)"),
    ("llama", gone(WEIGHTS), r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
    ("llama", only_pickled, r"has its weights in pytorch_model\.bin only, and safetensors are needed"),
]


@pytest.mark.parametrize(("arch", "change", "message"), FAULTS)
def test_a_folder_that_is_not_whole_is_refused_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arch: str, change: Change, message: str
) -> None:
    folder = model_folder(tmp_path / "model", arch)
    change(folder)
    capfd.readouterr()
    with pytest.raises(ValueError, match=message) as refused:
        CausalLM(pretrained=str(folder))
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, shard_size="20KB")
    first, *others = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of the {len(others) + 1} files .* first being {first.name}"):
        CausalLM(pretrained=str(folder))
    edit_json(folder / INDEX_FILE, weight_map={})
    with pytest.raises(ValueError, match="has no weight_map"):
        CausalLM(pretrained=str(folder))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    small = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in tensors_in(folder).items()}
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds I8 weights, and F32, BF16 or F16 are needed"):
        CausalLM(pretrained=str(folder))


# Names on the Hub


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nobody/nothing",
            r"nobody/nothing is no local folder, and the Hugging Face Hub did not give .*HF_HUB_OFFLINE",
        ),
        ("./models/nothing", r"model\.pretrained=\./models/nothing does not exist; set a folder"),
        ("a/b/c", r"model\.pretrained=a/b/c does not exist"),
        ("file.txt", r"model\.pretrained=file\.txt is a file; set a folder"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("")
    with pytest.raises(ValueError, match=message) as refused:
        CausalLM(pretrained=name)
    assert "\n" not in str(refused.value)
