"""Plots as functions: numbers in, a figure out. What a user has set for matplotlib doesn't change how they look."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

WIDTH, HEIGHT = 7.2, 3.8
"""Inches."""
DOTS = 120
"""Per inch, of PNG files."""
KNOWN = {
    "pushkv": "#0072B2",
    "nixl-push": "#D55E00",
    "nixl-pull": "#E69F00",
    "undivided": "#6E6E6E",
    "memcpy": "#999999",
}
"""Okabe and Ito's colours, which people with any colour vision can tell apart; what is known keeps its own."""
OTHERS = ("#009E73", "#56B4E9", "#CC79A7", "#F0E442", "#8C564B", "#17606B", "#B8B8B8")
MARKERS = "osD^v<>P"
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "neuron_pushkv",
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars. ``low`` and ``high``: ends of each value's interval, absolute."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Span:
    """Something that took from ``start`` to ``end``, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Limit:
    """What there is to reach, or not to exceed: a line across the plot."""

    name: str
    value: float


def colours(names: Sequence[str]) -> dict[str, str]:
    """One for each; the same names get the same colours."""
    rest = iter(OTHERS * (len(names) // len(OTHERS) + 1))
    return {name: KNOWN.get(name) or next(rest) for name in names}


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    ticks: Mapping[float, str] | None = None,
    limit: Limit | None = None,
    note: str = "",
) -> Figure:
    """One marked line for each series, with its intervals. ``ticks``: places on the x axis and what to call them."""
    with _style():
        figure, axes = _figure(title, note)
        chosen = colours([each.name for each in series])
        for number, each in enumerate(series):
            marker = MARKERS[number % len(MARKERS)]
            axes.errorbar(
                list(each.x),
                list(each.y),
                yerr=_errors(each),
                label=each.name,
                color=chosen[each.name],
                marker=marker,
                markersize=4.5,
                linewidth=1.6,
                capsize=2.5,
            )
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.yaxis.set_major_formatter(FuncFormatter(_number))
        if ticks:
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.minorticks_off()
        _limit(axes, limit)
        _legend(axes)
    return figure


def bars(
    groups: Sequence[str],
    series: Sequence[Series],
    *,
    title: str,
    y_label: str,
    limit: Limit | None = None,
    note: str = "",
) -> Figure:
    """Bars side by side for each group; of each series ``y`` has a value a group (NaN: none), ``x`` is not used."""
    with _style():
        figure, axes = _figure(title, note)
        chosen = colours([each.name for each in series])
        width = 0.8 / len(series)
        for number, each in enumerate(series):
            places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))]
            drawn = axes.bar(
                places,
                list(each.y),
                width * 0.92,
                yerr=_errors(each),
                label=each.name,
                color=chosen[each.name],
                error_kw={"linewidth": 1, "capsize": 2},
            )
            axes.bar_label(drawn, [_short(value) for value in each.y], padding=2, fontsize=7.5)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(y_label)
        axes.yaxis.set_major_formatter(FuncFormatter(_number))
        axes.axhline(0, color="#444444", linewidth=0.8)
        axes.margins(y=0.14)
        _limit(axes, limit)
        _legend(axes)
    return figure


def stacked(
    names: Sequence[str], phases: Mapping[str, Sequence[float]], *, title: str, x_label: str, note: str = ""
) -> Figure:
    """A lying bar for each name, made of its phases one after the other."""
    with _style():
        figure, axes = _figure(title, note, height=1.6 + 0.42 * len(names))
        chosen = colours(list(phases))
        left = [0.0] * len(names)
        for phase, lengths in phases.items():
            axes.barh(list(names), list(lengths), 0.62, left=left, label=phase, color=chosen[phase])
            left = [begin + length for begin, length in zip(left, lengths, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        _legend(axes)
    return figure


def timeline(
    lanes: Mapping[str, Sequence[Span]],
    *,
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    x_label: str = "milliseconds",
    scale: float = 1e3,
    note: str = "",
) -> Figure:
    """A lane for each name with what happened when. ``marks``: moments, in seconds, drawn across all lanes."""
    with _style():
        figure, axes = _figure(title, note, height=1.6 + 0.5 * len(lanes))
        kinds = list(dict.fromkeys(span.name for spans in lanes.values() for span in spans))
        chosen = colours(kinds)
        shown: set[str] = set()
        for place, spans in enumerate(lanes.values()):
            for span in spans:
                label = None if span.name in shown else span.name
                shown.add(span.name)
                length = (span.end - span.start) * scale
                axes.barh(place, length, 0.62, left=span.start * scale, color=chosen[span.name], label=label)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        for moment, name in marks:
            axes.axvline(moment * scale, color="#444444", linewidth=0.9, linestyle=(0, (3, 2)))
            if name:
                axes.annotate(
                    name, (moment * scale, 1), xycoords=("data", "axes fraction"), fontsize=7.5, ha="left", va="bottom"
                )
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        if marks:
            axes.set_title(title, pad=16)
        _legend(axes)
    return figure


def svg(figure: Figure) -> str:
    """An element for a page; the same figure gives the same text."""
    target = io.StringIO()
    with _style():
        FigureCanvasSVG(figure)
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure, path: Path) -> Path:
    """A file; the same figure gives the same bytes. Its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _style():
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=DOTS, metadata={"Software": None})
    return path


def _style() -> AbstractContextManager[None]:
    return style.context(["default", _STYLE])


def _figure(title: str, note: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    if note:
        figure.supxlabel(note, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure, axes


def _errors(series: Series) -> list[list[float]] | None:
    if series.low is None or series.high is None:
        return None
    below = [max(0.0, value - low) for value, low in zip(series.y, series.low, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def _limit(axes: Axes, limit: Limit | None) -> None:
    if limit is None:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, limit.value * 1.1))
    axes.axhline(limit.value, color="#444444", linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(limit.name, (1, limit.value), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")


def _legend(axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1 or (names and names[0]):
        axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _short(value: float) -> str:
    """Three digits, or what there is of them before the point."""
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _number(value: float, _: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
