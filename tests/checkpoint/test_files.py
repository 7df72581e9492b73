"""Files and folders appear whole, are replaced in one step, and are removed in one step."""

import os
from pathlib import Path

import pytest

from lightning_megatrain.checkpoint import files
from lightning_megatrain.checkpoint.files import (
    recover,
    remove_leftovers,
    remove_whole,
    require_replaceable,
    written_whole,
)


def put(path: Path, kind: str, text: str) -> None:
    if kind == "file":
        path.write_text(text)
    else:
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "text").write_text(text)


def get(path: Path) -> str:
    return (path / "inner" / "text").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("new", ["file", "folder"])
@pytest.mark.parametrize("old", [None, "file", "folder", "link to a file", "link to a folder"])
def test_what_was_there_is_replaced(
    old: str | None, new: str, swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    target, elsewhere = tmp_path / "deep" / "x.ckpt", tmp_path / "elsewhere"
    target.parent.mkdir()
    if old is not None and old.startswith("link"):
        put(elsewhere, old.removeprefix("link to a "), "old")
        target.symlink_to(elsewhere)
    elif old is not None:
        put(target, old, "old")
    with written_whole(target) as partial:
        put(partial, new, "new")
        assert get(target) == "old" if old is not None else not target.exists()
    assert get(target) == "new"
    assert not target.is_symlink()
    if elsewhere.exists():
        assert get(elsewhere) == "old"
    assert os.listdir(target.parent) == ["x.ckpt"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_error_leaves_what_was_there_and_nothing_else(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    put(target, kind, "old")

    def fail() -> None:
        with written_whole(target) as partial:
            put(partial, kind, "new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert get(target) == "old"
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_removal_is_one_step(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.ckpt"
    put(target, kind, "old")
    seen = []
    delete = files._delete
    monkeypatch.setattr(files, "_delete", lambda path: (seen.append((target.exists(), get(path))), delete(path)))
    remove_whole(target)
    assert seen == [(False, "old")]
    assert os.listdir(tmp_path) == []
    remove_whole(target)  # missing is fine


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    host = files._host()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    dead = tmp_path / f".{host}~{child}~00~0.partial"
    earlier = tmp_path / f".{host}~{os.getpid()}~00~0.partial"  # of a process that had this one's id
    stay = [
        tmp_path / f".{host}~{os.getpid()}~{files._token(os.getpid())}~0.partial",
        tmp_path / f".another-host~{child}~00~0.partial",
        tmp_path / ".a.partial",
        tmp_path / "x.ckpt",
    ]
    for path in (dead, earlier, *stay):
        put(path, "folder", "")
    remove_leftovers(tmp_path)
    assert {p.name for p in stay} == set(os.listdir(tmp_path))


def test_the_name_in_between_is_not_made_of_the_real_one(tmp_path: Path) -> None:
    """Programs look for names that contain another (`hpc_ckpt_2.ckpt`), and names may be as long as they can be."""
    target = tmp_path / ("hpc_ckpt_2" + "x" * 240 + ".ckpt")
    with written_whole(target) as partial:
        assert "hpc" not in partial.name
        put(partial, "file", "new")
    assert get(target) == "new"


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("killed_after", ["the old one was moved", "the new one was moved"])
def test_a_replacement_that_was_killed_is_finished_or_taken_back(
    killed_after: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system cannot swap names, there is a moment with nothing under the real one."""

    class Killed(BaseException):
        pass

    target = tmp_path / "x.ckpt"
    put(target, "folder", "old")
    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    rename, done = Path.rename, []

    def dies(self: Path, to: Path) -> Path:
        if len(done) == (1 if killed_after == "the old one was moved" else 2):
            raise Killed
        done.append(to)
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", dies)
    delete = files._delete
    monkeypatch.setattr(files, "_delete", lambda path: None)
    if killed_after == "the new one was moved":
        monkeypatch.setattr(files, "_sync", lambda path: None)
        with written_whole(target) as partial:
            put(partial, kind, "new")
    else:
        with pytest.raises(Killed), written_whole(target) as partial:
            put(partial, kind, "new")
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(files, "_delete", delete)
    remove_leftovers(tmp_path)
    recover(target)
    assert get(target) == ("old" if killed_after == "the old one was moved" else "new")
    assert not list(tmp_path.glob("*.replaced"))


@pytest.mark.parametrize("swaps", [True, False])
def test_no_file_of_the_user_is_taken_for_ours(swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swaps:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    target = tmp_path / ("x" * 250 + ".ckpt")  # the name in between must not be longer than names can be
    theirs = [tmp_path / name for name in ("x.replaced", "x.ckpt.replaced", ".x.replaced", ".x.partial", "x.partial")]
    for path in theirs:
        put(path, "file", "theirs")
    for kind in ("folder", "file"):
        for path in (target, tmp_path / "x.ckpt", tmp_path / "x"):
            recover(path)
            with written_whole(path) as partial:
                put(partial, kind, "ours")
    assert [get(path) for path in theirs] == ["theirs"] * len(theirs)


def test_a_folder_is_replaced_only_if_all_in_it_is_ours(tmp_path: Path) -> None:
    names = (r"a", r".*\.b")
    require_replaceable(tmp_path / "missing", names, hint="another")
    put(tmp_path / "file", "file", "")
    require_replaceable(tmp_path / "file", names, hint="another")
    folder = tmp_path / "folder"
    folder.mkdir()
    require_replaceable(folder, names, hint="another")
    for name in ("a", "x.b"):
        put(folder / name, "file", "")
    require_replaceable(folder, names, hint="another")
    put(folder / "notes", "file", "")
    with pytest.raises(ValueError, match=r"holds 'notes', which would be lost; move that, or set another\.$"):
        require_replaceable(folder, names, hint="another")
