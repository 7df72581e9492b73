"""LightningCLI: the strategy by name, by class path with arguments, and its help."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zoo
from lightning.pytorch.cli import LightningCLI

from lightning_megatrain import MegaTrainStrategy

SCRIPT = '''
"""Runs command lines one after another, and prints what each used and what came of it."""

import json
import logging
import sys

import torch
from fitting import loader
from lightning.pytorch.cli import LightningCLI
from zoo import Encoder

import lightning_megatrain

logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
torch.set_num_threads(1)


class Model(Encoder):
    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)

    def train_dataloader(self):
        return loader(16)


for line in json.loads(sys.argv[1]):
    cli = LightningCLI(
        Model,
        args=["fit", *line],
        trainer_defaults={
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
        save_config_kwargs={"overwrite": True},
        seed_everything_default=1,
    )
    strategy = type(cli.trainer.strategy)
    print(json.dumps({
        "strategy": f"{strategy.__module__}.{strategy.__qualname__}",
        "losses": [x.item() for x in cli.model.losses],
        "weights": [p.double().sum().item() for p in cli.model.parameters()],
    }))
'''

OURS = "lightning_megatrain.strategy.MegaTrainStrategy"


def run(directory: Path, *lines: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What the script prints for each command line, and all that was logged."""
    (directory / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", json.dumps(lines)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


def test_by_name_and_by_class_path_with_arguments(tmp_path: Path) -> None:
    arguments = {
        "update": "blocking",
        "units": '["TransformerEncoderLayer", "Embedding"]',
        "prefetch": "0",
        "threads": "1",
        "host_memory": "1GiB",
    }
    (stock, by_name, by_path), log = run(
        tmp_path,
        ["--trainer.strategy=auto"],
        ["--trainer.strategy=megatrain"],
        [
            "--trainer.strategy=lightning_megatrain.MegaTrainStrategy",
            *(f"--trainer.strategy.{name}={value}" for name, value in arguments.items()),
        ],
    )
    assert len(stock["losses"]) == 3
    assert by_name == by_path == {**stock, "strategy": OURS}
    assert "2 units, update 'in_backward'" in log
    assert "3 units, update 'blocking' (as asked)" in log


def documented() -> dict[str, str]:
    """Text of every argument in the docstring, on one line."""
    section = inspect.cleandoc(MegaTrainStrategy.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    entries = re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in (entry.split(": ", 1) for entry in entries)}


def test_help_lists_every_argument_with_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # argparse breaks no line
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as end:
        LightningCLI(zoo.Encoder, args=["fit", f"--trainer.strategy.help={OURS}"])
    assert not end.value.code
    text = capsys.readouterr().out.split("\noptions:", 1)[-1]
    entries = dict(
        re.findall(r"^ +(?:ARG: +)?--(?:[\w.]+\.)?(\w+)(?:[ =].*)?$((?:\n {6,}.*)*)", text, flags=re.MULTILINE)
    )
    texts = documented()
    for name in inspect.signature(MegaTrainStrategy).parameters:
        assert texts[name]
        assert texts[name] in " ".join(entries[name].split()), name
