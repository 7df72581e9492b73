"""Checks config values against the annotations of what they configure.

YAML has no types, and `trainer.max_steps=many` would otherwise fail far from its cause. The signatures that the
values end up in do have types, so no second list of them is kept here.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import hydra.utils
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.optim import AdamW

from lightning_megatrain.checkpoint.files import first_line
from lightning_megatrain.cli.app import UserError
from lightning_megatrain.recipes.optim import cosine_with_warmup


def check_values(cfg: DictConfig, targets: Mapping[str, str] | None = None) -> None:
    """Hold every value below a `_target_` against the target's annotation.

    Annotations beyond plain values, choices and unions of them are not judged.

    Args:
        cfg: the composed config.
        targets: for groups without a `_target_` of their own, the one that receives their values.

    Raises:
        UserError: naming the key, its value and what it should be.
    """
    _check(cfg, path="", targets=targets or {})


def require_positive(cfg: DictConfig, *keys: str) -> None:
    """Refuse numbers that are not above zero where Lightning or arithmetic would fail far from them.

    Args:
        cfg: the composed config.
        keys: of numbers; null, and what is no number, is not judged.

    Raises:
        UserError: naming the key and its value.
    """
    for key in keys:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, (int, float)) and not value > 0:
            raise UserError(f"{key}={value} must be more than 0.")


def check_optim(cfg: DictConfig) -> None:
    """Hold the group `optim` against what AdamW and its schedule accept.

    Raises:
        UserError: naming what is wrong.
    """
    optim: dict[str, Any] = OmegaConf.to_container(cfg.optim, resolve=True)  # type: ignore[assignment]
    betas = optim.get("betas", (0.9, 0.95))
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise UserError(f"optim.betas={betas} is not valid: it must be two numbers, such as [0.9,0.95].")
    given = {name: optim[name] for name in ("lr", "eps", "weight_decay") if name in optim}
    try:
        AdamW([torch.zeros(1)], betas=tuple(betas), **given)
        cosine_with_warmup(
            warmup_steps=optim.get("warmup_steps", 0), total_steps=0, min_ratio=optim.get("min_lr_ratio", 0.0)
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"The group optim does not suit AdamW ({first_line(error)}); correct that value.") from error


def _check(node: Any, path: str, targets: Mapping[str, str]) -> None:
    if isinstance(node, ListConfig):
        for index in range(len(node)):
            _check(node[index], f"{path}[{index}]", targets)
    if not isinstance(node, DictConfig):
        return
    target = node.get("_target_", targets.get(path))
    hints = _hints(target) if target else {}
    for key in map(str, node):
        name = f"{path}.{key}" if path else key
        value = node[key]
        if isinstance(value, (DictConfig, ListConfig)):
            _check(value, name, targets)
            value = OmegaConf.to_container(value, resolve=True)
        if key in hints and not _accepts(value, hints[key]):
            raise UserError(f"{name}={value!r} is not valid: it must be {' or '.join(_describe(hints[key]))}.")


def _hints(target: str) -> dict[str, Any]:
    """Annotations of the target's parameters; empty where it has none that can be read."""
    try:
        resolved = hydra.utils.get_object(target)
        function = resolved.__init__ if inspect.isclass(resolved) else resolved
        return typing.get_type_hints(inspect.unwrap(function))
    except Exception:
        # A wrong `_target_` is reported by instantiate, with its own message.
        return {}


def _accepts(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_accepts(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    # Containers and nested targets are for their constructor to judge; so are classes a plain value may be turned into.
    return not isinstance(value, (bool, int, float, str, type(None))) or _may_be_plain(hint)


def _may_be_plain(hint: Any) -> bool:
    """Tell whether a plain value could satisfy an annotation that is not judged here."""
    origin = typing.get_origin(hint) or hint
    return not inspect.isclass(origin) or any(issubclass(plain, origin) for plain in (str, int, float))


def _describe(hint: Any) -> list[str]:
    """Name the alternatives of an annotation, each once."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [text for option in typing.get_args(hint) for text in _describe(option)]
        return list(dict.fromkeys(options))
    if origin is Literal:
        return [str(option) for option in typing.get_args(hint)]
    names = {type(None): "null", bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return [names.get(hint, getattr(hint, "__name__", str(hint)))]
