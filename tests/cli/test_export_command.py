"""`megatrain export` as a person runs it."""

import os

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatrain.cli.export import USAGE
from lightning_megatrain.cli.main import main

pytestmark = pytest.mark.timeout(240)

TINY = [
    "data.seq_len=32",
    "data.max_train_bytes=65536",
    "data.val_windows=8",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=3",
    "sample.max_new_tokens=0",
    "trainer.accelerator=cpu",
]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint under a name that Lightning gives, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tied = torch.arange(4.0)
    state = {"model.embed": tied, "model.head": tied, "model.steps": torch.tensor(3), "other.w": torch.ones(2)}
    torch.save({"state_dict": state, "epoch": 1}, "epoch=1-step=3.ckpt")
    return tmp_path / "epoch=1-step=3.ckpt"


def test_a_run_goes_on_from_a_converted_checkpoint(megatrain, tmp_path):
    trained = megatrain("train", *TINY, "trainer.max_steps=4")
    assert trained.returncode == 0, trained.stderr
    [checkpoint] = (tmp_path / "outputs").glob("*/*/checkpoints/*.ckpt")
    for to, suffix in (("sharded", "-sharded.ckpt"), ("safetensors", "-safetensors")):
        result = megatrain("export", f"ckpt={checkpoint.relative_to(tmp_path)}", f"to={to}", "shard_size=64KiB")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"wrote {checkpoint.with_name('step-4' + suffix)}\n")
        assert " tensors, " in result.stdout
    assert sorted(os.listdir(tmp_path)) == ["outputs"]
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1

    sharded = checkpoint.with_name("step-4-sharded.ckpt")
    resumed = megatrain("train", *TINY, "trainer.max_steps=6", f"ckpt_path={sharded}")
    assert resumed.returncode == 0, resumed.stderr


def test_it_says_what_it_wrote_and_what_it_left_out(checkpoint, capsys):
    assert main(["export", f"ckpt={checkpoint.name}", "to=safetensors", "prefix=model.", "dtype=bfloat16"]) == 0
    folder = checkpoint.with_name("epoch=1-step=3-safetensors")
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {folder}",
        "2 tensors, 16 bytes",
        "1 tied, so not written again: head (is embed)",
        "1 without the prefix 'model.', so left out: other.w",
    ]
    assert load_file(folder / "model.safetensors")["embed"].dtype == torch.bfloat16


def test_paths_with_equals_signs_and_quotes_are_paths(checkpoint, capsys):
    assert main(["export", f"ckpt={checkpoint}", "to=sharded", 'out=x=1 "y"']) == 0
    assert main(["export", "ckpt='x=1 \"y\"'", "to=ckpt", "out=back.ckpt"]) == 0
    assert torch.load("back.ckpt", weights_only=True)["epoch"] == 1
    assert sorted(os.listdir()) == ["back.ckpt", checkpoint.name, 'x=1 "y"']


def test_an_existing_export_is_replaced_when_that_is_set(checkpoint, capsys):
    command = ["export", f"ckpt={checkpoint.name}", "to=sharded"]
    assert main(command) == 0
    with pytest.raises(SystemExit):
        main(command)
    assert "exists already; set overwrite=true" in capsys.readouterr().err
    assert main([*command, "overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ckpt=PATH is needed"),
        (["ckpt=a.ckpt"], "to=FORMAT is needed"),
        (["ckpt=a.ckpt", "to=gguf"], "to='gguf' is not valid: it must be ckpt or sharded or safetensors"),
        (["ckpt=nowhere.ckpt", "to=sharded"], "nowhere.ckpt does not exist"),
        (["ckpt=a.ckpt", "to=ckpt"], "is a single file already; set to=sharded or to=safetensors"),
        (["ckpt=a.ckpt", "to=safetensors", "dtype=int8"], "dtype='int8' is not valid: it must be float32 or"),
        (["ckpt=a.ckpt", "to=safetensors", "overwrite=maybe"], "overwrite='maybe' is not valid"),
        (["ckpt=a.ckpt", "to=safetensors", "prefix=net."], "prefix='net.' is in no name"),
        (["ckpt=a.ckpt", "to=safetensors", "shard_size=big"], "shard_size='big' is not valid"),
        (["ckpt=cut.ckpt", "to=sharded"], "cut.ckpt cannot be read as a checkpoint"),
        (["ckpt=a.ckpt", "too=sharded"], "Key 'too' is not in struct"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"model.w": torch.ones(2)}}, "a.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "a.ckpt").read_bytes()[:300])
    with pytest.raises(SystemExit) as stop:
        main(["export", *arguments])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(os.listdir()) == ["a.ckpt", "cut.ckpt"]


def test_help_shows_examples(capsys):
    assert main(["export", "--help"]) == 0
    assert capsys.readouterr().out.strip() == USAGE
    assert "megatrain export ckpt=" in USAGE.split("examples:")[1]
