"""Reading what a run of the command leaves."""

import csv
from pathlib import Path


def metrics(folder: Path) -> list[dict[str, str]]:
    """Rows of a run's CSV log."""
    with (folder / "csv" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def val_losses(folder: Path) -> list[float]:
    """Validation losses of a run, in order."""
    return [float(row["val_loss"]) for row in metrics(folder) if row.get("val_loss")]
