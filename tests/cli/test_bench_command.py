"""`megatrain bench host`."""

import json
import os

import pytest

from lightning_megatrain.cli import bench
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
    assert os.listdir() == []


def test_the_table_has_every_figure(capsys):
    assert main(["bench", "host", *SMALL]) == 0
    out = capsys.readouterr().out
    assert all(label in out for label, _ in bench.ROWS.values())
    assert bench.ROWS.keys() >= KEYS


@pytest.mark.parametrize("argv", [[], ["disk"]])
def test_what_to_measure_must_be_known(capsys, argv):
    assert main(["bench", *argv]) == 2
    assert "usage: megatrain bench host" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["output=xml", "host.numel=lots", "host.size=3"])
def test_wrong_overrides_are_named(capsys, wrong):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "host", *SMALL, wrong])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert wrong.split("=")[0].split(".")[-1] in error
    assert "Traceback" not in error
