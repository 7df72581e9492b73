"""`megatrain bench step`: figures that belong together, several sizes in one fit, and the ceiling beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from benchmarks import monitor, peers, plan, speed
from benchmarks.plot import markdown, rows_of

from lightning_megatrain.callbacks import gantt
from lightning_megatrain.cli import bench_measure, bench_step, need
from lightning_megatrain.cli.bench_measure import RandomTokens, _slices
from lightning_megatrain.cli.main import main
from lightning_megatrain.recipes.ceiling import Ceiling

SMALL = [
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=2",
    "data.vocab_size=64",
    "seq_len=16",
    "precision=fp32",
    "accelerator=cpu",
    "steps=2",
    "warmup=1",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(capsys):
    def run(*arguments):
        assert main(["bench", "step", *SMALL, "output=json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_figures_belong_together(measured):
    result = measured("rows=[2,4]", "ceiling=true", "clip=1.0", "strategy.microbatch=2", "to=result.json")
    assert [size["tokens"] for size in result["sizes"]] == [32, 64]
    assert result["schedule"] == "blocking"
    assert result["strategy"]["microbatch"] == 2
    assert result["host_bytes_per_parameter"] == pytest.approx(16, rel=0.1)
    for size in result["sizes"]:
        ceiling = size["ceiling"]
        for figures in (size, ceiling):
            assert len(figures["losses"]) == len(figures["steps_s"]) == 3
            assert figures["step_s"] == pytest.approx(sum(figures["steps_s"][1:]) / 2)
            assert figures["tokens_per_s"] == pytest.approx(size["tokens"] / figures["step_s"])
        assert size["of_ceiling"] == pytest.approx(ceiling["step_s"] / size["step_s"])
        flops = [f["model_tflops"] / f["tokens_per_s"] for f in (size, ceiling, result["sizes"][0])]
        assert flops == pytest.approx([flops[0]] * 3)
        assert {"fetch", "compute", "push", "update"} <= size["busy_s"].keys()
        assert 0 < sum(size["busy_s"].values()) <= 2 * sum(size["steps_s"])
        assert size["waits_s"].keys() <= {"fetch", "push", "slab", "update", "worker"}
    assert result["command"].startswith("megatrain bench step model.config.hidden_size=32 ")
    assert result["versions"]["torch"] == torch.__version__
    assert json.loads(Path("result.json").read_text()) == result
    assert os.listdir() == ["result.json"]


def test_the_ceiling_is_the_same_model_on_the_same_tokens(measured):
    [size] = measured("rows=2", "ceiling=true", "optim.lr=1e-9", "optim.warmup_steps=0")["sizes"]
    assert size["losses"] == pytest.approx(size["ceiling"]["losses"], rel=1e-5)


def test_the_table_for_the_results_folder_has_a_row_for_each_size(measured):
    result = measured("rows=[1,2]", "ceiling=true", "clip=0.5")
    rows = rows_of([result])
    table = markdown(rows)
    size = f"{result['parameters'] / 1e9:.3g}B"
    said = f", {result['precision']}, clip 0.5, not compiled"
    assert [row["label"] for row in rows] == [f"tiny ({size}), {n} x 16 tokens{said}" for n in (1, 2)]
    assert all(f"| {row['label']} | `blocking` | " in table and f" {row['of_ceiling']:.3f} " in table for row in rows)
    assert all(f"  - {row['label']}: `{result['command']}`" in table for row in rows)


def test_no_two_rows_of_results_are_called_the_same():
    """Those whose speed is promised, and one that was measured twice."""
    [path, *_] = (Path(speed.__file__).parent / "results" / "h200_speed").glob("*.json")
    measured = json.loads(path.read_text())
    results = []
    for name, row in [*speed.ROWS.items(), ("7b_32k", speed.ROWS["7b_32k"])]:
        given = dict(override.split("=", 1) for override in row.overrides)
        strategy = {key.removeprefix("strategy."): value for key, value in given.items() if key.startswith("strategy.")}
        blocks = int(given.get("model.config.num_hidden_layers", 48))
        results.append(
            {
                **measured,
                "model": given["model"],
                "parameters": measured["parameters"] if name.startswith("7b") else 1.5e9 + blocks * 0.276e9,
                "clip": float(given["clip"]) if "clip" in given else None,
                "strategy": {**measured["strategy"], **strategy},
                "sizes": [{**measured["sizes"][0], "rows": int(given["rows"]), "tokens": int(given["rows"]) * 2048}],
                "command": " ".join(row.overrides),
            }
        )
    rows = rows_of(results)
    table = markdown(rows)
    assert len({row["label"] for row in rows}) == len(rows) == 11
    assert [table.count(f"| {row['label']} |") for row in rows] == [1] * len(rows)
    assert all(f"- {row['label']}: `{row['command']}`" in table for row in rows)


def test_the_ceiling_warms_up_in_three_steps(measured):
    [size] = measured("warmup=5", "ceiling=true")["sizes"]
    assert (len(size["steps_s"]), len(size["ceiling"]["steps_s"])) == (7, 5)
    assert size["ceiling"]["step_s"] == pytest.approx(sum(size["ceiling"]["steps_s"][3:]) / 2)


def test_without_a_ceiling_there_is_none(measured):
    [size] = measured()["sizes"]
    assert "ceiling" not in size
    assert "of_ceiling" not in size


def test_a_ceiling_that_does_not_fit_is_said_and_ours_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(bench_measure, "_free_bytes", lambda device: 1000)
    assert main(["bench", "step", *SMALL, "ceiling=true"]) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "of 1000 bytes" in out
    assert "tokens/s" in out


def test_a_size_that_is_too_large_for_the_ceiling_leaves_the_others(measured, monkeypatch):
    step = Ceiling.step

    def scarce(self, batch, microbatch):
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("no memory")
        return step(self, batch, microbatch)

    monkeypatch.setattr(Ceiling, "step", scarce)
    small, large, again = measured("rows=[2,4,1]", "ceiling=true")["sizes"]
    assert "of_ceiling" in small
    assert large["ceiling"].keys() == {"needed", "available"}
    assert "of_ceiling" in again


def test_the_step_that_is_drawn_is_one_more_and_not_measured(measured, monkeypatch):
    asked = {}

    class Timeline(L.Callback):
        reads_weights = False

        def __init__(self, steps, folder):
            asked.update(steps=steps, folder=folder)

    monkeypatch.setattr("lightning_megatrain.callbacks.timeline.Timeline", Timeline)
    sizes = measured("rows=[1,2]", "timeline=pictures")["sizes"]
    assert asked == {"steps": [3, 7], "folder": "pictures"}
    assert all(len(s["steps_s"]) == 4 and s["step_s"] == pytest.approx(sum(s["steps_s"][1:3]) / 2) for s in sizes)


def test_a_sweep_ends_with_one_table_of_its_runs(capsys):
    assert main(["bench", "step", "-m", *SMALL, "rows=1,2", "to=step-${hydra:job.num}.json"]) == 0
    table = capsys.readouterr().out.rpartition("megatrain bench step")[2]
    assert "rows=1" in table
    assert "rows=2" in table
    assert {"step-0.json", "step-1.json"} <= set(os.listdir())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("rows=0", "rows=0"),
        ("rows=[2,0]", "rows=[2, 0]"),
        ("rows=many", "rows='many'"),
        ("warmup=0", "warmup=0"),
        ("clip=hard", "clip='hard'"),
        ("output=xml", "output='xml'"),
        ("to=here", "to=here exists"),
        ("to=nowhere/result.json", "folder that does not exist"),
        ("strategy=single_device", "leave strategy=... at megatrain"),
        ("model.pretrained=gpt2", "model.pretrained at null"),
        ("strategy.microbatch=0", "microbatch=0"),
        ("clip=-1", "clip=-1 is no norm"),
        ("optim.lr=-1", "Invalid learning rate: -1"),
        ("to=/proc/result.json", "to=/proc/result.json cannot be written"),
    ],
)
def test_wrong_values_are_named(capsys, wrong, named):
    Path("here").touch()
    with pytest.raises(SystemExit) as stop:
        main(["bench", "step", *SMALL, wrong])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_a_timeline_without_matplotlib_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(gantt, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main(["bench", "step", *SMALL, "timeline=tl"])
    error = capsys.readouterr().err
    assert "timeline=tl draws charts, which needs matplotlib; run pip install 'lightning-megatrain[notebooks]'" in error
    assert "Traceback" not in error


def test_a_sweep_that_fails_ends_with_what_it_has_measured(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "step", "-m", *SMALL, "rows=1", "clip=null,-1"])
    said = capsys.readouterr()
    assert "clip=-1 is no norm" in said.err
    assert "clip=null" in said.out.rsplit("megatrain bench step", 1)[1]


@pytest.mark.parametrize(("clip", "bytes_each"), [("null", 12), ("1.0", 16)])
def test_a_training_that_the_host_cannot_hold_is_refused_before_weights_are_made(
    capsys, monkeypatch, measured, clip, bytes_each
):
    parameters = measured("rows=1")["parameters"]
    monkeypatch.setattr(need, "available_host_bytes", lambda: bytes_each * parameters - 1)
    monkeypatch.setattr(bench_step, "measure_ceiling", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(bench_step, "fill_weights", lambda *_: pytest.fail("filled"))
    with pytest.raises(SystemExit):
        main(["bench", "step", *SMALL, f"clip={clip}", "ceiling=true"])
    error = capsys.readouterr().err
    assert "Training " in error
    assert "are available; set a smaller model" in error


def test_blocks_are_compiled_anew_only_where_they_meet_other_shapes():
    assert _slices([4, 8, 16, 12], 8) == [{4}, {8}, {8}, {8, 4}]
    assert _slices([4, 8], None) == _slices([4, 8], "auto") == [{4}, {8}]


def test_tokens_are_the_same_each_time_and_differ_between_steps():
    data = RandomTokens([2, 3], 2, seq_len=5, vocabulary=50)
    batches = [batch["input_ids"] for batch in data]
    assert [tuple(b.shape) for b in batches] == [(2, 5), (2, 5), (3, 5), (3, 5)]
    assert torch.equal(batches[1], data[1]["input_ids"])
    assert not torch.equal(batches[0], batches[1])


def told(result, command):
    """Whether a result says what was run, on what, with what."""
    assert result["command"] == command
    assert {"cpu", "cores", "host_memory_bytes", "device"} <= result["hardware"].keys()
    assert result["versions"]["torch"] == torch.__version__
    assert {"lightning", "transformers"} <= result["versions"].keys()
    assert "commit" in result
    return True


def test_both_sides_of_a_comparison_and_their_circumstances_are_in_one_file(monkeypatch, capsys):
    figures = {"step_s": 1.0, "model_tflops": 1.0, "peak_device_allocated_bytes": 1}
    mine = {"sizes": [{**figures, "tokens_per_s": 30.0, "peak_host_rss_bytes": 5}]}
    theirs = {**figures, "what": "DeepSpeed", "tokens_per_s": 10.0, "peak_host_rss_bytes": 10}
    run = subprocess.run

    def measured(command, **options):
        if command[0] != sys.executable:
            return run(command, **options)
        [file] = [a.removeprefix("to=") for a in command if a.startswith("to=") or a.endswith("deepspeed.json")]
        Path(file).write_text(json.dumps(theirs if "--deepspeed" in command else mine))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", measured)
    monkeypatch.setattr(sys, "argv", ["peers.py", "made", "rows=4"])
    assert peers.main() == 0
    both = json.loads(Path("made/peers.json").read_text())
    assert (both["ours"], both["deepspeed"]) == (mine, theirs)
    assert both["ratios"] == {"speed": 3.0, "memory": 0.5}
    assert told(both, "python tests/benchmarks/peers.py made rows=4")
    assert "deepspeed" in both["versions"]


def test_deepspeed_is_given_room_to_fetch_ahead():
    assert peers.DEEPSPEED["stage3_prefetch_bucket_size"] == peers.DEEPSPEED["reduce_bucket_size"] == 5e8
    assert peers.DEEPSPEED["stage3_max_live_parameters"] == 1e9


def test_other_benchmarks_say_what_they_were_measured_on(monkeypatch, capsys):
    monkeypatch.setattr(plan, "measure", lambda wanted: {"step": [1.0, 2.0], **wanted})
    monkeypatch.setattr(sys, "argv", ["plan.py", "--one", "model=tiny,rows=2"])
    plan.main()
    assert told(json.loads(capsys.readouterr().out), "python tests/benchmarks/plan.py model=tiny,rows=2")
    arguments = ["model=tiny", "rows=1", "each=2", "turns=1", "seq=8"]
    monkeypatch.setattr(sys, "argv", ["monitor.py", *arguments])
    monitor.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told(result, " ".join(["python tests/benchmarks/monitor.py", *arguments]))
    assert len(result["with_s"]) == len(result["without_s"]) == 1


@pytest.mark.gpu
def test_on_a_gpu_the_ceiling_gives_its_memory_back(measured):
    wide = (
        "model.config.hidden_size=256",
        "data.vocab_size=4096",
        "seq_len=256",
        "accelerator=gpu",
        "precision=bf16_mixed",
    )
    result = measured(*wide, "rows=[4,8]", "strategy.microbatch=4", "strategy.compile=true", "clip=1.0", "ceiling=true")
    assert result["schedule"] == "next_forward"
    for size in result["sizes"]:
        for figures in (size, size["ceiling"]):
            assert 0 < figures["peak_device_allocated_bytes"] <= figures["peak_device_reserved_bytes"]
        assert size["losses"][0] == pytest.approx(size["ceiling"]["losses"][0], rel=1e-2)
    first = result["sizes"][0]
    # Of the ceiling nothing was there when ours began, which holds no weights but those of its slots and residents.
    assert first["peak_device_allocated_bytes"] < first["ceiling"]["peak_device_allocated_bytes"]
