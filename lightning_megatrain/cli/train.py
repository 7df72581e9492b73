"""`megatrain train`: compose, evaluate, train, evaluate again, report."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks.measure import peak_host_rss
from lightning_megatrain.callbacks.throughput import Throughput
from lightning_megatrain.checkpoint.files import first_line, is_local
from lightning_megatrain.checkpoint.huggingface import export_huggingface
from lightning_megatrain.cli.app import UserError, require_writable, run_app
from lightning_megatrain.cli.need import hollow_model, require_host_memory
from lightning_megatrain.cli.report import TrainReport, print_sample, print_sweep
from lightning_megatrain.cli.values import check_optim, check_values, require_positive
from lightning_megatrain.recipes.sampling import Sampling

_runs: list[tuple[str, TrainReport]] = []
"""Of this command so far: overrides, and what was reached."""


def main(argv: Sequence[str]) -> int:
    """Run the command with Hydra overrides and flags; returns the exit status."""
    _runs.clear()
    try:
        run_app(train, command="train", config_name="train", argv=argv)
    finally:  # a sweep that fails says what it has reached
        if _runs:
            print_sweep(_runs)
    return 0


def train(cfg: DictConfig) -> float:
    """Train what `cfg` describes and print the report.

    Args:
        cfg: the composed `train.yaml`.

    Returns:
        The final validation loss in nats per token, which is what a Hydra sweeper minimises; NaN without validation.

    Raises:
        SystemExit: the run was stopped by a signal; its status is the one that shells give such a process.
    """
    check_values(cfg, targets={"optim": cfg.model["_target_"]})
    require_positive(cfg, "trainer.accumulate_grad_batches", "trainer.val_check_interval")
    _check_prompt(cfg)
    _check_places(cfg)
    _check_export(cfg)
    _quieten()
    if cfg.prepare is not None:
        instantiate(cfg.prepare)
    hollow = hollow_model(cfg)
    if hollow is not None:
        check_optim(cfg)
        require_host_memory(
            hollow,
            cfg,
            clips=bool(cfg.trainer.get("gradient_clip_val")),
            accumulates=cfg.trainer.get("accumulate_grad_batches", 1) > 1,
        )
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data: L.LightningDataModule = instantiate(cfg.data)
    sampling: Sampling = instantiate(cfg.sample)
    # Encoded now: what cannot be must not be found out after hours of training.
    prompt = data.encode(cfg.prompt) if sampling.max_new_tokens else None
    module: L.LightningModule = instantiate(cfg.model, **_plain(cfg.optim))
    module.sampling = sampling
    started = _Started()
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=[started, *(instantiate(callback) for callback in cfg.callbacks.values() if callback is not None)],
        logger=instantiate(cfg.logger) if cfg.logger is not None else False,
    )

    with _stopped_by_signals(trainer, cfg.ckpt_path):
        before = _last(trainer.validate(module, data, ckpt_path=cfg.ckpt_path, verbose=False))
        trainer.fit(module, data, ckpt_path=cfg.ckpt_path)
        if not started.yet and cfg.ckpt_path is not None:
            warnings.warn(
                f"ckpt_path={cfg.ckpt_path} is at step {trainer.global_step:,}, so nothing is left to train; set "
                f"trainer.max_steps={cfg.trainer.max_steps} to more.",
                stacklevel=2,
            )
        bytes_per_parameter = getattr(trainer.strategy, "host_bytes_per_parameter", None)
        after = _last(trainer.validate(module, data, verbose=False))
    checkpoint = _checkpoint(trainer)
    report = TrainReport(
        val_loss=(before.get("val_loss"), after.get("val_loss")),
        val_perplexity=(before.get("val_perplexity"), after.get("val_perplexity")),
        tokens_per_s=_throughput(trainer),
        host_bytes_per_parameter=bytes_per_parameter,
        peak_host_rss=peak_host_rss(),
        checkpoint=checkpoint,
        log=_log(trainer),
    )
    report.print()
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        _runs.append((" ".join(HydraConfig.get().overrides.task), report))
    if cfg.export is not None:
        if checkpoint is None:
            raise UserError(
                f"export={cfg.export} needs a checkpoint to be made of, and none was written; set callbacks.checkpoint "
                "so that it saves one, or leave export out."
            )
        print(f"exported {export_huggingface(checkpoint, out=cfg.export).path}")
    if prompt is not None:
        with _stopped_by_signals(trainer, cfg.ckpt_path):
            _sample(trainer, module, data, prompt)
    return after.get("val_loss", float("nan"))


class _Started(L.Callback):
    """Notes whether a fit had any step to do: a resumed one may be at its end already."""

    yet = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.yet = True


@contextmanager
def _stopped_by_signals(trainer: L.Trainer, ckpt_path: str | None) -> Iterator[None]:
    """Say how to go on when SIGTERM or ctrl-C ends a run, and end with the status that says so.

    Raises:
        SystemExit: 143 or 130. Lightning has ended the loops in order.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        if isinstance(stop, SIGTERMException):
            name, number = "SIGTERM", signal.SIGTERM
        elif isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
            name, number = "ctrl-C", signal.SIGINT
        else:
            raise
        newest = _newest(trainer) or ckpt_path
        how = "there is no checkpoint to go on with" if newest is None else f"go on with ckpt_path={newest}"
        print(f"\nmegatrain train: stopped by {name} at step {trainer.global_step:,}; {how}", file=sys.stderr)
        raise SystemExit(128 + number) from stop


