import pytest
import torch
import zoo
from torch import nn

from lightning_megatrain.stream.discovery import find_units, make_groups


def names(model: nn.Module, units: object = "auto") -> list[str]:
    return list(find_units(model, units))  # type: ignore[arg-type]


def test_auto_finds_the_repeated_blocks() -> None:
    assert names(zoo.Llama()) == [f"model.model.layers.{i}" for i in range(3)]
    assert names(zoo.Gpt2()) == [f"model.transformer.h.{i}" for i in range(3)]
    assert len(names(zoo.Vit())) == 3
    assert names(zoo.Moe()) == [f"blocks.{i}" for i in range(3)]  # the block, not its experts


def test_auto_takes_several_stacks_and_only_repeated_classes_of_a_sequential() -> None:
    model = nn.Transformer(16, 2, 3, 2, 32)
    assert names(model) == [f"encoder.layers.{i}" for i in range(3)] + [f"decoder.layers.{i}" for i in range(2)]
    block = lambda: nn.TransformerEncoderLayer(8, 2, 16)  # noqa: E731
    mixed = nn.Sequential(nn.Embedding(10, 8), block(), nn.ReLU(), block(), nn.Linear(8, 2))
    assert names(mixed) == ["1", "3"]


def test_chosen_by_class_name_qualified_name_or_predicate() -> None:
    model = zoo.Encoder()
    assert names(model, ["TransformerEncoderLayer"]) == [f"net.layers.{i}" for i in range(3)]
    assert names(model, "net.layers.1") == ["net.layers.1"]
    assert names(model, ["net.layers.1", "Linear", "net.layers.1.linear1"]) == [
        "net.layers.0.linear1",
        "net.layers.0.linear2",
        "net.layers.1",
        "net.layers.2.linear1",
        "net.layers.2.linear2",
        "head",
    ]
    assert names(model, lambda name, m: isinstance(m, nn.Embedding)) == ["embed"]


def test_every_parameter_is_in_exactly_one_group() -> None:
    for make in zoo.ALL.values():
        model = make()
        groups = make_groups(model, find_units(model))
        held = [id(p) for g in groups for p in g.parameters]
        assert sorted(held) == sorted(id(p) for p in model.parameters())
        assert [g.index for g in groups] == list(range(len(groups)))


def test_parameters_shared_between_units_or_with_the_outside_are_resident() -> None:
    model = zoo.Odd()
    shared = model.blocks[0].norm.weight
    model.head.bias = nn.Parameter(torch.zeros(zoo.VOCAB))
    groups = make_groups(model, find_units(model))
    home = next(g for g in groups if any(p is shared for p in g.parameters))
    assert home.resident


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="No unit found"):
        find_units(nn.Linear(3, 3))
