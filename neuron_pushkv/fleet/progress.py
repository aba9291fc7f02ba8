"""A starting fleet, shown: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from neuron_pushkv.fleet.supervisor import Fleet, State


def start_visibly(fleet: Fleet, console: Console) -> None:
    """Wait until the fleet is ready and show how far it is. Raises as :meth:`Fleet.wait_ready` does."""
    if not console.is_terminal:
        fleet.wait_ready(_Lines(console))
        return
    with Live(console=console, refresh_per_second=5) as live:
        fleet.wait_ready(lambda states: live.update(_table(states)))


def _table(states: Sequence[State]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for state in states:
        mark = "[green]✓[/green]" if state.ready else "[yellow]…[/yellow]"
        table.add_row(mark, state.name, state.doing, f"{state.seconds:.0f} s")
    return table


class _Lines:
    """Prints what a process is doing whenever that has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, str] = {}

    def __call__(self, states: Sequence[State]) -> None:
        for state in states:
            if self._shown.get(state.name) != state.doing:
                self._shown[state.name] = state.doing
                self._console.print(f"{state.name}: {state.doing} ({state.seconds:.0f} s)")
