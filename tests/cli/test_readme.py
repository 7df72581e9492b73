"""The README says what is there: commands, code, arguments, links, files, and numbers that stand elsewhere."""

import copy
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from fitting import loader
from omegaconf import OmegaConf
from zoo import Encoder

import lightning_megatrain
from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.main import COMMANDS, main
from lightning_megatrain.cli.values import check_values

ROOT = Path(__file__).resolve().parents[2]
CONF = config_dir()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
INLINE = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", PROSE)

SET_UP = ["python -m pip install . && megatrain train", "python -m pip install '.[test]' && pytest -n 2"]

TASKS = {
    "train": "train.train",
    "plan": "plan.plan",
    "export": "export.export",
    "bench step": "bench_step.bench_step",
    "bench link": "bench_link.run",
    "bench host": "bench_host.bench_host",
}
"""By command: the function that gets the composed config and does the work."""


def lines(language):
    return [line for kind, block in BLOCKS if kind == language for line in block.splitlines() if line]


def table(heading):
    """Cells of each row of the table whose first heading this is, without the headings."""
    rows = README[README.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def written():
    """The commands of blocks, and those of the text that set something."""
    found = [line for line in lines("bash") if line not in SET_UP] + [s for s in INLINE if re.match("megatrain .*=", s)]
    return sorted({tuple(shlex.split(line, comments=True)) for line in found})


def named():
    """The commands that the text names without setting anything."""
    return {s for s in INLINE if re.match("megatrain [^=]*$", s)}


@pytest.mark.parametrize("command", SET_UP)
def test_each_set_up_command_stands_on_a_line_of_its_own_once(command):
    assert README.splitlines().count(command) == 1


def test_there_is_no_block_that_nothing_here_looks_at():
    assert README.count("\n```") == 2 * len(BLOCKS)
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text"}
    assert len(written()) > 15


def started(monkeypatch, capsys, command):
    """Run a command line, all but its work; return the configs that the work would get."""
    configs = []

    def take(cfg):
        OmegaConf.resolve(cfg)
        check_values(cfg, targets={"optim": cfg.model["_target_"]} if "model" in cfg else None)
        configs.append(cfg)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # bench link asks for nothing else
    for task in TASKS.values():
        module, _, name = task.rpartition(".")
        monkeypatch.setattr(importlib.import_module(f"lightning_megatrain.cli.{module}"), name, take)
    assert main(command[1:]) == 0, capsys.readouterr().err
    return configs


@pytest.mark.parametrize("command", written(), ids=lambda words: " ".join(words[1:])[:60])
def test_every_command_composes(monkeypatch, capsys, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    assert command[0] == "megatrain"
    if "-m" in command:  # its first run, and the files of the others; test_train_command and others run sweeps
        swept = [word.split("=") for word in command if "," in word]
        options = [(group, option) for group, values in swept for option in values.split(",")]
        assert [option for group, option in options if "." not in group and not (CONF / group).is_dir()] == []
        assert [o for g, o in options if (CONF / g).is_dir() and not (CONF / g / f"{o}.yaml").exists()] == []
        command = [word.partition(",")[0] for word in command if word != "-m"]
    if "--help" in command:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(command[1:])
        assert "model:" in capsys.readouterr().out
    else:
        assert len(started(monkeypatch, capsys, command)) == 1


def test_a_wrong_name_in_a_command_is_found(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for wrong in ("callbacks=timelines", "strategy.recompute=sometimes"):
        with pytest.raises(SystemExit) as stop:
            started(monkeypatch, capsys, ["megatrain", "train", wrong])
        assert stop.value.code == 1


def test_commands_and_settings_in_the_text_are_there():
    assert {words[1] for words in written()} == set(COMMANDS)
    assert {name.removeprefix("megatrain ") for name in named()} <= {*COMMANDS, *TASKS}
    arguments = inspect.signature(MegaTrainStrategy).parameters
    settings = [s for s in INLINE if re.fullmatch(r"\w+=[\w\"'\[\].]+", s) and s.partition("=")[0] in arguments]
    calls = [s.removeprefix("strategy=") for s in INLINE if "MegaTrainStrategy(" in s]
    assert settings
    assert calls
    for setting in settings:
        MegaTrainStrategy(**eval(f"dict({setting})"))
    for call in calls:
        assert isinstance(eval(call, {"lightning_megatrain": lightning_megatrain}), MegaTrainStrategy)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about loggers and workers
def test_the_python_blocks_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"your_module": Encoder(), "your_data": loader(8)}
    before = copy.deepcopy(names["your_module"].state_dict())
    for language, block in BLOCKS:
        if language == "python":
            exec(block, names)
    assert isinstance(names["trainer"].strategy, MegaTrainStrategy)
    assert any(not torch.equal(before[name], value) for name, value in names["your_module"].state_dict().items())
    assert len(names["callbacks"]) == 3


def test_the_argument_table_has_the_strategys_arguments_and_defaults():
    documented = {name.strip("`"): default.strip("`") for name, default, _ in table("argument")}
    parameters = inspect.signature(MegaTrainStrategy).parameters.values()
    plugins = {"accelerator", "checkpoint_io", "precision_plugin"}
    assert documented == {p.name: repr(p.default).replace("'", '"') for p in parameters if p.name not in plugins}


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PROSE) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_tree_is_of_what_is_there():
    folders, shown = [], set()
    for line in lines("text"):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name.rstrip("/")]
        shown.add("/".join(folders))
        assert (ROOT / "/".join(folders)).exists(), line
        assert (ROOT / "/".join(folders)).is_dir() == name.endswith("/"), line
    packages = {f"lightning_megatrain/{path.parent.name}" for path in ROOT.glob("lightning_megatrain/*/__init__.py")}
    assert packages <= shown
    assert {"conf", "notebooks", "tests"} <= shown


