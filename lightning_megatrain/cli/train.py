"""`megatrain train`: compose, evaluate, train, evaluate again, report."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks.measure import peak_host_rss
from lightning_megatrain.callbacks.throughput import Throughput
from lightning_megatrain.checkpoint.files import is_local
from lightning_megatrain.checkpoint.huggingface import export_huggingface
from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.need import hollow_model, require_host_memory
from lightning_megatrain.cli.report import TrainReport, print_sweep
from lightning_megatrain.cli.values import check_values

_runs: list[tuple[str, TrainReport]] = []
"""Of this command so far: overrides, and what was reached."""


def main(argv: Sequence[str]) -> int:
    """Run the command with Hydra overrides and flags; returns the exit status."""
    _runs.clear()
    run_app(train, command="train", config_name="train", argv=argv)
    if len(_runs) > 1:
        print_sweep(_runs)
    return 0


def train(cfg: DictConfig) -> float:
    """Train what `cfg` describes and print the report.

    Args:
        cfg: the composed `train.yaml`.

    Returns:
        The final validation loss in nats per token, which is what a Hydra sweeper minimises; NaN without validation.
    """
    check_values(cfg, targets={"optim": cfg.model["_target_"]})
    _check_export(cfg)
    _quieten()
    if cfg.prepare is not None:
        instantiate(cfg.prepare)
    hollow = hollow_model(cfg)
    if hollow is not None:
        require_host_memory(
            hollow,
            cfg,
            clips=bool(cfg.trainer.get("gradient_clip_val")),
            accumulates=cfg.trainer.get("accumulate_grad_batches", 1) > 1,
        )
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data: L.LightningDataModule = instantiate(cfg.data)
    module: L.LightningModule = instantiate(cfg.model, **_plain(cfg.optim))
    module.sampling = instantiate(cfg.sample)
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=[instantiate(callback) for callback in cfg.callbacks.values() if callback is not None],
        logger=instantiate(cfg.logger) if cfg.logger is not None else False,
    )

    before = _last(trainer.validate(module, data, ckpt_path=cfg.ckpt_path, verbose=False))
    trainer.fit(module, data, ckpt_path=cfg.ckpt_path)
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
    report.print(_sample(trainer, module, data, cfg.prompt))
    _runs.append((" ".join(HydraConfig.get().overrides.task), report))
    if cfg.export is not None:
        if checkpoint is None:
            raise UserError(
                f"export={cfg.export} needs a checkpoint to be made of, and none was written; set callbacks.checkpoint "
                "so that it saves one, or leave export out."
            )
        print(f"exported {export_huggingface(checkpoint, out=cfg.export).path}")
    return after.get("val_loss", float("nan"))


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


def _sample(trainer: L.Trainer, module: L.LightningModule, data: Any, prompt: str) -> str | None:
    """Continue `prompt` under the trainer's own strategy and precision; None if no token is wanted."""
    if module.sampling.max_new_tokens == 0:
        return None
    batches: DataLoader[Any] = DataLoader([{"input_ids": data.encode(prompt)}], batch_size=1)  # type: ignore[arg-type]
    [tokens] = trainer.predict(module, batches)
    return data.decode(tokens[0])


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


def _check_export(cfg: DictConfig) -> None:
    """Refuse, before hours of training, an export that could not be written after it."""
    if cfg.export is None:
        return
    places = [
        c.get("dirpath")  # null: Lightning makes a folder of its own
        for c in cfg.callbacks.values()
        if c is not None and c.get("_target_", "").endswith(".ModelCheckpoint") and c.get("save_top_k", 1) != 0
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


def _last(results: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """What a validation logged; nothing if there is no data for it."""
    return results[0] if results else {}


def _log(trainer: L.Trainer) -> Path | None:
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            return Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
    return None
