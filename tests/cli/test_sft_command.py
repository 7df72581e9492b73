"""`megatrain train experiment=sft_tiny`: from a folder it makes to a folder that transformers open, offline."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_megatrain.cli.main import main

SHORT = ("data.max_records=60", "data.max_val_records=10", "trainer.max_steps=3", "sample.max_new_tokens=4")


def test_it_trains_and_exports_without_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=sft_tiny", *SHORT]) == 0
    [run] = (tmp_path / "outputs").glob("*/*")
    assert f"{run / 'huggingface'}" in capsys.readouterr().out.replace("\n", "")
    trained = AutoModelForCausalLM.from_pretrained(run / "huggingface", dtype="auto")
    begun = AutoModelForCausalLM.from_pretrained(run / "base", dtype="auto")
    [file] = (run / "checkpoints").glob("*.ckpt")
    state = torch.load(file, weights_only=True)["state_dict"]
    for name, value in trained.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"])
    assert not torch.equal(trained.lm_head.weight, begun.lm_head.weight)
    tokenizers = [AutoTokenizer.from_pretrained(run / folder) for folder in ("base", "huggingface")]
    messages = [{"role": "user", "content": "def f(): pass"}]
    first, second = (t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in tokenizers)
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("callbacks.checkpoint=null", "export=out"), "checkpoint"),
        (("+callbacks.checkpoint.save_top_k=0", "export=out"), "checkpoint"),
        (("export=there",), "exists already"),
        (("export='~/there'",), "exists already"),
        (("export='${hydra:runtime.output_dir}/checkpoints'",), "each other's place"),
        (("export=s3://bucket/out",), "local file system"),
        (("callbacks.checkpoint.dirpath=null", "export=there"), "exists already"),
    ],
)
def test_an_export_that_cannot_be_is_refused_before_training(tmp_path, monkeypatch, capsys, overrides, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit):
        main(["train", *overrides])
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/*/*/csv"))


def test_no_validation_data_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = '{"instruction": "add %d", "output": "here it is"}'
    (tmp_path / "c=1.jsonl").write_text("\n".join(line % i for i in range(40)))
    data = ("data=chat_jsonl", f"data.train_path={tmp_path}/c=1.jsonl", "data.val_fraction=0", "data.seq_len=64")
    base = ("prepare.path=base", "data.tokenizer=base", "model.pretrained=base", "export=null", "data.batch_size=1")
    short = ("trainer.max_steps=2", "sample.max_new_tokens=0")
    assert main(["train", "experiment=sft_tiny", *data, *base, *short]) == 0
    assert "tokens/s" in capsys.readouterr().out
