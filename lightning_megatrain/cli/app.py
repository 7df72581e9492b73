"""What every command shares: where the configs are, and how Hydra is started and told about errors."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import CompactHydraException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

_FULL_ERROR = "HYDRA_FULL_ERROR"


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

    sweeps = any(argument in ("-m", "--multirun") for argument in argv)
    # Hydra reads the process's arguments and nothing else.
    original = sys.argv
    sys.argv = [f"megatrain {command}", *(_quoted(argument, sweeps=sweeps) for argument in argv)]
    try:
        with _errors_of_hydra():
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(guarded)()
    finally:
        sys.argv = original


@contextmanager
def _errors_of_hydra() -> Iterator[None]:
    """Say what Hydra itself cannot do, such as making a folder, as briefly as what a command cannot do."""
    if os.environ.get(_FULL_ERROR, "0") == "1":
        yield
        return
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"  # otherwise Hydra prints errors itself and exits
    try:
        yield
    except Exception as error:
        if isinstance(error, CompactHydraException):
            causes = [error.__cause__] if isinstance(error.__cause__, OmegaConfBaseException) else []
            print(*(str(said) for said in [error, *causes]), sep="\n", file=sys.stderr)
        elif _is_refusal(error):
            print(_sentence(error), file=sys.stderr)
        else:
            traceback.print_exc()
        print(f"\nSet the environment variable {_FULL_ERROR}=1 for a complete stack trace.", file=sys.stderr)
        sys.exit(1)
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


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
        "callbacks.checkpoint.dirpath",
        "callbacks.timeline.folder",
        "hydra.run.dir",
        "hydra.sweep.dir",
    }
    | {"data.tokenizer", "data.chat_template", "data.train_path", "data.val_path", "data.root"}
)


def _quoted(argument: str, *, sweeps: bool) -> str:
    """Make a path that Hydra's grammar would take apart, as with a space or `=` in it, one value of that grammar.

    Args:
        argument: of the command line.
        sweeps: whether commas stand between values.
    """
    key, _, value = argument.partition("=")
    harmless = r"[\w./:+-]*"
    if key.lstrip("+") not in _PATHS or re.fullmatch(harmless, value, re.ASCII):
        return argument
    if value[0] in "'\"[" or "${" in value or (sweeps and "," in value):
        return argument
    # Backslashes mean themselves but before a quote, of which one is to come at the end.
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + (found[2] and '\\"'), value)
    return f'{key}="{escaped}"'


def require_writable(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path at which nothing could be made, before the work whose result goes there.

    Args:
        name: of the setting.
        path: a file or folder that is not there yet, or a folder.

    Raises:
        UserError: its nearest folder does not take files.
    """
    folder = Path(os.path.abspath(Path(path).expanduser()))
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Permissions do not tell: there are read-only file systems, and full ones.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".megatrain"):
            pass
    except OSError as error:
        raise UserError(f"{name}={path} cannot be written ({error.strerror}: {folder}); set another path.") from error


@contextmanager
def short_errors() -> Iterator[None]:
    """Turn errors that were raised for the user to read into `UserError`, and leave bugs their traceback.

    An error is for the user when this package or Lightning raised it on purpose: its type is one of those used for
    refusals, and its innermost frame lies in one of the two; or when the system refuses a path.
    `HYDRA_FULL_ERROR=1` shows the traceback all the same.
    """
    try:
        yield
    except UserError:
        raise
    except CompactHydraException as error:
        # Hydra wraps what a constructor raised; its own message repeats the type and a path nobody typed.
        cause = error.__cause__
        if cause is not None and _is_refusal(cause):
            raise UserError(_sentence(cause)) from cause
        raise
    except Exception as error:
        if _is_refusal(error):
            raise UserError(_sentence(error)) from error
        raise


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, OSError):  # what the system refuses is the user's to mend, whoever asked for it
        return True
    return isinstance(error, _REFUSALS) and _is_ours(error)


_REFUSALS = (ValueError, TypeError, RuntimeError, MisconfigurationException, ImportError)


def _is_ours(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    origin = frames[-1].f_globals.get("__name__", "") if frames else ""
    return origin.split(".")[0] in ("lightning_megatrain", "lightning")


def _sentence(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.strerror is None or _is_ours(error):
        return str(error)
    where = "" if error.filename is None else f" at {error.filename}"
    return f"The system refuses what was asked for{where} ({error.strerror}); see to that, or set another path."