def test_messages_in_the_table_of_symptoms_are_said():
    sources = "".join(path.read_text() for path in (ROOT / "lightning_megatrain").rglob("*.py"))
    said = re.sub(r'"\n *f?"', "", sources) + "CUDA out of memory"  # which torch says
    quoted = [quote for symptom, _ in table("symptom") for quote in re.findall(r'"([^"]+)"', symptom)]
    assert len(quoted) > 5
    assert [quote for quote in quoted if quote not in said] == []


RESULTS = ROOT / "tests/benchmarks/results"


def timed_steps():
    """What `megatrain bench step` wrote, by row: the whole, and its one size."""
    found = {path.stem: json.loads(path.read_text()) for path in (RESULTS / "h200_speed").glob("*.json")}
    return {name: (step, *step["sizes"]) for name, step in found.items()}


def peers():
    """What `tests/benchmarks/peers.py` wrote: ours, theirs, and ratios."""
    return json.loads((RESULTS / "h200_peers.json").read_text())


def test_our_numbers_stand_in_the_results():
    measured = [*timed_steps().values(), (peers()["ours"], *peers()["ours"]["sizes"])]
    ours = [row for row in table("what") if row[0].startswith("this")]
    assert len(ours) == 4
    for what, _, clipping, tokens_per_s, tflops, gpu, rss, _ in ours:
        schedule, limit, commit = re.fullmatch(r'this, `(\w+)`(?:, `device_memory="(\w+)"`)?, at (\w+)', what).groups()
        [(step, size)] = [found for found in measured if f"{found[1]['tokens_per_s']:,.0f}" == tokens_per_s]
        assert step["commit"].startswith(commit)
        assert step["schedule"] == schedule
        assert step["strategy"]["device_memory"] == (limit or "auto")
        assert clipping == ("yes" if step["clip"] else "no")
        assert f"{size['model_tflops']:.0f}" == tflops
        assert f"{size['peak_device_allocated_bytes'] / 2**30:.1f}" == gpu
        assert f"{size['peak_host_rss_bytes'] / 2**30:.1f}" == rss
    for what, parameters, *_, rss, each in table("what"):
        billions = {"7.6B": 7.615616512, "3.4B": 3.397103616}[parameters]
        assert float(each) == pytest.approx(float(rss) * 2**30 / 1e9 / billions, abs=0.06), what


