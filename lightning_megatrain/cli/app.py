"""What every command shares: where the configs are, and how Hydra is started and told about errors."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import CompactHydraException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig


class UserError(CompactHydraException):
    """An error whose message says everything: Hydra prints it without a traceback and exits with 1."""


def config_dir() -> Path:
    """Return the folder of the configs, absolute: installed inside the package, or at the top of a source tree.

    Raises:
        FileNotFoundError: if it is in neither place.
    """
    package = importlib.util.find_spec("lightning_megatrain.conf")
    candidates = [Path(place) for place in (package.submodule_search_locations or [])] if package else []
    candidates.append(Path(__file__).resolve().parents[2] / "conf")
    for candidate in candidates:
        if (candidate / "train.yaml").is_file():
            return candidate.resolve()
    raise FileNotFoundError(
        f"The configs of lightning_megatrain are in none of {[str(c) for c in candidates]}; install the package again."
    )


def run_app(task: Callable[[DictConfig], Any], *, command: str, config_name: str, argv: Sequence[str]) -> None:
    """Let Hydra compose the config from `argv` and run `task` with it, once or for a sweep.

    Args:
        task: the command's work; gets the composed config.
        command: name that usage and help show.
        config_name: primary config.
        argv: overrides and Hydra's own flags.
    """

    @functools.wraps(task)
    def guarded(cfg: DictConfig) -> Any:
        with short_errors():
            return task(cfg)

    # Hydra reads the process's arguments and nothing else.
    original = sys.argv
    sys.argv = [f"megatrain {command}", *(_quoted(argument) for argument in argv)]
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(guarded)()
    finally:
        sys.argv = original


_PATHS = frozenset(
    {
        "ckpt",
        "ckpt_path",
        "out",
        "to",
        "timeline",
        "export",
        "tokenizer",
        "model.pretrained",
        "data.tokenizer",
        "data.chat_template",
    }
    | {"data.train_path", "data.val_path", "data.root"}
)


def _quoted(argument: str) -> str:
    """Make a path with `=` in it, as Lightning names checkpoints, one value in Hydra's grammar."""
    key, _, value = argument.partition("=")
    if key not in _PATHS or "=" not in value or value[0] in "'\"":
        return argument
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


@contextmanager
def short_errors() -> Iterator[None]:
    """Turn errors that were raised for the user to read into `UserError`, and leave bugs their traceback.

    An error is for the user when this package or Lightning raised it on purpose: its type is one of those used for
    refusals, and its innermost frame lies in one of the two. `HYDRA_FULL_ERROR=1` shows the traceback all the same.
    """
    try:
        yield
    except CompactHydraException as error:
        # Hydra wraps what a constructor raised; its own message repeats the type and a path nobody typed.
        cause = error.__cause__
        if cause is not None and _is_refusal(cause):
            raise UserError(str(cause)) from cause
        raise
    except Exception as error:
        if _is_refusal(error):
            raise UserError(str(error)) from error
        raise


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, (ValueError, TypeError, RuntimeError, MisconfigurationException, OSError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    origin = frames[-1].f_globals.get("__name__", "") if frames else ""
    return origin.split(".")[0] in ("lightning_megatrain", "lightning")
