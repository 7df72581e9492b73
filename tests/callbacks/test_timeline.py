"""What a timeline holds: which steps, which lanes, and files that viewers read."""

import json
import time
from itertools import pairwise

import lightning as L
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_model import UNITS, batches, train

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks import gantt
from lightning_megatrain.callbacks.timeline import Timeline

ROWS = ["steps", "fetch", "compute", "push", "update", "wait"]


class Threaded(MegaTrainStrategy):
    update_thread_on_cpu = True


def events(path):
    """Name, row, begin and end in microseconds of each event, in the order of their begins."""
    trace = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert [names[row] for row in sorted(names)] == ROWS
    found = [(e["name"], names[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X"]
    return sorted(found, key=lambda e: e[2])


@pytest.fixture
def record(tmp_path):
    def run(chosen, *, png=False, **arguments):
        timeline = Timeline(chosen, tmp_path / "new" / "folder", png=png)
        train([timeline], **arguments)
        return timeline

    return run


def test_every_use_of_every_unit_is_on_its_lane_and_the_cpu_takes_turns(record):
    timeline = record([2], strategy=MegaTrainStrategy(units=["Block"], update="in_backward", recompute="always"))
    [path] = timeline.files
    found = events(path)
    assert path.name == "step_2.trace.json"
    step, *work = found
    assert step[:3] == ("step 2", "steps", 0.0)
    assert all(begin >= 0 and end <= step[3] for _, _, begin, end in work)
    by_row = {row: [name for name, where, _, _ in work if where == row] for row in ROWS}
    back = UNITS[::-1]
    again = [f"{verb} {unit}" for unit in back for verb in ("recompute", "backward")]
    assert by_row["compute"] == [f"forward {unit}" for unit in UNITS] + again
    assert [name for name in by_row["update"] if "blocks" in name] == [f"update {unit}" for unit in back]
    assert [name for name in by_row["push"] if name != "push"] == [f"push {unit}" for unit in back]
    assert {f"fetch {unit}" for unit in UNITS} <= set(by_row["fetch"])
    assert by_row["wait"] == []
    assert all(end <= begin for (_, _, _, end), (_, _, begin, _) in pairwise(work))


def test_steps_that_follow_each_other_share_a_file_and_the_last_of_a_training_has_one(record):
    timeline = record([1, 2, 3, 5, 7], steps=8)
    assert [path.name for path in timeline.files] == [
        "steps_1-3.trace.json",
        "step_5.trace.json",
        "step_7.trace.json",
    ]
    for path, steps in zip(timeline.files, ([1, 2, 3], [5], [7]), strict=True):
        found = events(path)
        shown = [e for e in found if e[1] == "steps"]
        assert [e[0] for e in shown] == [f"step {step}" for step in steps]
        assert all(a[3] == pytest.approx(b[2]) for a, b in pairwise(shown))
        for unit in UNITS:
            assert [e[0] for e in found].count(f"forward {unit}") == len(steps)


def test_a_step_of_several_batches_is_one(record):
    [path] = record([1], accumulate_grad_batches=2, steps=3).files
    names = [e[0] for e in events(path)]
    assert names.count("step 1") == 1
    assert names.count("forward blocks.0") == 2
    assert any(name.startswith("sum blocks.") for name in names)


def test_an_update_behind_the_next_forward_is_in_the_step_in_which_it_ran(record):
    strategy = Threaded(units=["Block"], update="next_forward")
    found = events(record([0, 1, 2], steps=4, strategy=strategy).files[0])
    begin = {e[0]: e[2] for e in found if e[1] == "steps"}
    updates = [e for e in found if e[0] == "update blocks.3"]
    assert len(updates) >= 2
    assert all(e[2] > begin["step 0"] for e in updates)
    for update, step in zip(updates, ("step 1", "step 2"), strict=False):
        later = [e[2] for e in found if e[0] == "forward blocks.3" and e[2] > begin[step]]
        assert update[3] <= later[0]  # no forward on weights that are being updated


PAUSE = 0.4
"""Seconds of each thing that is no step."""


class Slow(L.Callback):
    """Takes its time wherever no step is under way."""

    reads_weights = False

    def __init__(self, tmp_path):
        self.path = tmp_path / "x.ckpt"
        self.save_after = ()

    def on_validation_batch_start(self, *args):
        time.sleep(PAUSE)

    def on_train_epoch_end(self, *args):
        time.sleep(PAUSE)

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step in self.save_after:
            trainer.save_checkpoint(self.path)
            time.sleep(PAUSE)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("chosen", "save_after", "arguments"),
    [
        ([2], (), {"val_check_interval": 3}),  # validation after the last chosen step
        ([2, 3], (), {"val_check_interval": 3}),  # between two
        ([1], (), {"val_check_interval": 3, "accumulate_grad_batches": 2}),  # in the middle of one
        ([2], (), {"limit_train_batches": 3, "max_epochs": 2}),  # an epoch ends, and a validation
        ([1, 2], (), {"limit_train_batches": 2, "max_epochs": 2}),
        ([2], (3,), {}),  # a checkpoint
        ([2, 3], (3,), {}),
        ([4], (), {}),  # the end of training
    ],
)
def test_seconds_that_belong_to_no_step_are_not_counted(tmp_path, chosen, save_after, arguments, first):
    timeline, slow = Timeline(chosen, tmp_path, png=False), Slow(tmp_path)
    slow.save_after = save_after
    made = []
    timeline._write, write = lambda recording: (made.append(recording), write(recording)), timeline._write
    train([timeline, slow] if first else [slow, timeline], steps=5, validation=batches(1), **arguments)
    [recording] = made
    assert 0 < recording.seconds < PAUSE
    found = events(timeline.files[0])
    steps = [e for e in found if e[0].startswith("step ")]
    assert {e[0] for e in steps} == {f"step {step}" for step in chosen}
    assert sum(e[3] - e[2] for e in steps) == pytest.approx(1e6 * recording.seconds)
    assert sum(e[3] - e[2] for e in found if e[0] == "no step") == pytest.approx(
        1e6 * (recording.end - recording.start - recording.seconds), abs=1
    )
    # The blocks of the steps are there, those of a validation are not.
    times = len(chosen) * arguments.get("accumulate_grad_batches", 1)
    for unit in UNITS:
        assert [e[0] for e in found].count(f"forward {unit}") == times
    chart = gantt.chart(recording)
    assert chart.axes[0].get_xlim()[1] == pytest.approx(recording.seconds)
    assert ("belong to no step" in recording.describe()) == bool(recording.pauses)


def test_the_chart_is_a_picture_with_every_lane(record):
    from matplotlib.image import imread

    timeline = record([2, 3], png=True)
    trace, chart = timeline.files
    assert (trace.name, chart.name) == ("steps_2-3.trace.json", "steps_2-3.png")
    pixels = imread(chart)
    assert pixels.shape[:2] == (2 * gantt.HEIGHT, 2 * gantt.WIDTH)
    colours = (pixels[::2, ::2, :3] * 255).round().astype(int) @ [1 << 16, 1 << 8, 1]
    seen = {f"#{colour:06x}" for colour in set(colours.ravel().tolist())}
    assert {gantt._COLOURS[kind] for kind in ("forward", "backward")} <= seen


def test_another_strategy_is_refused(record):
    with pytest.raises(MisconfigurationException, match=r"SingleDeviceStrategy; set Trainer\(strategy='megatrain'\)"):
        record([1], strategy=SingleDeviceStrategy("cpu"))


def test_steps_that_never_came_are_told(record):
    with pytest.warns(UserWarning, match=r"asked for steps \[3, 9\], and training ended after step 2"):
        timeline = record([1, 3, 9], steps=3)
    assert [path.name for path in timeline.files] == ["step_1.trace.json"]


def test_a_chart_without_matplotlib_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(gantt, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-megatrain\[notebooks\]"):
        Timeline([1])
    Timeline([1], png=False)


@pytest.mark.parametrize("steps", [[], [-1, 2]])
def test_steps_that_cannot_be_are_refused(steps):
    with pytest.raises(ValueError, match="steps="):
        Timeline(steps, png=False)
