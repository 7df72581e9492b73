"""`kill -9` at any moment, training or saving, leaves a checkpoint from which a run ends in the bits it would have."""

import multiprocessing
import multiprocessing.context
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import FORMATS, SCHEDULES
from kill_child import MAX_STEPS, SAVE_EVERY, Run, train
from matrix import assert_equal
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_megatrain.checkpoint.sharded import is_sharded, read_sharded
from lightning_megatrain.checkpoint.single import read_single

SEED = 1
KILLS = {"blocking": 2, "next_forward": 3, "in_backward": 3}
"""At random, for each format, with and without ``save_async``: 32 in all."""


@lru_cache
def context() -> multiprocessing.context.ForkServerContext:
    """Children begin with everything imported."""
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["lightning", "lightning_megatrain", "torch.distributed.checkpoint", "omegaconf"])
    return chosen


def begin(run: Run, number: int, resume: Path | None) -> tuple[multiprocessing.process.BaseProcess, Path]:
    """Begin, or resume with other random numbers, in a new process that writes the log returned."""
    run.folder.mkdir(exist_ok=True)
    log = run.folder / f"{number}.log"
    child = context().Process(target=train, args=(run, log, resume, SEED if resume is None else 100 + number))
    child.start()
    return child, log


def events(log: Path) -> list[list[str]]:
    """Event and details of each line."""
    return [line.split()[1:] for line in log.read_text().splitlines()] if log.exists() else []


def require_success(child: multiprocessing.process.BaseProcess, log: Path) -> None:
    error = log.with_suffix(".error")
    assert child.exitcode == 0, error.read_text() if error.exists() else f"exit status {child.exitcode}"


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, as the strategy reads it, with every value."""
    reader = read_sharded if is_sharded(path) else read_single
    return tree_map_only(Tensor, Tensor.clone, reader(path, weights_only=True))


def content(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on where and how often a run was saved."""
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "megatrain")
    return {name: checkpoint[name] for name in names}


class Reference:
    """The same run, never interrupted, with all its checkpoints."""

    def __init__(self, folder: Path, update: str) -> None:
        run = Run(folder, update=update, top_k=-1, save_last=False)
        child, log = begin(run, 0, None)
        child.join()
        require_success(child, log)
        self.result = torch.load(run.result)
        read_all = map(read, run.checkpoints.glob("*.ckpt"))
        self.checkpoints = {checkpoint["global_step"]: content(checkpoint) for checkpoint in read_all}
        assert sorted(self.checkpoints) == list(range(SAVE_EVERY, MAX_STEPS, SAVE_EVERY))
        # A process that had nothing else to save may leave one more when it ends.
        self.checkpoints[MAX_STEPS] = {
            "state_dict": self.result["weights"],
            "optimizer_states": [self.result["optimizer"]],
            "lr_schedulers": [self.result["scheduler"]],
            "global_step": MAX_STEPS,
        }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lru_cache(lambda update: Reference(tmp_path_factory.mktemp("reference"), update))


class Chain:
    """A run that is killed again and again, resumed from its newest checkpoint each time, and looked at in between."""

    def __init__(self, run: Run, reference: Reference) -> None:
        self.run, self.reference = run, reference
        self.processes = self.kills = self.step = self.finished = 0
        self.resume: Path | None = None

    def go_on(self, kill_at: tuple[str, int, float] | None = None) -> bool:
        """Begin or resume in a new process; True if it came to its end.

        Args:
            kill_at: kill it this many seconds after the nth time that the log tells of an event.
        """
        child, log = begin(self.run, self.processes, self.resume)
        self.processes += 1
        if kill_at is not None:
            event, count, delay = kill_at
            while child.exitcode is None and sum(e[0] == event for e in events(log)) < count:
                time.sleep(0.002)
            time.sleep(delay)
            child.kill()
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        if not killed:
            require_success(child, log)
        self.kills += killed
        saves = [event for event in events(log) if event[0] == "finished"]
        self.finished = max([self.finished, *(int(step) for _, step, _ in saves)])
        assert all((thread == "megatrain-save") == self.run.save_async for *_, thread in saves)
        self.look()
        return not killed

    def look(self) -> None:
        """Every checkpoint is whole and that of its step, and the newest is not older than the last finished save."""
        steps: dict[Path, int] = {}
        for path in self.run.checkpoints.glob("*.ckpt"):
            checkpoint = read(path)
            steps[path] = checkpoint["global_step"]
            expected = self.reference.checkpoints[steps[path]]
            assert_equal({name: checkpoint[name] for name in expected}, expected, path.name)
        self.step = max(steps.values(), default=0)
        assert self.step >= self.finished, steps
        self.resume = max(steps, key=lambda path: (steps[path], path), default=None)

    def check_end(self) -> None:
        """After the last process: the same bits, and nothing half-written is left."""
        result = torch.load(self.run.result)
        losses = self.reference.result["losses"]
        assert_equal({**self.reference.result, "losses": losses[len(losses) - len(result["losses"]) :]}, result, "")
        left = [path.name for path in self.run.checkpoints.iterdir() if path.suffix != ".ckpt"]
        assert not left, left


