"""Command-line options of a scenario, made from its settings, and what every question has in common."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, get_args

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from neuron_pushkv.errors import ConfigError
from neuron_pushkv.simulate.replication import REPLICATIONS, Result, replicate
from neuron_pushkv.simulate.report import document, provenance
from neuron_pushkv.simulate.scenario import Scenario, scenario
from neuron_pushkv.simulate.tables import DEFAULT_TABLE, ServiceTable, load_table

Command = TypeVar("Command", bound=Callable[..., Any])
WIDTH = 120
"""Columns of output that is not a terminal's."""


def scenario_options(*left_out: str) -> Callable[[Command], Command]:
    """An option for each setting of :class:`Scenario`; not given, it is None."""

    def decorate(command: Command) -> Command:
        for name, about in reversed(Scenario.model_fields.items()):
            if name in left_out:
                continue
            option = "--" + name.replace("_", "-")
            text = f"{' '.join((about.description or '').split())}  [{_plain(about.default)}]".replace("`", "")
            if about.annotation is bool:
                command = click.option(f"{option}/--no-{option[2:]}", name, default=None, help=text)(command)
            else:
                choices = [each for each in get_args(about.annotation) if isinstance(each, str)]
                kind = click.Choice(choices) if choices else click.STRING
                command = click.option(option, name, type=kind, default=None, help=text)(command)
        return command

    return decorate


def common_options(command: Command) -> Command:
    """``--table``, ``--seed``, ``--replications``, ``--json`` and ``--report``, handed on as one :class:`Session`."""

    @functools.wraps(command)
    def wrapped(
        table: str, seed: int, replications: int, json_file: Path | None, report: Path | None, **rest: Any
    ) -> Any:
        session = Session(load_table(table), seed, replications, json_file, report)
        given = {name: value for name, value in rest.items() if value is not None}
        with session:
            return command(session, **given)

    file = click.Path(dir_okay=False, path_type=Path)
    options = (
        click.option("--table", default=DEFAULT_TABLE, show_default=True, help="Service times: a name or a YAML file."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first replication."),
        click.option(
            "--replications",
            type=click.IntRange(1),
            default=REPLICATIONS,
            show_default=True,
            help="Independent runs, of which come the 95 % confidence intervals.",
        ),
        click.option("--json", "json_file", type=file, help="Write all figures there."),
        click.option("--report", type=file, help="Write what is printed there, as one HTML file."),
    )
    decorated: Any = wrapped
    for option in reversed(options):
        decorated = option(decorated)
    result: Command = decorated
    return result


@dataclass
class Session:
    """One question: its service times, how often to simulate, where answers go."""

    table: ServiceTable
    seed: int
    replications: int
    json_file: Path | None
    report: Path | None
    console: Console = field(init=False)
    _progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.console = Console(record=True, highlight=False)
        if not self.console.is_terminal:
            self.console = Console(record=True, highlight=False, width=WIDTH)
        errors = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )

    def __enter__(self) -> Self:
        try:
            import simpy  # noqa: F401  # asked for before an answer is promised
        except ImportError as error:
            raise ConfigError("pushkv simulate needs SimPy: pip install 'neuron-pushkv[simulate]'") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.report is not None:
            _write(self.report, self.console.export_html())

    def simulate(
        self, scenario: Scenario, table: ServiceTable | None = None, replications: int | None = None
    ) -> Result:
        """Replicate the scenario, with a progress bar where somebody sees it."""
        times = replications or self.replications
        with self._shown(f"simulating {scenario.mode}", scenario.requests * scenario.turns * times) as finished:
            return replicate(scenario, table or self.table, self.seed, times, finished)

    @contextmanager
    def _shown(self, what: str, requests: int) -> Iterator[Callable[[], None]]:
        with self._progress:
            task = self._progress.add_task(what, total=requests)
            try:
                yield lambda: self._progress.advance(task)
            finally:
                self._progress.remove_task(task)

    def show(self, *parts: RenderableType) -> None:
        """Print each, with an empty line after it."""
        for part in parts:
            self.console.print(part)
            self.console.print()

    def end(self, question: str, **parts: Any) -> None:
        """Say where the times come from, and write the JSON file if one is wanted."""
        self.console.print(provenance(self.table), soft_wrap=True)
        if self.json_file is not None:
            whole = document(self.table, question, **parts)
            _write(self.json_file, json.dumps(whole, indent=2, allow_nan=False) + "\n")


def varied(text: str, base: dict[str, Any]) -> tuple[str, list[tuple[str, Scenario]]]:
    """``NAME=VALUE,VALUE`` as the setting's name and a scenario for each value. Raises :class:`ConfigError`."""
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in Scenario.model_fields or not values:
        raise ConfigError(f"--vary takes NAME=VALUE,VALUE,... with a scenario's setting as NAME, not {text!r}")
    return name, [(value, scenario({**base, name: value})) for value in values.split(",")]


def _plain(value: Any) -> str:
    if value is None:
        return "not given"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
