"""Work that moves many bytes shows how far it is, to whoever can see it."""

import contextlib
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from rich.console import Console
from rich.live import Live
from torch import Tensor, nn

from lightning_megatrain.checkpoint.convert import convert
from lightning_megatrain.checkpoint.files import written_whole
from lightning_megatrain.checkpoint.lazy import PART_BYTES, LazyTensor, TensorSource
from lightning_megatrain.checkpoint.loading import reading
from lightning_megatrain.checkpoint.sharded import read_sharded, write_sharded
from lightning_megatrain.checkpoint.single import parts_of, read_single, write_single
from lightning_megatrain.memory import progress
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.mapped import FileMappings
from lightning_megatrain.memory.progress import working
from lightning_megatrain.memory.store import Moments, Store, StoreFormat

SIZE = 3_000_000


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal shows on which any work counts as large."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "_console", lambda: console)
    monkeypatch.setattr(progress, "LARGE", 0)
    return shown


class Bars(list[tuple[str, int, int]]):
    """What was done, its bytes, and those that were told of, work by work."""

    def one(self) -> tuple[str, int, int]:
        (bar,) = self
        self.clear()
        return bar


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    noted = Bars()

    class Noting(progress._Bar):
        def close(self) -> None:
            super().close()
            noted.append((self.what, self.total, self.done))

    monkeypatch.setattr(progress, "_Bar", Noting)
    return noted


# What is seen


