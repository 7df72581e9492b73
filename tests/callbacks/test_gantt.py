"""The chart of a step as a GPU runs it: what is drawn where, and what is labelled."""

import pytest

from lightning_megatrain.callbacks import gantt
from lightning_megatrain.callbacks.recording import Recording
from lightning_megatrain.stream.spans import Span

UNITS = 28


def recording(inline=False):
    """Forward and backward of 28 units in a second; the second half of it hides pushes and updates."""
    spans = [Span("wait", "fetch layers.0", 10.0, 10.02), Span("fetch", "fetch layers.0", 10.0, 10.02, 10**9)]
    for i in range(UNITS):
        begin = 10.02 + i * 0.01
        spans += [Span("compute", f"forward layers.{i}", begin + part, begin + part + 0.005) for part in (0.0, 0.005)]
    for i in range(UNITS):
        begin, name = 10.35 + i * 0.02, f"layers.{UNITS - 1 - i}"
        spans.append(Span("compute", f"backward {name}", begin, begin + 0.02))
        spans.append(Span("update", f"update {name}", begin + 0.02, begin + 0.04, 4 * 10**7))
    spans.append(Span("wait", "worker", 10.91, 11.0))
    found = Recording(inline, [(7, 10.0)], end=11.0)
    found.take([*spans, Span("compute", "forward before", 9.0, 9.5), Span("compute", "forward after", 11.0, 12.0)])
    return found


def axes(what):
    return gantt.chart(what).axes[0]


def test_only_what_touches_the_steps_is_kept_and_described():
    found = recording()
    assert not {"forward before", "forward after"} & {span.label for span in found.spans}
    assert found.describe() == "1 s a step, waited 11.0%, fetch 50 GB/s, update 0.5 G parameters/s"


def test_units_are_labelled_where_all_of_a_kind_fit_and_stalls_by_cause():
    texts = [(text.get_text(), round(text.get_position()[1])) for text in axes(recording()).texts]
    compute = [text for text, row in texts if row == 1]
    assert compute == [str(i) for i in reversed(range(UNITS))]  # backward; a forward is too short
    assert [text for text, row in texts if row == 4] == ["worker"]  # the other stall is too short for a word


def test_every_kind_is_in_the_legend_and_time_outside_units_is_marked():
    legend = [text.get_text() for text in axes(recording()).get_legend().get_texts()]
    assert legend == ["fetch", "forward", "backward", "update", "stall", "outside units"]
    assert gantt._gaps([Span("compute", "a", 1.0, 2.0), Span("wait", "b", 1.5, 3.0)], 4.0) == [(0.0, 1.0), (3.0, 4.0)]


def test_where_the_host_computes_nothing_is_outside():
    legend = [text.get_text() for text in axes(recording(inline=True)).get_legend().get_texts()]
    assert "outside units" not in legend


def test_slices_of_one_unit_are_one_bar():
    visible = gantt._visible(recording(), "compute", pixel=0.001)
    assert [span.label for span in visible].count("forward layers.3") == 1
    assert visible[3].seconds == pytest.approx(0.01)
    assert visible[3].start == pytest.approx(0.05)
