"""`megatrain plan`: known facts about large models, remedies, and the plan of a run that really happens."""

import json
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from lightning_megatrain.cli import planner
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.main import main

H200 = ("gpu=h200", "precision=bf16_mixed", "output=json")

SHORT = ("data.seq_len=32", "data.batch_size=4", "data.max_train_bytes=65536", "data.val_windows=8")

MADE = {}
"""Plans by their arguments: some tests ask for the same."""


@pytest.fixture
def planned(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        if arguments not in MADE:
            assert main(["plan", *arguments]) == 0
            MADE[arguments] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return MADE[arguments]

    return run


def test_120b_fits_one_and_a_half_terabytes_at_twelve_bytes_per_parameter(planned):
    plan = planned("model=dense_120b", "host=server_1_5tb", *H200)
    assert plan["fits"]
    assert plan["host_bytes_per_parameter"] == pytest.approx(12, rel=0.01)
    assert not planned("model=dense_120b", "host=server_1tb", *H200)["fits"]


def test_14b_fits_256_gb_and_not_128_gb_and_the_remedy_is_named(planned):
    assert planned("model=qwen2_5_14b", "host=workstation_256gb", *H200)["fits"]
    small = planned("model=qwen2_5_14b", "host=workstation_128gb", *H200)
    assert not small["fits"]
    setting = small["remedy"].removeprefix("it would fit with ")
    assert setting == "precision=bf16_mixed strategy.moments_dtype=bfloat16"
    assert planned("model=qwen2_5_14b", "host=workstation_128gb", *H200, *setting.split())["fits"]


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (
            ("model=qwen3_8b", "host=workstation_128gb", "precision=fp32", "trainer.gradient_clip_val=1"),
            "in_backward",
        ),
        (("model=qwen2_5_14b", "host=workstation_64gb"), "no setting fits"),
    ],
)
def test_the_smallest_change_comes_first(planned, overrides, setting):
    plan = planned(*H200, *overrides)
    assert not plan["fits"]
    assert setting in plan["remedy"]


def test_clipping_and_accumulation_choose_the_schedule(planned):
    base = ("model=qwen2_5_7b", "host=workstation_128gb", *H200)
    assert planned(*base)["update"] == "in_backward"
    clipped = planned(*base, "trainer.gradient_clip_val=1")
    assert (clipped["update"], clipped["update_because"]) == ("next_forward", "gradients are clipped")
    assert clipped["host_bytes_per_parameter"] == pytest.approx(14, rel=0.01)
    summed = planned(*base, "trainer.accumulate_grad_batches=4")
    assert summed["host_bytes_per_parameter"] == pytest.approx(16, rel=0.01)
    assert summed["tokens_per_step"] == 4 * planned(*base)["tokens_per_step"]


@pytest.mark.parametrize("batches", [1, 2])
def test_the_plan_of_a_run_is_the_plan_that_the_run_makes(planned, monkeypatch, batches):
    overrides = ["precision=bf16_mixed", "trainer.max_steps=1", "strategy.update=next_forward", *SHORT]
    overrides.append(f"trainer.accumulate_grad_batches={batches}")
    plan = planned(*overrides, "host=auto", "gpu=auto", "output=json")
    seen = []
    from lightning_megatrain import MegaTrainStrategy

    end = MegaTrainStrategy.on_train_end
    monkeypatch.setattr(MegaTrainStrategy, "on_train_end", lambda self: (seen.append(self.plan), end(self)))
    main(["train", *overrides, "trainer.accelerator=cpu", "trainer.limit_val_batches=1", "sample.max_new_tokens=0"])
    assert {**seen[0].host, "activations": 0} == plan["host_bytes_by_item"]
    assert seen[0].device == plan["device_bytes_by_item"]


