"""What every command shares: paths that Hydra's grammar would take apart, and whose error it is."""

import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_megatrain.cli.app import UserError, _quoted, require_writable, run_app


@pytest.mark.parametrize(
    "value",
    [
        "a.ckpt",
        "größe.ckpt",
        "a (1).ckpt",
        "a b",
        "step=3.ckpt",
        "~/x",
        "a,b",
        "it's",
        'say "so"',
        "a\\b",
        "c\\",
        "{a}:#",
    ],
)
@pytest.mark.parametrize("key", ["ckpt_path", "out", "data.train_path", "+export", "hydra.run.dir"])
def test_a_path_arrives_as_it_was_typed(key, value):
    parsed = OverridesParser.create().parse_override(_quoted(f"{key}={value}", sweeps=False))
    assert not parsed.is_sweep_override()
    assert parsed.value() == value


@pytest.mark.parametrize(
    ("argument", "sweeps"),
    [
        ("data.train_path=[a=1.jsonl,ö.jsonl]", False),
        ("ckpt_path='a b'", False),
        ('ckpt_path="a b"', False),
        ("export=${hydra:runtime.output_dir}/a b", False),
        ("ckpt_path=a b,c d", True),
        ("ckpt_path=", False),
        ("ckpt_path", False),
        ("ckpt_path=null", False),
        ("prompt=a b", False),
        ("optim.betas=(1,2)", False),
    ],
)
def test_what_is_no_plain_path_is_left_alone(argument, sweeps):
    assert _quoted(argument, sweeps=sweeps) == argument


def fails(error, monkeypatch, capsys, tmp_path):
    """What is printed when a command fails so."""
    monkeypatch.chdir(tmp_path)

    def task(cfg):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_app(task, command="export", config_name="export", argv=[])
    assert stop.value.code == 1
    assert "HYDRA_FULL_ERROR" not in os.environ
    return capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), ValueError("a bug"), ImportError("a bug")])
def test_a_bug_keeps_its_traceback(error, monkeypatch, capsys, tmp_path):
    said = fails(error, monkeypatch, capsys, tmp_path)
    assert "Traceback" in said
    assert "a bug" in said


def test_what_the_system_refuses_is_the_users_whoever_asked(monkeypatch, capsys, tmp_path):
    said = fails(OSError(28, "No space left on device", "/somewhere"), monkeypatch, capsys, tmp_path)
    assert "Traceback" not in said
    assert "at /somewhere (No space left on device); see to that, or set another path." in said


def test_a_folder_that_takes_no_file_is_refused_before_the_work(tmp_path):
    require_writable("export", tmp_path / "new" / "deep")
    require_writable("export", tmp_path)
    assert not list(Path(tmp_path).iterdir())
    (tmp_path / "file").touch()
    for path in ("/proc/nope/x", tmp_path / "file" / "x"):
        with pytest.raises(UserError, match=r"^export=.* cannot be written \(.*\); set another path\.$"):
            require_writable("export", path)
