"""What plots show, read back from the figures, and that drawing them twice gives the same bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from neuron_pushkv.report.plots import KNOWN, Limit, Series, Span, bars, colours, lines, png, stacked, svg, timeline

OURS = Series("pushkv", (1, 2, 4), (10.0, 20.0, 40.0), (9.0, 18.0, 35.0), (12.0, 22.0, 50.0))
OTHER = Series("another", (1, 2, 4), (30.0, 50.0, 90.0))


def axes_of(figure: Figure) -> Axes:
    (axes,) = figure.axes
    return axes


def heights(axes: Axes) -> list[list[float]]:
    return [
        [float(bar.get_height()) for bar in container]
        for container in axes.containers
        if isinstance(container, BarContainer)
    ]


def drawn_lines() -> Figure:
    return lines(
        [OURS, OTHER], title="TTFT", x_label="rate", y_label="ms", limit=Limit("SLO", 200.0), note="one machine"
    )


def test_lines_go_through_their_points_and_show_their_intervals() -> None:
    axes = axes_of(drawn_lines())
    drawn = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    assert [list(each.lines[0].get_ydata()) for each in drawn] == [list(OURS.y), list(OTHER.y)]
    (interval,) = drawn[0].lines[2]
    assert [tuple(segment[:, 1]) for segment in interval.get_segments()] == [(9.0, 12.0), (18.0, 22.0), (35.0, 50.0)]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("rate", "ms", "TTFT")


def test_a_limit_is_drawn_named_and_within_the_plot() -> None:
    axes = axes_of(drawn_lines())
    assert [each.get_text() for each in axes.texts] == ["SLO"]
    assert axes.get_ylim()[1] > 200.0


def test_bars_are_as_high_as_their_values_and_say_them() -> None:
    axes = axes_of(bars(["a", "b", "c"], [OURS, OTHER], title="t", y_label="ms"))
    assert heights(axes) == [list(OURS.y), list(OTHER.y)]
    assert {each.get_text() for each in axes.texts} == {"10.0", "20.0", "40.0", "30.0", "50.0", "90.0"}
    assert [each.get_text() for each in axes.get_xticklabels()] == ["a", "b", "c"]


def test_what_is_missing_has_no_bar() -> None:
    axes = axes_of(bars(["a"], [Series("pushkv", (), (math.nan,))], title="t", y_label="ms"))
    assert math.isnan(heights(axes)[0][0])
    assert [each.get_text() for each in axes.texts] == [""]


def test_phases_follow_each_other() -> None:
    axes = axes_of(stacked(["push", "pull"], {"queue": (1, 2), "prefill": (10, 20)}, title="t", x_label="ms"))
    drawn = [[(bar.get_x(), bar.get_width()) for bar in each] for each in axes.containers]
    assert drawn == [[(0, 1), (0, 2)], [(1, 10), (2, 20)]]


def test_a_timeline_has_lanes_in_milliseconds() -> None:
    lanes = {"prefill": (Span("prefill", 0.0, 0.5),), "decode": (Span("wait", 0.1, 0.5), Span("transfer", 0.5, 0.75))}
    axes = axes_of(timeline(lanes, title="t", marks=[(0.8, "first token")]))
    drawn = [length for bar in axes.patches for length in (bar.get_x(), bar.get_width())]
    assert drawn == pytest.approx([0, 500, 100, 400, 500, 250])
    assert [each.get_text() for each in axes.texts] == ["first token"]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["prefill", "decode"]


def test_contestants_keep_their_colours() -> None:
    assert colours(["x", "pushkv"])["pushkv"] == colours(["pushkv"])["pushkv"] == KNOWN["pushkv"]
    many = colours([f"n{number}" for number in range(20)])
    assert len(many) == 20
    assert len(set(colours(["a", "b", "c", *KNOWN]).values())) == 3 + len(KNOWN)


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    assert svg(drawn_lines()) == svg(drawn_lines())
    assert png(drawn_lines(), tmp_path / "a.png").read_bytes() == png(drawn_lines(), tmp_path / "b.png").read_bytes()