def test_sums_that_this_torch_cannot_make_are_refused_for_this_machine_alone(planned, monkeypatch, capsys):
    monkeypatch.setattr(planner, "SUMS_WIDE", False)
    base = ("precision=bf16_mixed", "trainer.accumulate_grad_batches=2", "strategy.accumulate_dtype=float32")
    with pytest.raises(SystemExit):
        planned(*base, "gpu=h200", "output=json")
    assert "set strategy.accumulate_dtype=bfloat16" in capsys.readouterr().err
    narrow = planned("precision=bf16_mixed", "trainer.accumulate_grad_batches=2", "gpu=h200", "output=json")
    assert narrow["host_bytes_per_parameter"] == pytest.approx(14, rel=0.01)
    other = planned(*base, "gpu=h200", "host=laptop_32gb", "output=json")
    assert other["host_bytes_per_parameter"] == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize(("limit", "left"), [("400GiB", 124), ("100GiB", 100), ("auto", 124)])
def test_a_limit_makes_no_named_host_larger(planned, limit, left):
    host = ("host=workstation_128gb", f"strategy.host_memory={limit}")
    plan = planned("model=qwen2_5_14b", *host, *H200)
    assert not plan["fits"]
    assert plan["host_available_bytes"] == left * 2**30
    assert planned("host=auto", host[1], *H200)["host_available_bytes"] == 400 * 2**30 or limit != "400GiB"


def test_every_experiment_is_planned_and_leaves_nothing_behind(planned, tmp_path):
    names = [path.stem for path in (config_dir() / "experiment").glob("*.yaml")]
    assert "sft_tiny" in names
    for name in names:
        plan = planned(f"experiment={name}", "host=laptop_32gb", "gpu=rtx_4090", "output=json")
        assert plan["fits"]
    assert 1e6 < planned("experiment=sft_tiny", "host=laptop_32gb", "gpu=rtx_4090", "output=json")["parameters"] < 2e6
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_ends_with_one_table(planned, capsys):
    models, hosts = "tiny,qwen2_5_0_5b", "laptop_32gb,workstation_64gb"
    assert main(["plan", "-m", f"model={models}", f"host={hosts}", "gpu=rtx_4090"]) == 0
    out = capsys.readouterr().out
    assert out.count("megatrain plan") == 1
    assert all(f"model={m},host={h}" in out for m in models.split(",") for h in hosts.split(","))


def test_the_table_and_the_help(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "gpu=rtx_3090", "host=laptop_32gb"]) == 0
    out = capsys.readouterr().out
    for label in ("fits", "moments", "slots", "tokens/s", "waits for", "billion tokens"):
        assert label in out
    assert not list(tmp_path.iterdir())
    assert main(["plan", "--help"]) == 0
    assert "examples:" in capsys.readouterr().out


def test_120b_is_planned_in_seconds_and_without_memory(tmp_path):
    code = (
        "import re, sys, time; from pathlib import Path; from lightning_megatrain.cli.main import main; "
        "main(['plan', 'model=dense_120b', 'host=server_1_5tb', 'gpu=h200', 'precision=bf16_mixed']); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 2 * 2**30


def test_a_sweep_that_fails_ends_with_what_it_has_found(planned, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "-m", "model=tiny", "host=laptop_32gb", "gpu=rtx_3090", "data.batch_size=1,0,2"])
    said = capsys.readouterr()
    assert "data.batch_size=0 must be more than 0." in said.err
    assert "data.batch_size=1" in said.out


def test_the_overrides_of_a_sweep_are_shown_whole(planned, capsys):
    name = "x" * 150
    main(["plan", "-m", "model=tiny", "host=laptop_32gb", "gpu=rtx_3090", f"+note={name}", "data.batch_size=1,2"])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert shown.count("x") >= 2 * len(name)


@pytest.mark.parametrize(
    "wrong",
    ["data.batch_size=0", "data.seq_len=-1", "node.gpus=0", "node.mfu=0", "gpu.achievable=0", "host.dram_gb_per_s=0"],
)
def test_what_seconds_are_divided_by_is_more_than_zero(planned, wrong, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "model=tiny", "host=laptop_32gb", "gpu=rtx_3090", wrong])
    error = capsys.readouterr().err
    assert f"{wrong} must be more than 0." in error
    assert "Traceback" not in error


@pytest.mark.parametrize("wrong", ["strategy.microbatch=0", "strategy.prefetch=-1"])
def test_what_training_refuses_is_refused(planned, wrong, capsys):
    with pytest.raises(SystemExit):
        planned(wrong, "gpu=h200", "output=json")
    assert "set" in capsys.readouterr().err