def test_the_peers_numbers_are_those_of_one_run_with_ours():
    theirs, ratios = peers()["deepspeed"], peers()["ratios"]
    [row] = [row for row in table("what") if row[0].startswith("DeepSpeed")]
    assert theirs["what"] == row[0]
    assert row[3:5] == [f"{theirs['tokens_per_s']:,.0f}", f"{theirs['model_tflops']:.0f}"]
    assert row[5:7] == [f"{theirs[f'peak_{of}_bytes'] / 2**30:.1f}" for of in ("device_allocated", "host_rss")]
    said = re.search(r"ours does ([\d.]+) times its tokens/s in ([\d.]+) times its host memory", README)
    assert list(said.groups()) == [f"{ratios['speed']:.2f}", f"{ratios['memory']:.2f}"]


def test_shares_of_the_ceiling_are_those_measured():
    text, measured, steps = " ".join(README.split()), (RESULTS / "h200_speed.md").read_text(), timed_steps()
    said = {
        "7b_32k": "1.15",
        "7b_32k_clip": "1.07",
        "7b_8k_clip": "1.06",
        "7b_32k_24gib": "0.98",
        "7b_64k_32gib": "0.97",
    }
    assert steps.keys() == said.keys()
    for name, share in said.items():
        _, size = steps[name]
        assert f"{size['of_ceiling']:.2f}" == share
        assert share in text
        assert f"| {size['step_s']:.3f} | {size['ceiling']['step_s']:.3f} | {size['of_ceiling']:.3f} |" in measured
    assert f"{steps['7b_32k'][1]['ceiling']['tokens_per_s']:,.0f} tokens/s" in text


def test_the_host_memory_of_the_table_is_12_and_14_bytes_per_parameter():
    for model, parameters, plain, clipped, host, *_ in table("model"):
        count = float(parameters.rstrip("B")) * 1e9
        per_parameter = [float(gib.replace(",", "")) * 2**30 / count for gib in (plain, clipped)]
        # Slabs come on top while gradients are not all kept; figures are rounded.
        assert 11.9 < per_parameter[0] < 12.5, model
        assert per_parameter[1] == pytest.approx(14, rel=0.02), model
        assert (CONF / "host" / f"{host.strip('`')}.yaml").exists()
        assert (CONF / "model" / f"{model.strip('`')}.yaml").exists()


def test_the_table_is_what_the_plan_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [row] = [row for row in table("model") if row[1] == "7.6B"]  # any one of them
    [command] = [words for words in written() if "plan" in words and "strategy.device_update=never" in words]
    fixed = [
        word for word in command[1:] if word != "-m" and not word.startswith(("model=", "host=", "data.batch_size="))
    ]
    sizes = [word.strip("`") for word in row]
    assert main([*fixed, f"model={sizes[0]}", f"host={sizes[4]}", "data.batch_size=4", "output=json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["fits"]
    assert f"{plan['host_bytes'] / 2**30:,.0f}" == sizes[2]
    assert f"{plan['device_bytes'] / 2**30:.1f}" == sizes[5]


def test_the_picture_of_a_step_is_that_of_its_trace():
    """Fetch, compute, push and update overlap in it."""
    picture = (RESULTS / "h200_7b_timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    events = json.loads((RESULTS / "h200_7b_timeline.trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(lanes[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    computes = [(start, end) for lane, start, end in spans if lane == "compute"]
    for other in ("fetch", "push", "update"):
        there = [(start, end) for lane, start, end in spans if lane == other]
        during = [any(a < end and start < b for a, b in computes) for start, end in there]
        assert len(there) >= 25, other
        assert sum(during) >= len(there) - 2, other
