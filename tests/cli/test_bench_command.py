"""`megatrain bench`: what can be measured, and `megatrain bench host`."""

import json
import os
from pathlib import Path

import pytest

from lightning_megatrain.cli import bench, bench_host
from lightning_megatrain.cli.main import main

SMALL = ["host.numel=65536", "host.repeats=1"]
KEYS = {"kernel_gparams_s", "torch_fused_gparams_s", "reference_gparams_s", "dram_gb_s", "isa", "threads"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_json_is_one_object_and_leaves_nothing_behind(capsys):
    assert main(["bench", "host", "output=json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() >= KEYS
    assert figures["dram_gb_s"] > 0
    assert figures["command"] == "megatrain bench host output=json host.numel=65536 host.repeats=1"
    assert figures["hardware"]["cpu"]
    assert os.listdir() == []


def test_the_table_has_every_figure_and_the_file_too(capsys):
    assert main(["bench", "host", *SMALL, "to=host.json"]) == 0
    out = capsys.readouterr().out
    assert all(label in out for label, _ in bench_host.ROWS.values())
    assert bench_host.ROWS.keys() >= KEYS
    assert json.loads(Path("host.json").read_text()).keys() >= KEYS


@pytest.mark.parametrize("argv", [[], ["disk"]])
def test_what_to_measure_must_be_known(capsys, argv):
    assert main(["bench", *argv]) == 2
    assert "usage: megatrain bench <what>" in capsys.readouterr().err


@pytest.mark.parametrize("what", bench.MEASUREMENTS)
def test_every_measurement_has_help_with_examples(capsys, what):
    assert main(["bench", "--help"]) == 0
    assert f"  {what} " in capsys.readouterr().out
    assert main(["bench", what, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: megatrain bench {what} ")
    assert f"\n  megatrain bench {what}" in text.partition("examples:")[2]


@pytest.mark.parametrize("wrong", ["output=xml", "host.numel=lots", "host.size=3"])
def test_wrong_overrides_are_named(capsys, wrong):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "host", *SMALL, wrong])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert wrong.split("=")[0].split(".")[-1] in error
    assert "Traceback" not in error