def test_a_schedule_that_cannot_run_is_refused(planned, capsys):
    with pytest.raises(SystemExit):
        planned("strategy.update=in_backward", "trainer.gradient_clip_val=1.0", *H200)
    assert "gradients are clipped" in capsys.readouterr().err


def test_the_schedule_of_a_run_without_a_gpu(planned):
    assert planned("gpu=none", "trainer.gradient_clip_val=1.0", "output=json")["update"] == "blocking"


def test_sums_are_as_wide_as_there_is_room(planned):
    base = ("model=qwen2_5_14b", "trainer.accumulate_grad_batches=4", "host=server_512gb", *H200)
    assert planned(*base, "strategy.host_memory=205GiB")["host_bytes_per_parameter"] == pytest.approx(14, rel=0.01)
    assert planned(*base)["host_bytes_per_parameter"] == pytest.approx(16, rel=0.01)


def test_a_schedule_that_was_asked_for_is_the_first_thing_to_give_up(planned):
    small = ("model=qwen2_5_7b", "host=workstation_128gb", "strategy.host_memory=92GiB", *H200)
    assert "strategy.update=auto" in planned(*small, "strategy.update=next_forward")["remedy"]


def test_packed_rows_need_their_mask(planned):
    base = ("model=qwen2_5_0_5b", "data=chat_jsonl", "data.seq_len=4096", *H200)
    packed, alone = (planned(*base, f"data.packing={p}")["device_bytes"] for p in ("true", "false"))
    assert packed - alone == 4 * 4096**2 * 3


def test_the_best_settings_fit(planned):
    base = ("model=qwen2_5_7b", "host=workstation_128gb", "data.seq_len=2048", "data.batch_size=32")
    plan = planned(*base, "precision=bf16_mixed", "gpu=rtx_3090", "output=json")
    assert not plan["fits"]
    best = plan["best"]["microbatch"]
    assert f"strategy.microbatch={best}" in plan["remedy"]
    assert planned(*base, "precision=bf16_mixed", "gpu=rtx_3090", "output=json", f"strategy.microbatch={best}")["fits"]
    assert plan["best"]["recompute"] == "always"
    assert plan["kept_graphs"] == 0
    few = planned(*base, "precision=bf16_mixed", "gpu=b200", "output=json", "data.batch_size=4")
    assert few["best"]["recompute"] == "never"
    kept = planned(
        *base, "precision=bf16_mixed", "gpu=b200", "output=json", "data.batch_size=4", "strategy.recompute=never"
    )
    always = planned(
        *base, "precision=bf16_mixed", "gpu=b200", "output=json", "data.batch_size=4", "strategy.recompute=always"
    )
    assert kept["fits"]
    assert few["kept_graphs"] == 28
    assert kept["device_bytes"] == pytest.approx(few["device_bytes"], rel=0.01)
    assert kept["device_bytes"] > always["device_bytes"]
    assert kept["compute_s"] == few["compute_s"] < always["compute_s"]