def _quieten() -> None:
    """Silence what Lightning says to people who wrote the script; who typed a command can do nothing about it."""
    for message in (
        ".*does not have many workers.*",  # the data is in memory: worker processes would only copy it
        ".*You have overridden `on_before_batch_transfer`.*",  # as intended: every data module gets it
        ".*`isinstance.treespec, LeafSpec.` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "litlogger" not in record.msg)


def _plain(node: DictConfig) -> dict[str, Any]:
    """Return a config node as ordinary containers, its interpolations resolved."""
    container = OmegaConf.to_container(node, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _check_prompt(cfg: DictConfig) -> None:
    if cfg.sample.get("max_new_tokens") == 0:
        return
    if not isinstance(cfg.prompt, str):
        raise UserError(f"prompt={cfg.prompt} is no text; set prompt='\"{cfg.prompt}\"', or sample.max_new_tokens=0.")
    if not cfg.prompt:
        raise UserError("prompt= holds nothing to continue; set a text, or sample.max_new_tokens=0.")


def _sample(trainer: L.Trainer, module: L.LightningModule, data: Any, prompt: Tensor) -> None:
    """Continue `prompt` under the trainer's own strategy and precision, and print it."""
    batches: DataLoader[Any] = DataLoader([{"input_ids": prompt}], batch_size=1)  # type: ignore[arg-type]
    try:
        [tokens] = trainer.predict(module, batches)
    except Exception as error:  # whatever it is, the training is done and saved
        warnings.warn(
            f"The prompt was not continued ({first_line(error)}), as when weights have diverged; lower optim.lr, or "
            "set sample.max_new_tokens=0.",
            stacklevel=2,
        )
        return
    print_sample(data.decode(tokens[0]))


def _throughput(trainer: L.Trainer) -> float | None:
    for callback in trainer.callbacks:
        if isinstance(callback, Throughput):
            return callback.mean_tokens_per_s
    return None


def _checkpoint(trainer: L.Trainer) -> Path | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            return Path(callback.best_model_path)
    return None


def _newest(trainer: L.Trainer) -> Path | None:
    """The checkpoint of this run that was written last."""
    saving = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    names = {name for c in saving for name in (c.best_model_path, c.last_model_path, *c.best_k_models)}
    paths = [Path(name) for name in names if name and is_local(name)]
    return max((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime, default=None)


def _check_places(cfg: DictConfig) -> None:
    """Refuse, before hours of training, folders that could not be written in it."""
    for name, callback in cfg.callbacks.items():
        for key in ("dirpath", "folder"):
            place = callback.get(key) if callback is not None else None
            if place is not None and is_local(place):
                require_writable(f"callbacks.{name}.{key}", place)


def _check_export(cfg: DictConfig) -> None:
    """Refuse, before hours of training, an export that could not be written after it."""
    if cfg.export is None:
        return
    places = [
        c.get("dirpath")  # null: Lightning makes a folder of its own
        for c in cfg.callbacks.values()
        if c is not None
        and c.get("_target_", "").endswith(("ModelCheckpoint", "StepCheckpoint"))
        and c.get("save_top_k", 1) != 0
    ]
    if not places:
        raise UserError(f"export={cfg.export} needs a checkpoint to be made of; leave callbacks.checkpoint on.")
    if not is_local(cfg.export):
        raise UserError(f"export={cfg.export} is not on the local file system, which is needed; set a folder that is.")
    out = Path(os.path.abspath(Path(cfg.export).expanduser()))
    if os.path.lexists(out):
        raise UserError(f"export={cfg.export} exists already; set export to a new folder, or remove that one.")
    checkpoints = [Path(os.path.abspath(Path(place).expanduser())) for place in places if place is not None]
    if any(out == folder or out in folder.parents or folder in out.parents for folder in checkpoints):
        raise UserError(f"export={cfg.export} and the checkpoints would be in each other's place; set another folder.")
    require_writable("export", out)


def _last(results: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """What a validation logged; nothing if there is no data for it."""
    return results[0] if results else {}


def _log(trainer: L.Trainer) -> Path | None:
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            return Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
    return None
