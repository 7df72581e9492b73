"""`megatrain train` as a person runs it: a process of its own, in a folder of its own."""

import re
import signal

import lightning as L
import pytest
import torch
from run_log import metrics, val_losses

from lightning_megatrain import session
from lightning_megatrain.cli import need
from lightning_megatrain.cli.main import main
from lightning_megatrain.recipes.causal_lm import CausalLM

pytestmark = pytest.mark.timeout(240)

TINY = [
    "data.seq_len=32",
    "data.max_train_bytes=65536",
    "data.val_windows=8",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=3",
    "sample.max_new_tokens=8",
    "trainer.max_steps=6",
    "trainer.accelerator=cpu",
]


def test_a_run_leaves_a_report_a_checkpoint_and_a_log(megatrain, tmp_path):
    result = megatrain("train", *TINY, "trainer.val_check_interval=3", "trainer.log_every_n_steps=1", "optim.lr=1e-2")
    assert result.returncode == 0, result.stderr
    for label in ("validation loss", "validation perplexity", "tokens/s", "host bytes per parameter", "peak host RSS"):
        assert label in result.stdout
    assert "def " in result.stdout.rsplit("sample", 1)[1]
    assert "train_loss=" in result.stdout
    assert "tokens_per_s=" in result.stdout

    [folder] = (tmp_path / "outputs").glob("*/*")
    rows = metrics(folder)
    assert {"train_loss", "val_loss", "val_perplexity", "tokens_per_s", "tokens_seen"} <= rows[0].keys()
    losses = val_losses(folder)
    assert losses[-1] < losses[0]
    [checkpoint] = (folder / "checkpoints").glob("*.ckpt")
    assert checkpoint.name == "step-6.ckpt"
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == 6
    assert all(key.startswith("model.") for key in state["state_dict"])

    resumed = megatrain("train", *TINY, "trainer.max_steps=8", f"ckpt_path={checkpoint}")
    assert resumed.returncode == 0, resumed.stderr


def test_megatrain_ends_where_the_stock_strategy_ends(megatrain, tmp_path):
    result = megatrain("train", "-m", *TINY, "strategy=megatrain,single_device")
    assert result.returncode == 0, result.stderr
    ours, stock = (val_losses(tmp_path / folder) for folder in _jobs(tmp_path))
    assert ours == stock


def test_a_sweep_runs_every_precision_and_ends_with_one_table(megatrain, tmp_path):
    result = megatrain("train", "-m", *TINY, "precision=fp32,bf16_mixed", "strategy.update=in_backward")
    assert result.returncode == 0, result.stderr
    summary = result.stdout.rsplit("megatrain train", 1)[1]
    assert summary.count("strategy.update=in_backward") == 2
    assert "overrides" in summary
    full, mixed = (val_losses(tmp_path / folder)[-1] for folder in _jobs(tmp_path))
    assert mixed == pytest.approx(full, rel=0.02)
    assert mixed != full


def _jobs(tmp_path):
    [sweep] = (tmp_path / "multirun").glob("*/*")
    return sorted(path for path in sweep.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=3", "Key 'max_step' is not in struct"),
        ("precision=fp8", "Could not find 'precision/fp8'"),
        ("trainer.max_steps=many", "trainer.max_steps='many' is not valid: it must be an integer"),
        ("strategy.update=sideways", "sideways"),
        ("strategy.prefetch=-1", "prefetch=-1"),
        ("data.seq_len=1", "data.seq_len=1 must be at least 2"),
        ("model.arch=lama", "did you mean llama"),
        ("ckpt_path=nowhere.ckpt", "nowhere.ckpt"),
        ("ckpt_path=größe (1).ckpt", "Checkpoint größe (1).ckpt does not exist"),
        ("optim.lr=-1", "Invalid learning rate: -1); correct that value."),
        ("optim.betas=[0.9]", "optim.betas=[0.9] is not valid: it must be two numbers"),
        ("optim.betas=0.9", "optim.betas=0.9 is not valid: it must be two numbers"),
        ("optim.betas=[0.9,2]", "Invalid beta parameter at index 1: 2); correct that value."),
        ("optim.warmup_steps=-1", "warmup_steps=-1"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be more than 0."),
        ("trainer.val_check_interval=0", "trainer.val_check_interval=0 must be more than 0."),
        ("prompt=", "prompt= holds nothing to continue; set a text"),
        ("prompt=123", "prompt=123 is no text; set prompt='\"123\"'"),
        ("callbacks.checkpoint.dirpath=/proc/nope", "callbacks.checkpoint.dirpath=/proc/nope cannot be written"),
        ("export=/proc/nope/x", "export=/proc/nope/x cannot be written"),
        ("hydra.run.dir=/proc/nope", "at /proc/nope (No such file or directory); see to that, or set another path."),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(tmp_path, monkeypatch, capsys, override, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", *TINY, override])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("prompt", ["prompt=", "prompt=123"])
def test_without_a_sample_no_prompt_is_needed(tmp_path, monkeypatch, capsys, prompt):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "sample.max_new_tokens=0", prompt]) == 0
    assert "\nsample" not in capsys.readouterr().out


def test_a_sample_that_fails_costs_neither_the_report_nor_the_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"^The prompt was not continued \(.*\), .*; lower optim\.lr, or set sample"):
        assert main(["train", *TINY, "optim.lr=1e20", "export=out"]) == 0
    said = capsys.readouterr().out
    assert "validation loss" in said
    assert "exported" in said
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_run_that_is_at_its_end_already_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved = "callbacks.checkpoint.dirpath=kept"
    assert main(["train", *TINY, saved, "callbacks.checkpoint.every_n_train_steps=4"]) == 0
    with pytest.warns(
        UserWarning, match=r"is at step 6, so nothing is left to train; set trainer\.max_steps=6 to more"
    ):
        assert main(["train", *TINY, saved, "ckpt_path=kept/step-6.ckpt"]) == 0