def test_large_work_is_drawn_and_wiped(screen: io.StringIO) -> None:
    with working("Lifting", SIZE) as advance:
        advance(SIZE // 3)
    text = screen.getvalue()
    assert "Lifting" in text
    assert "1.0/3.0 MB" in text
    assert "left" in text
    assert "…" not in text  # it fits
    assert "\x1b[2K" in text.rpartition("Lifting")[2]  # nothing stays on the screen


def test_small_and_quick_work_shows_nothing(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LARGE", SIZE + 1)
    monkeypatch.setattr(progress, "SLOW", float("inf"))
    with working("Lifting", SIZE) as advance:
        advance(SIZE)
    assert screen.getvalue() == ""


def test_small_work_is_drawn_once_it_has_taken_long(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LARGE", SIZE + 1)
    monkeypatch.setattr(progress, "SLOW", float("inf"))
    with working("Lifting", SIZE) as advance:
        advance(SIZE // 3)
        assert screen.getvalue() == ""
        monkeypatch.setattr(progress, "SLOW", 0.0)
        advance(SIZE // 3)
    assert "2.0/3.0 MB" in screen.getvalue()


def test_nothing_to_do_shows_nothing(screen: io.StringIO) -> None:
    with working("Lifting", 0) as advance:
        advance(0)
    assert screen.getvalue() == ""


def test_an_error_ends_the_bar(screen: io.StringIO) -> None:
    output, kept = sys.stdout, []

    def fail() -> None:
        with working("Lifting", SIZE) as advance:
            kept.append(advance)
            assert sys.stdout is not output  # while it is drawn, what is printed goes above it
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert sys.stdout is output
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back
    length = len(screen.getvalue())
    kept[0](1)  # whoever kept it may call it
    assert len(screen.getvalue()) == length
    with working("Again", SIZE):
        pass
    assert "Again" in screen.getvalue()


def test_work_inside_other_work_is_silent(screen: io.StringIO) -> None:
    with working("Outer", SIZE) as outer:
        with working("Inner", SIZE) as inner:
            inner(SIZE)
        outer(SIZE // 3)
    assert "Inner" not in screen.getvalue()
    assert "1.0/3.0 MB" in screen.getvalue()


def test_work_of_another_thread_is_silent(screen: io.StringIO) -> None:
    def save() -> None:
        with working("Saving", SIZE) as advance:
            advance(SIZE)

    in_thread(save)
    with working("Lifting", SIZE):
        in_thread(save)
    assert "Lifting" in screen.getvalue()
    assert "Saving" not in screen.getvalue()


def test_any_thread_may_advance(screen: io.StringIO, bars: Bars) -> None:
    with working("Lifting", SIZE) as advance:
        threads = [threading.Thread(target=lambda: [advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bars.one() == ("Lifting", SIZE, 4000)


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# Who sees it


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", *progress._RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "LARGE", 0)
    return Terminal()


def drawn(stream: io.StringIO) -> bool:
    with contextlib.redirect_stderr(stream), working("Lifting", SIZE):
        pass
    return "Lifting" in stream.getvalue()


def test_a_terminal_on_stderr_shows_it(terminal: Terminal) -> None:
    assert drawn(terminal)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TERM", "dumb"), ("TTY_COMPATIBLE", "0"), ("TTY_INTERACTIVE", "0"), ("RANK", "1"), ("LOCAL_RANK", "3")],
)
def test_the_environment_can_silence_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert not drawn(terminal)


def test_a_file_shows_it_only_if_the_environment_says_so(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    assert not drawn(file)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert drawn(file)


def test_it_does_not_draw_over_another_display(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(rich, "get_console", lambda: shared)
    with Live("training", console=shared, auto_refresh=False):
        assert not drawn(terminal)
    assert drawn(terminal)


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_shows_it_where_it_can(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, widgets: bool) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if widgets else None)
    assert (progress._console() is not None) == widgets


# What is counted


def groups() -> list[Group]:
    first, second, frozen = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(16, 16).requires_grad_(False)
    return [
        Group.of(0, "a", list(first.named_parameters()), resident=False),
        Group.of(1, "b", [*second.named_parameters(prefix="x"), *frozen.named_parameters(prefix="y")], resident=True),
    ]


@pytest.mark.parametrize("store_format", StoreFormat)
def test_the_store_counts_what_it_takes_and_gives(bars: Bars, store_format: StoreFormat) -> None:
    store = Store(groups(), store_format, pin=False)
    store.adopt()
    nbytes = store.nbytes
    assert nbytes > 0
    assert bars.one() == ("Taking weights over", nbytes, nbytes)
    moments = Moments(store.groups)
    assert bars.one() == ("Memory for moments", moments.nbytes, moments.nbytes)
    store.release()
    assert bars.one() == ("Giving weights back", nbytes, nbytes)


def test_weights_that_are_not_taken_over_end_the_bar(bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(groups(), StoreFormat.FP32, pin=False)
    write = store.write_master

    def fail_at_the_second_group(group: int, *args: Any) -> None:
        if group == 1:
            raise MemoryError
        write(group, *args)

    monkeypatch.setattr(store, "write_master", fail_at_the_second_group)
    with pytest.raises(MemoryError):
        store.adopt()
    (_, total, done), (what, given, given_done) = bars
    assert 0 < done < total
    assert (what, given, given_done) == ("Giving weights back", done, done)


def make_checkpoint() -> tuple[dict[str, Any], int]:
    """A checkpoint of lazy and ordinary tensors, of which two are one, and the bytes of their values."""
    large, small = torch.rand(PART_BYTES // 4 // 1024 + 3, 1024), torch.rand(600, 700)
    tied = LazyTensor(TensorSource(small))
    state = {"large": large, "small": tied, "again": tied, "int": torch.arange(9)}
    moments = {"exp_avg": torch.rand(600, 700), "step": torch.tensor(3.0)}
    checkpoint = {"state_dict": state, "optimizer_states": [{"state": {0: moments}, "param_groups": []}]}
    return checkpoint, large.nbytes + 2 * small.nbytes + 9 * 8 + 4


def test_saving_counts_what_is_written(bars: Bars, tmp_path: Path) -> None:
    checkpoint, nbytes = make_checkpoint()
    write_single(checkpoint, tmp_path / "single.ckpt")
    assert bars.one() == ("Saving the checkpoint", nbytes, nbytes)
    write_sharded(checkpoint, tmp_path / "sharded.ckpt")
    (meta, shards) = bars  # small things first, in a file of their own
    assert meta[1:] == (4, 4)
    tied = 600 * 700 * 4  # is written under both of its names
    assert shards == ("Saving the checkpoint", nbytes - 4 + tied, nbytes - 4 + tied)


def test_making_files_durable_counts_them(bars: Bars, tmp_path: Path) -> None:
    with written_whole(tmp_path / "folder") as folder:
        (folder / "inner").mkdir(parents=True)
        for name, size in (("a", 10), ("inner/b", 300)):
            (folder / name).write_bytes(bytes(size))
    assert bars.one() == ("Waiting for the disk", 310, 310)
    with written_whole(tmp_path / "file") as file:
        file.write_bytes(bytes(7))
    assert bars.one() == ("Waiting for the disk", 7, 7)


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_reading_counts_what_is_read(bars: Bars, tmp_path: Path, form: str) -> None:
    module, copy = nn.Linear(700, 600), nn.Linear(700, 600)
    exp_avg = torch.rand(600, 700)
    optimizer = {"state": {0: {"exp_avg": exp_avg, "step": torch.tensor(3.0)}}, "param_groups": []}
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer]}
    if form == "single":
        write_single(checkpoint, tmp_path / "it.ckpt")
        read = read_single(tmp_path / "it.ckpt", weights_only=True)
        mappings = FileMappings()
        state: dict[str, Tensor] = {k: parts_of(v, mappings) for k, v in read["state_dict"].items()}
        nbytes = module.weight.nbytes  # smaller ones are read at once
    else:
        write_sharded(checkpoint, tmp_path / "it.ckpt")
        read = read_sharded(tmp_path / "it.ckpt", weights_only=True)
        state = dict(read["state_dict"])
        nbytes = module.weight.nbytes + module.bias.nbytes
    bars.clear()
    with reading("Loading weights", state) as told:
        copy.load_state_dict(told)
    assert bars.one() == ("Loading weights", nbytes, nbytes)
    assert torch.equal(copy.weight, module.weight)
    assert torch.equal(copy.bias, module.bias)
    if form == "sharded":
        with reading("Loading moments", read["optimizer_states"]) as states:
            values = states[0]["state"][0]
            assert torch.equal(torch.empty(600, 700).copy_(values["exp_avg"]), exp_avg)
        assert bars.one() == ("Loading moments", exp_avg.nbytes, exp_avg.nbytes)


def test_exports_count_what_they_write(bars: Bars, tmp_path: Path) -> None:
    state = {name: torch.rand(500, 600) for name in "abc"}
    torch.save({"state_dict": state}, tmp_path / "it.ckpt")
    nbytes = 3 * 500 * 600 * 4
    convert(tmp_path / "it.ckpt", to="safetensors", dtype="bfloat16", shard_size="1MiB")
    assert ("Writing weights", nbytes // 2, nbytes // 2) in bars
    convert(tmp_path / "it.ckpt", to="sharded")
    assert ("Saving the checkpoint", nbytes, nbytes) in bars
    bars.clear()
    convert(tmp_path / "it-sharded.ckpt", to="ckpt", out=tmp_path / "again.ckpt")
    assert ("Saving the checkpoint", nbytes, nbytes) in bars
    assert all(total == done for _, total, done in bars)
