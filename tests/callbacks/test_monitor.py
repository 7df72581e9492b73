"""What the monitor logs, against a clock that the test moves."""

import lightning as L
import pytest
from fitting import MegaTrainStrategy, assert_same_bits, fit
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from small_model import TOKENS, UNITS, VOCAB, WIDTH, Small, batches, train
from zoo import Llama

from lightning_megatrain.callbacks import throughput as throughput_module
from lightning_megatrain.callbacks.monitor import Monitor
from lightning_megatrain.callbacks.throughput import Throughput

UNIT = WIDTH * WIDTH
PARAMETERS = len(UNITS) * UNIT + 2 * VOCAB * WIDTH


class Kept(DummyLogger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("perf/") for name in metrics):
            self.rows.append((step, dict(metrics)))


class Clocked(Small):
    """Every batch takes a second, a quarter of which the device waits; every copy a hundredth of one."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_train_start(self):
        self.copies = 0
        streams = getattr(self.trainer.strategy, "streams", None)
        if streams is not None:
            streams.delay = self.slow

    def slow(self, lane):
        if not self.trainer.validating:
            self.clock["seconds"] += 0.01
            self.copies += 1

    def training_step(self, batch, batch_idx):
        if hasattr(self.trainer.strategy, "streams"):
            with self.trainer.strategy.streams.span("wait", "fetch blocks.0"):
                self.clock["seconds"] += 0.125
            with self.trainer.strategy.streams.span("wait", "update blocks.0"):
                self.clock["seconds"] += 0.125
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        with self.trainer.strategy.streams.span("wait", "fetch blocks.0"):
            self.clock["seconds"] += 100.0
        super().validation_step(batch, batch_idx)


class Whole(L.Callback):
    """Fills every batch up to a second. Comes before the monitor."""

    def __init__(self, clock):
        self.clock, self.began = clock, 0.0

    def on_train_batch_start(self, *args):
        self.began = self.clock["seconds"]

    def on_train_batch_end(self, *args):
        self.clock["seconds"] = self.began + 1.0


@pytest.fixture
def clock(monkeypatch):
    now = {"seconds": 1000.0}
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: now["seconds"])
    return now


def test_rates_stalls_and_peaks_reach_the_logger_every_few_batches(clock):
    logger = Kept()
    monitor = Monitor(warmup_steps=2, every_n_steps=3, flops_per_token=0.5e12, peak_tflops=64.0)
    validation = {"validation": batches(2), "val_check_interval": 4}
    module, _ = train([Whole(clock), monitor], steps=9, module=Clocked(clock), logger=logger, **validation)
    assert [step for step, _ in logger.rows] == [4, 7]
    for _, row in logger.rows:
        assert row["perf/tokens_per_s"] == pytest.approx(TOKENS)
        assert row["perf/model_tflops"] == pytest.approx(TOKENS / 2)
        assert row["perf/mfu"] == pytest.approx(TOKENS / 2 / 64)
        assert row["perf/stall_s/fetch"] == pytest.approx(0.125)
        assert row["perf/stall_s/update"] == pytest.approx(0.125)
        assert row["perf/stall_s/slab"] == row["perf/stall_s/push"] == row["perf/stall_s/worker"] == 0
        assert row["perf/waited"] == pytest.approx(0.25)
        assert row["perf/peak_host_bytes"] > 2**20
        assert "perf/peak_device_bytes" not in row  # the CPU has none of its own
    assert monitor.latest == {name.removeprefix("perf/"): value for name, value in logger.rows[-1][1].items()}
    assert module.copies > 0


def test_rates_of_the_link_are_bytes_by_the_time_that_copies_take(clock):
    monitor = Monitor(warmup_steps=1, every_n_steps=2)
    copied = {"fetch": [], "push": []}

    class Listen(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.strategy.streams.attach(self.add)

        def add(self, span):
            if span.lane in copied:
                copied[span.lane].append(span)

    train([Whole(clock), Listen(), monitor], steps=3, module=Clocked(clock))
    for lane, spans in copied.items():
        of_units = [span for span in spans if span.unit in UNITS]
        assert {span.nbytes for span in of_units} == {4 * UNIT}
        steady = spans[len(spans) // 3 :]
        expected = sum(span.nbytes for span in steady) / (0.01 * len(steady)) / 1e9
        assert monitor.latest[f"{lane}_gb_per_s"] == pytest.approx(expected)


def test_updates_are_counted_in_parameters():
    told = []

    class Listen(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.strategy.streams.attach(self.add)

        def add(self, span):
            if span.lane == "update":
                told.append(span)

    monitor = Monitor(warmup_steps=1, every_n_steps=1)
    train([Listen(), monitor], steps=3)
    assert sum(span.nbytes for span in told) == 3 * 4 * PARAMETERS
    assert monitor.latest["update_gparams_per_s"] > 0


def test_the_module_may_say_its_own_flops(clock):
    class Known(Clocked):
        flops_per_token = 2e12

    monitor = Monitor(warmup_steps=1, every_n_steps=2)
    _, trainer = train([Whole(clock), monitor], steps=3, module=Known(clock))
    assert monitor.latest["model_tflops"] == pytest.approx(2 * TOKENS)
    assert "mfu" not in monitor.latest
    shown = trainer.progress_bar_metrics
    assert shown["model_tflops"] == pytest.approx(2 * TOKENS)
    assert shown["waited"] == pytest.approx(0.25)
    assert shown["tokens_per_s"] == pytest.approx(TOKENS)


def test_between_two_looks_spans_do_not_pile_up():
    pending = []

    class Counts(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            pending.append(len(trainer.strategy.streams._log._pending))

    fit(Llama, MegaTrainStrategy(), max_steps=8, callbacks=[Monitor(every_n_steps=100), Counts()])
    assert 0 < pending[-1] <= max(pending[:3])  # those of one backward


def test_what_cannot_be_known_is_left_out(clock):
    monitor = Monitor(warmup_steps=1, every_n_steps=2)
    train([Whole(clock), monitor], steps=3, module=Clocked(clock), strategy=SingleDeviceStrategy("cpu"))
    assert set(monitor.latest) == {"tokens_per_s", "peak_host_bytes"}


def test_watching_changes_no_bit():
    runs = []
    for callbacks in ([], [Monitor(1, every_n_steps=1)]):
        strategy = MegaTrainStrategy(update="next_forward")
        module, _ = fit(Llama, strategy, precision="bf16-mixed", max_steps=3, callbacks=callbacks)
        runs.append(module)
    assert_same_bits(*runs)


def test_a_fit_that_failed_leaves_the_next_one_alone(clock):
    class Fails(Clocked):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("planted")

    monitor = Monitor(warmup_steps=1, every_n_steps=2)
    with pytest.raises(ZeroDivisionError):
        train([monitor], module=Fails(clock))
    train([Whole(clock), monitor], steps=3, module=Clocked(clock))
    assert monitor.latest["waited"] == pytest.approx(0.25)


def test_checkpoints_are_those_of_throughput():
    before = Throughput()
    before.tokens_seen = 5
    after = Monitor()
    assert after.state_key == before.state_key
    after.load_state_dict(before.state_dict())
    assert after.tokens_seen == 5


@pytest.mark.parametrize("setting", [{"every_n_steps": 0}, {"peak_tflops": 0.0}, {"warmup_steps": 0}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Monitor(**setting)