@pytest.mark.parametrize("every", [2, 100])
@pytest.mark.parametrize("status", [130, 143])
def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path, monkeypatch, capsys, status, every):
    monkeypatch.chdir(tmp_path)
    step = CausalLM.training_step

    def stops(self, batch, batch_idx):
        if batch_idx == 3:
            if status == 130:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(CausalLM, "training_step", stops)
    with pytest.raises(SystemExit) as stop:
        main(["train", *TINY, f"callbacks.checkpoint.every_n_train_steps={every}"])
    assert stop.value.code == status
    said = capsys.readouterr().err
    assert ("stopped by ctrl-C at step 3; " if status == 130 else "stopped by SIGTERM at step 4; ") in said
    if every == 100:
        assert "there is no checkpoint to go on with" in said
        return
    monkeypatch.setattr(CausalLM, "training_step", step)
    ckpt_path = re.search(r"go on with (ckpt_path=\S+)", said)[1]
    assert ckpt_path.endswith("step-2.ckpt" if status == 130 else "step-4.ckpt")
    assert main(["train", *TINY, ckpt_path]) == 0


def test_a_sweep_that_fails_ends_with_what_it_has_reached(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "-m", *TINY, "optim.lr=1e-3,-1,1e-4"])
    said = capsys.readouterr()
    assert "Invalid learning rate" in said.err
    summary = said.out.rsplit("megatrain train", 1)[1]
    assert "overrides" in summary
    assert "optim.lr=0.001" in summary.replace("1e-3", "0.001")


def refused(capsys, *overrides):
    """What is said when these are refused, which is one sentence."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *TINY, *overrides])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def noting(make, made):
    def make_and_note(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    return make_and_note


NEEDS = {
    "updates in the backward": [],
    "all gradients": ["trainer.gradient_clip_val=1", "precision=bf16_mixed"],
    "summed gradients": [
        "trainer.accumulate_grad_batches=2", "precision=bf16_mixed", "strategy.accumulate_dtype=float32",
    ],
    "bf16 moments": ["precision=bf16_true", "strategy.moments_dtype=bfloat16", "strategy.update=blocking"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", NEEDS.values(), ids=NEEDS)
def test_what_the_host_cannot_hold_is_refused_before_weights_are_made(tmp_path, monkeypatch, capsys, overrides):
    monkeypatch.chdir(tmp_path)
    plans = []
    for module in (need, session):
        make_plan = module.make_plan
        monkeypatch.setattr(
            module, "make_plan", lambda *a, made=make_plan, **k: plans.append(made(*a, **k)) or plans[-1]
        )
    assert main(["train", *TINY, "trainer.max_steps=1", *overrides]) == 0
    planned, trained = plans[0], max(plans[1:], key=lambda plan: plan.host_bytes)
    assert planned == trained
    monkeypatch.setattr(need, "available_host_bytes", lambda: trained.host_bytes - 1)
    monkeypatch.setattr(L, "seed_everything", lambda *_, **__: pytest.fail("went on"))
    error = refused(capsys, *overrides)
    assert "Training " in error
    assert "are available; set a smaller model=..., or ask `megatrain plan` what would fit." in error


def test_the_stock_strategy_is_held_to_its_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(need, "available_host_bytes", lambda: 100)
    error = refused(capsys, "strategy=single_device")
    assert "The weights alone need " in error
    assert "100 bytes are available; set a smaller model" in error


def test_the_traceback_is_there_on_request(megatrain):
    wrong = "data.seq_len=1"
    plain = megatrain("train", *TINY, wrong)
    full = megatrain("train", *TINY, wrong, env={"HYDRA_FULL_ERROR": "1"})
    assert plain.returncode == full.returncode == 1
    assert "data.seq_len=1 must be" in plain.stderr
    assert "data.seq_len=1 must be" in full.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in full.stderr
