"""Putting loaded values into a model: all that fit, or none."""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_map_only

from lightning_megatrain.checkpoint.lazy import LazyTensor, Source, is_dense, tensors_in
from lightning_megatrain.memory.progress import working

_Values = TypeVar("_Values")


def check_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Let ``module.load_state_dict`` say what it has to say, before any value is overwritten.

    The module's own loading code runs, hooks included, on parameters and buffers without memory.

    Args:
        module: the module to be loaded.
        state: its future state.
        strict: as for ``load_state_dict``.
        source: where the state comes from, for the error.

    Raises:
        RuntimeError: names what is missing, unexpected, or of another shape.
    """
    hollow = {k: torch.empty(v.shape, dtype=v.dtype, device="meta") if is_dense(v) else v for k, v in state.items()}
    with _without_memory(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        try:
            module.load_state_dict(state_like(state, hollow), strict=strict)
        except Exception as error:
            # Loading code of the module's own may need values and fail without: that says nothing about the state.
            if str(error).startswith("Error(s) in loading state_dict") and "an exception occurred" not in str(error):
                raise RuntimeError(
                    f"{source} belongs to another model, so nothing was loaded; use a checkpoint of this one, or set "
                    f"LightningModule.strict_loading=False where only some names differ. {error}"
                ) from error


def state_like(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """``values`` as a state dict that carries the module versions of ``state``."""
    like = OrderedDict(values)
    if hasattr(state, "_metadata"):
        like._metadata = state._metadata  # type: ignore[attr-defined]
    return like


def with_missing(module: nn.Module, state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """``state``, in which parameters that a checkpoint left out on purpose keep the values they have."""
    own = dict(module.named_parameters(remove_duplicate=False))
    kept = {n: own[n].detach() for n in names if n in own and n not in state and not own[n].is_meta}
    return state_like(state, {**state, **kept}) if kept else state


def widen(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Make fp32 parameters of 16-bit ones that will be loaded with fp32 values, which they would round.

    Args:
        module: the whole module; its parameters are ordinary ones.
        state: what will be loaded.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(name)
        if (
            isinstance(value, Tensor)
            and value.dtype == torch.float32
            and parameter.dtype in (torch.bfloat16, torch.float16)
        ):
            parameter.data = parameter.data.float()


def materialize_meta(module: nn.Module, loaded: Collection[str] = ()) -> None:
    """Give parameters and buffers on the meta device memory on the CPU, module by module.

    They are filled by their module's ``reset_parameters``, unless all that the module itself holds is yet to be loaded.

    Args:
        module: the whole module.
        loaded: qualified names of what will be loaded.

    Raises:
        ValueError: a module with parameters or buffers on the meta device cannot fill them; nothing was changed.
    """
    empty: dict[str, nn.Module] = {}
    to_fill: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        own = dict([*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)])
        if any(tensor.is_meta for tensor in own.values()):
            empty[name] = child
            if not all((f"{name}.{key}" if name else key) in loaded for key in own):
                to_fill[name] = child
    for name, child in to_fill.items():
        if not callable(getattr(child, "reset_parameters", None)):
            raise ValueError(
                f"Module {name!r} ({type(child).__name__}) is on the meta device and has no reset_parameters() to fill "
                "its tensors; load all of them with trainer.fit(ckpt_path=...), or fill them in "
                "LightningModule.configure_model()."
            )
    for name, child in empty.items():
        tied = {id(p): p for p in child.parameters(recurse=False)}
        own = dict([*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)])
        real = {key: tensor.detach() for key, tensor in own.items() if not tensor.is_meta}
        child.to_empty(device="cpu", recurse=False)
        _follow_ties(module, tied, child)
        if name in to_fill:
            child.reset_parameters()  # type: ignore[operator]
        for key, value in real.items():
            getattr(child, key).data = value


def _follow_ties(module: nn.Module, before: dict[int, nn.Parameter], changed: nn.Module) -> None:
    """``to_empty`` may make new parameters; whoever shared the old ones shares them again."""
    after = list(changed.parameters(recurse=False))
    new = {old: p for (old, q), p in zip(before.items(), after, strict=True) if p is not q}
    for other in module.modules() if new else ():
        for name, parameter in other._parameters.items():
            if id(parameter) in new:
                other._parameters[name] = new[id(parameter)]


@contextlib.contextmanager
def reading(what: str, values: _Values) -> Iterator[_Values]:
    """Inside, a bar shows how much has been read of the tensors of a checkpoint that are read when they are used.

    Args:
        what: what is being read, for the bar.
        values: nested dicts and lists with tensors anywhere in them.

    Yields:
        The same, to be read in place of ``values``.
    """
    total = sum(tensor.nbytes for tensor in tensors_in(values) if isinstance(tensor, LazyTensor))
    with working(what, total) as advance:
        yield tree_map_only(LazyTensor, lambda lazy: LazyTensor(_Told(lazy.source, advance)), values)


class _Told:
    """Values of another source, and a call with the bytes of each part that is read."""

    def __init__(self, source: Source, advance: Callable[[int], None]) -> None:
        self._source, self._advance = source, advance
        self.shape, self.dtype = source.shape, source.dtype

    def read(self, start: int, stop: int) -> Tensor:
        rows = self._source.read(start, stop)
        self._advance(rows.nbytes)
        return rows


@contextlib.contextmanager
def _without_memory(module: nn.Module) -> Iterator[None]:
    """Inside, every parameter and buffer has its form and no memory."""
    hollow: dict[int, Any] = {}
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    tensors: dict[str, Any]
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
                    continue
                if id(tensor) not in hollow:
                    empty = torch.empty_like(tensor, device="meta")
                    hollow[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    )
                held.append((tensors, name, tensor))
                tensors[name] = hollow[id(tensor)]
    try:
        yield
    finally:
        for tensors, name, tensor in held:
            tensors[name] = tensor
