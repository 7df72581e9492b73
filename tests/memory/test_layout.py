import torch
from torch.nn import Parameter

from lightning_megatrain.memory.layout import ALIGNMENT, Group, GroupLayout


def layout() -> GroupLayout:
    shapes = [("a", (3, 5), True), ("b", (200,), False), ("c", (), True), ("d", (0, 4), True), ("e", (129,), True)]
    return GroupLayout.of((name, torch.Size(shape), trainable) for name, shape, trainable in shapes)


def test_trainable_parameters_come_first_and_are_aligned() -> None:
    cut = layout()
    assert [e.name for e in cut.entries] == ["a", "c", "d", "e", "b"]
    assert all(e.offset % ALIGNMENT == 0 for e in cut.entries)
    assert (cut.trainable_count, cut.trainable_numel, cut.numel) == (4, 4 * 128, 4 * 128 + 256)
    assert cut.parameter_numel == 15 + 200 + 1 + 0 + 129


def test_views_do_not_overlap_and_keep_shape() -> None:
    cut = layout()
    flat = torch.zeros(cut.numel)
    for i, view in enumerate(cut.views(flat)):
        assert view.shape == cut.entries[i].shape
        view.fill_(i + 1)
    assert flat.count_nonzero() == cut.parameter_numel
    assert all((view == i + 1).all() for i, view in enumerate(cut.views(flat)))
    assert len(cut.views(flat[: cut.trainable_numel])) == cut.trainable_count


def test_spans_touch() -> None:
    cut = layout()
    nonempty = [i for i, e in enumerate(cut.entries) if e.numel]
    assert [cut.span(i).stop for i in nonempty[:-1]] == [cut.span(i).start for i in nonempty[1:]]
    assert cut.span(nonempty[-1]).stop == cut.numel


def test_group_orders_parameters_as_its_layout() -> None:
    frozen, trained = Parameter(torch.ones(3), requires_grad=False), Parameter(torch.ones(2))
    group = Group.of(0, "unit", [("frozen", frozen), ("trained", trained)], resident=False)
    assert group.parameters == (trained, frozen)


def test_empty_group() -> None:
    group = Group.of(0, "unit", [], resident=False)
    assert (group.layout.numel, group.layout.trainable_numel) == (0, 0)
