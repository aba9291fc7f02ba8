"""One HTML file of text, tables and plots that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from neuron_pushkv.errors import ConfigError
from neuron_pushkv.report.plots import svg


@dataclass(frozen=True)
class Heading:
    """A new section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; ``warning`` for what must not be overlooked."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Table:
    """``rows`` of as many cells as there are columns; the first is a name, the others are figures."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """A drawn figure."""

    drawing: Markup
    caption: str


Part: TypeAlias = Heading | Text | Table | Plot


@dataclass
class Page:
    """``about``: what a reader must know of how all this came about, name by name."""

    title: str
    about: Mapping[str, str]
    parts: list[Part] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.parts.append(Heading(text))

    def text(self, text: str, *, warning: bool = False) -> None:
        """A paragraph."""
        self.parts.append(Text(text, warning))

    def table(self, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Figures are right-aligned, the first column is not."""
        self.parts.append(Table(heading, columns, [list(row) for row in rows]))

    def plot(self, figure: Figure, caption: str = "") -> None:
        """Drawn now."""
        # matplotlib escapes what it is given; the drawing itself is markup.
        self.parts.append(Plot(Markup(svg(figure)), caption))

    def html(self) -> str:
        """The whole file."""
        environment = Environment(
            loader=PackageLoader("neuron_pushkv.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        template = environment.get_template("page.html")
        parts = [(type(part).__name__, part) for part in self.parts]
        return template.render(title=self.title, about=self.about, parts=parts)

    def write(self, path: Path) -> None:
        """Raises :class:`ConfigError` if that can't be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the report can't be written to {path}: {error.strerror}") from error