def test_long_inputs_wait_on_the_host_and_what_would_fit_is_named(planned):
    """7.6B at 131,072 tokens: with inputs on the host, 60 GiB of the device are enough."""
    base = ("model=qwen2_5_7b", "host=workstation_256gb", "data.seq_len=131072", "data.batch_size=1", *H200)
    base += ("strategy.recompute=always", "strategy.device_update=never", "strategy.device_memory=60GiB")
    stays = planned(*base, "strategy.activations=device")
    assert not stays["fits"]
    assert stays["host_bytes_by_item"]["activations"] == 0
    setting = stays["remedy"].removeprefix("the device would hold it with ")
    assert setting == "strategy.activations=host"
    moved = planned(*base, setting)
    assert moved["fits"]
    assert moved["host_bytes_by_item"]["activations"] == 28 * 131072 * 3584 * 2
    assert moved["host_bytes"] == stays["host_bytes"] + moved["host_bytes_by_item"]["activations"]
    assert moved["push_s"] > stays["push_s"]
    sliced = planned(*base, setting, "strategy.sequence_chunks=8")
    assert sliced["device_bytes"] < 0.7 * moved["device_bytes"]
    gpu = OmegaConf.load(config_dir() / "gpu" / "h200.yaml")
    again = 2 * 28 * 3 * 3584 * 18944 * 131072 / (gpu.bf16_tflops * 1e12 * gpu.achievable)
    assert sliced["compute_s"] - moved["compute_s"] == pytest.approx(again, rel=1e-3)
    narrow = planned(*base, "strategy.activations=device", "strategy.host_memory=92GiB")
    assert "activations=host" not in narrow["remedy"]
    back = planned(*base[:-1], setting, "strategy.host_memory=92GiB")
    assert back["remedy"] == "it would fit with strategy.activations=device"
    assert planned(*base)["host_bytes_by_item"]["activations"] > 0  # auto
    full = planned(*base, "strategy.host_memory=95GiB")  # as long as there is room
    assert full["fits"] is (full["device_bytes"] <= 60 * 2**30)
    assert 0 < full["host_bytes_by_item"]["activations"] < moved["host_bytes_by_item"]["activations"]
    assert full["host_bytes"] <= 95 * 2**30


def test_blocks_without_a_part_for_slices_are_planned_without(planned, capsys):
    base = ("model.arch=opt", "host=laptop_32gb", "gpu=h200", "precision=bf16_mixed", "output=json")
    assert "too small" in planned(*base, "strategy.device_memory=100MiB", "strategy.microbatch=1")["remedy"]
    with pytest.raises(SystemExit):
        planned(*base, "strategy.sequence_chunks=4")
    error = capsys.readouterr().err
    assert "unit 'model.model.decoder.layers.0' has none; set sequence_chunks=None" in error
    assert "Traceback" not in error


def test_updates_that_would_be_waited_for_move_to_the_device(planned):
    base = ("model=qwen2_5_7b", "host=workstation_128gb", "data.seq_len=2048", "data.batch_size=16")
    base += ("precision=bf16_mixed", "gpu=h200", "output=json", "strategy.microbatch=8", "trainer.gradient_clip_val=1")
    home, moved = (planned(*base, f"strategy.device_update={choice}") for choice in ("never", "auto"))
    assert home["updated_on_device"] == 0
    assert 0.2 < moved["updated_on_device"] < 0.9
    assert moved["step_s"] < 0.8 * home["step_s"]
    assert moved["update_s"] == pytest.approx(home["update_s"] * (1 - moved["updated_on_device"]), rel=1e-3)
    # What would hide the work is asked of the work as it is at home, and what moved is not for nothing.
    assert moved["tokens_to_hide"]["update"] > 32768
    assert moved["tokens_to_hide"]["update"] == pytest.approx(home["tokens_to_hide"]["update"], rel=0.3)
    slow = planned(*base, "strategy.device_update=auto", "gpu.memory_gb_per_s=48")
    assert slow["compute_s"] > moved["compute_s"] + 10 * moved["updated_on_device"] * 0.1
    assert moved["kept_graphs"] < home["kept_graphs"]
    assert moved["device_bytes"] <= moved["device_available_bytes"]
    small = planned(*base, "strategy.device_memory=24GiB")
    assert small["updated_on_device"] < moved["updated_on_device"]
    hidden = planned(*base, "trainer.gradient_clip_val=null", "data.batch_size=64", "strategy.recompute=always")
    assert hidden["updated_on_device"] < 0.1


def test_graphs_are_kept_within_the_limit(planned):
    base = ("model=qwen2_5_7b", "host=workstation_128gb", "data.seq_len=2048", "data.batch_size=8")
    base += ("precision=bf16_mixed", "gpu=h200", "output=json", "strategy.device_update=never")
    plans = [planned(*base, f"strategy.device_memory={limit}GiB") for limit in (16, 30, 50)]
    assert 0 <= plans[0]["kept_graphs"] < plans[1]["kept_graphs"] < plans[2]["kept_graphs"]
    for plan in plans:
        assert plan["device_bytes"] <= plan["device_available_bytes"]
    assert plans[2]["best"]["recompute"] in ("auto", "never")
