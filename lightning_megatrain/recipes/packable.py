"""Which of transformers' models keep packed sequences apart, and making those do so that only need the masks.

Models build their attention mask from position ids that start again, if they hand these on to the function that makes
it. Not all of them do, and one that does not mixes the sequences of a row without a word. Nor does a mask help layers
that pass a state along the row. Both can be told from the model's code and configuration.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types that see other positions through a mask only."""

_MASKED_ATTENTION = frozenset({"eager", "sdpa", "flex_attention"})
"""Implementations that take a mask. Flash attention reads positions itself, but from batches of one row only."""


def make_packable(module: nn.Module) -> None:
    """Make sure that every transformers model in `module` keeps the sequences of a packed row apart.

    Most models do by themselves. Those that drop the position ids on the way to their masks but take ready masks
    (gpt_oss, afmoe) get a hook that makes them. Calling it again changes nothing.

    Args:
        module: a model, or what holds it.

    Raises:
        ValueError: if a model would mix the sequences, naming its type and the reason.
    """
    models = [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    parts = {id(part) for model in models for part in model.modules() if part is not model}
    for model in models:
        if id(model) not in parts:
            _make_packable(model)


def _make_packable(model: PreTrainedModel) -> None:
    if problem := _problem(model):
        _refuse(model, problem)
    makers = 0
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        masks = _MaskCode(type(part).forward)
        makers += masks.calls
        if masks.by_positions:
            continue
        if not masks.taken_ready or part.config._attn_implementation not in ("eager", "sdpa"):
            _refuse(model, "it builds its masks without the position ids")
        if _give_masks not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_give_masks, with_kwargs=True)
    if not makers:
        _refuse(model, "it builds no mask from position ids")


def _problem(model: PreTrainedModel) -> str | None:
    """Say why no mask would help, if so."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "it takes no position ids"
    if model._is_stateful:
        return "its layers pass a state along the row"
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    attention = model.config._attn_implementation
    if attention not in _MASKED_ATTENTION:
        return f"its attention {attention!r} takes no mask"
    return None


def _refuse(model: PreTrainedModel, problem: str) -> None:
    raise ValueError(
        f"Packing needs a model that keeps the sequences of a row apart, and {model.config.model_type!r} does not: "
        f"{problem}; set data.packing=false."
    )


class _MaskCode:
    """What a model's `forward` says about its masks.

    Attributes:
        calls: how often it calls one of transformers' functions that make a mask.
        by_positions: whether each call gets the position ids, which is also true of none.
        taken_ready: whether masks may be passed as a mapping from layer types.
    """

    def __init__(self, forward: Any) -> None:
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        except (OSError, TypeError):
            source = ""  # no source: no claim
        tree = ast.parse(source)
        assigned = [
            (target.id, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        makers = {name for name, value in assigned if any(_is_maker(part) for part in _choices(value))}
        arguments = {name for name, value in assigned if isinstance(value, ast.Dict) and _has_positions(value)}
        arguments |= {name for name, value in assigned if ast.unparse(value) in {f"{old}.copy()" for old in arguments}}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        making = [call for call in calls if _is_maker(call.func) or ast.unparse(call.func) in makers]
        self.calls = len(making)
        self.by_positions = all(
            any(
                keyword.arg == "position_ids" or (keyword.arg is None and ast.unparse(keyword.value) in arguments)
                for keyword in call.keywords
            )
            for call in making
        )
        self.taken_ready = any(
            isinstance(call.func, ast.Name)
            and call.func.id == "isinstance"
            and "attention_mask" in ast.unparse(call.args[0])
            and ast.unparse(call.args[1]) == "dict"
            for call in calls
        )


def _is_maker(function: ast.expr) -> bool:
    """Tell transformers' functions that make a causal mask by their names."""
    if not isinstance(function, ast.Name):
        return False
    name = function.id
    return name.startswith("create_") and "mask" in name and "bidirectional" not in name


def _choices(value: ast.expr) -> list[ast.expr]:
    """The values that an assigned expression may have: Mistral picks its function with a conditional one."""
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _has_positions(arguments: ast.Dict) -> bool:
    return any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in arguments.keys)


def _give_masks(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before `forward`: put masks by layer type where there are position ids and no mask."""
    positions = kwargs.get("position_ids")
    others = ("attention_mask", "cache", "past_key_values")
    if positions is None or kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in others):
        return None
    window = model.config.sliding_window
    dtype = model.get_input_embeddings().weight.dtype
    additive = model.config._attn_implementation == "eager"
    masks = {
        "full_attention": packed_mask(positions, None),
        "sliding_attention": packed_mask(positions, window),
    }
    if additive:
        lowest = torch.finfo(dtype).min
        masks = {key: torch.zeros_like(m, dtype=dtype).masked_fill_(~m, lowest) for key, m in masks.items()}
    return args, {**kwargs, "attention_mask": masks}


def packed_mask(position_ids: Tensor, window: int | None) -> Tensor:
    """Return which positions of a packed row each position may look at.

    Args:
        position_ids: int64 (rows, time), starting again at 0 with each sequence.
        window: positions that a sliding window covers, the looking one included; None for all.

    Returns:
        bool (rows, 1, time, time), true where the third index may look at the fourth.
    """
    sequence = (position_ids == 0).cumsum(-1)
    looking, seen = position_ids[:, :, None], position_ids[:, None, :]
    # Comparisons only: a difference of positions would take eight times the memory of the mask.
    mask = (sequence[:, :, None] == sequence[:, None, :]) & (seen <= looking)
    if window is not None:
        mask &= seen > looking - window
    return mask[:, None]