def moment(dice: random.Random, chain: Chain) -> tuple[str, int, float]:
    """When to kill: mostly a little after a save began or a batch was taken, sometimes while the process starts."""
    kind = dice.choice(["began", "began", "batch", "started"])
    steps = (MAX_STEPS - chain.step) // 2 + 1
    saves = steps // SAVE_EVERY * (1 + chain.run.save_last)
    delay = 10 ** dice.uniform(-4, -0.7)  # of every order of magnitude, for machines of every speed
    if kind == "started":
        return kind, 1, delay
    if kind == "began" and saves:
        return kind, dice.randint(1, saves), delay
    return "batch", dice.randint(1, steps), delay


@pytest.mark.timeout(120)
@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_killed_run_ends_as_if_nothing_had_been(
    tmp_path: Path, reference: Callable[[str], Reference], checkpoint_format: str, save_async: bool, update: str
) -> None:
    dice = random.Random(f"{checkpoint_format} {save_async} {update}")
    # Without `last.ckpt` the one checkpoint that there is gets replaced.
    top_k, save_last = {"blocking": (1, False), "next_forward": (1, True), "in_backward": (2, True)}[update]
    kills = lives = 0
    while kills < KILLS[update]:  # a process that ends before it is killed does not count
        run = Run(tmp_path / str(lives), checkpoint_format, save_async, update, top_k, save_last)
        chain = Chain(run, reference(update))
        while not chain.go_on(moment(dice, chain) if kills + chain.kills < KILLS[update] else None):
            pass
        chain.check_end()
        kills, lives = kills + chain.kills, lives + 1
    assert kills == KILLS[update]


def stand_and_kill(chain: Chain, before: str, name: str) -> None:
    """Go on up to the moment before this is done to a file or folder of this name."""
    run, chain.run = chain.run, replace(chain.run, stand_still=(before, name))
    assert not chain.go_on(("standing", 1, 0))
    chain.run = run


@pytest.mark.timeout(120)
@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_killed_while_the_last_save_cleans_up(
    tmp_path: Path, reference: Callable[[str], Reference], checkpoint_format: str, save_async: bool
) -> None:
    """After the newest checkpoint nothing is left to save, but something to remove."""
    run = Run(tmp_path / "run", checkpoint_format, save_async, save_last=False)
    chain = Chain(run, reference("blocking"))
    last = MAX_STEPS // SAVE_EVERY * SAVE_EVERY
    stand_and_kill(chain, "deleting", f"step={last - SAVE_EVERY}.ckpt")
    assert chain.step == last
    assert chain.go_on()
    chain.check_end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_killed_process_had_the_same_id(
    tmp_path: Path, reference: Callable[[str], Reference], checkpoint_format: str
) -> None:
    """A restarted container has the host name and the process ids of the one before it."""
    run = Run(tmp_path / "run", checkpoint_format, save_last=False, process_id=1)
    chain = Chain(run, reference("blocking"))
    stand_and_kill(chain, "placing", f"step={SAVE_EVERY}.ckpt")
    stand_and_kill(chain, "placing", f"step={2 * SAVE_EVERY}.ckpt")
    assert chain.step == SAVE_EVERY
    assert chain.go_on()
    chain.check_end()
