"""``pushkv``: the command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import yaml
from rich.console import Console

from neuron_pushkv import __version__
from neuron_pushkv.config import RouterSettings, load_fleet, parse
from neuron_pushkv.errors import ConfigError, PushKVError

DEFAULT_FLEET = Path("configs/local-cpu.yaml")
DEFAULT_LOGS = Path("pushkv-logs")
MASK = "********"
_SECRET_WORDS = ("key", "token", "secret", "password")


class _Group(click.Group):
    """Our own errors end a command with one line and status 2, never with a traceback.

    ``simulate`` has its commands elsewhere, which take a moment to load and are loaded when asked for.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "simulate"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "simulate":
            from neuron_pushkv.simulate.command import simulate

            return simulate
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PushKVError as error:
            click.echo(f"pushkv: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pushkv")
def main() -> None:
    """Prefill and decode on separate vLLM engines, with the KV cache pushed from one to the other."""


_logs = click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_LOGS,
    show_default=True,
    help="Folder for one log per process.",
)
_fleet_file = click.argument("config", type=click.Path(path_type=Path), default=DEFAULT_FLEET)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@_logs
def up(config: Path, logs: Path) -> None:
    """Start the fleet of CONFIG on this machine and keep it running until Ctrl-C.

    Ends with status 1, and ends the rest, if one of its processes ends.
    """
    from neuron_pushkv.errors import FleetError
    from neuron_pushkv.fleet import Fleet
    from neuron_pushkv.fleet.progress import start_visibly

    settings = load_fleet(config)
    console = Console()
    with _ending_on_signals(), Fleet(settings, logs) as fleet:
        start_visibly(fleet, console)
        where = settings.router or settings.engines[0]
        console.print(f"ready at http://{where.host}:{where.port} (logs in {logs}; Ctrl-C stops it)", soft_wrap=True)
        try:
            fleet.watch()
        except FleetError as error:
            click.echo(f"pushkv: {error}", err=True)
            sys.exit(1)


@main.command()
@_fleet_file
@_logs
def demo(config: Path, logs: Path) -> None:
    """Start the fleet of CONFIG (configs/local-cpu.yaml), send prompts, compare with one undivided engine, stop."""
    from neuron_pushkv.demo import run

    settings = load_fleet(config)
    with _ending_on_signals():
        passed = run(settings, logs, Console())
    sys.exit(0 if passed else 1)


@main.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--prefill", multiple=True, metavar="URL", help="Base URL of a prefill engine.")
@click.option("--prefill-push", multiple=True, metavar="HOST:PORT", help="That engine's directory; one for each URL.")
@click.option("--decode", multiple=True, metavar="URL", help="Base URL of a decode engine.")
@click.option("--decode-push", multiple=True, metavar="HOST:PORT", help="That engine's directory; one for each URL.")
def router(config: Path | None, **options: Any) -> None:
    """Run the router with the settings of CONFIG, a YAML file; options go before what it says."""
    from neuron_pushkv.router import serve

    values = _read_yaml(config) if config else {}
    values.update({name: value for name, value in options.items() if value not in (None, ())})
    serve(parse(RouterSettings, values, str(config) if config else "router"))


@main.command()
@click.option("--config", type=click.Path(path_type=Path), metavar="FLEET.yaml", help="A fleet file, for its settings.")
@click.option("--engine", metavar="NAME", help="Which engine of the fleet file; by default its first.")
@click.option("--provider", help="libfabric provider: efa, efa-direct, tcp or shm.")
@click.option("--host", help="Address of this machine that the engine listens on.")
@click.option("--port", type=int, help="Port of the engine's directory.")
@click.option("--libfabric", type=click.Path(), help="Path of libfabric.so.1.")
@click.option("--fleet-key-file", type=click.Path(), help="File with the fleet key.")
@click.option("--device", type=click.Choice(["neuron", "cuda", "cpu"]), help="By default what this machine has.")
@click.option("--peer", "peers", multiple=True, metavar="HOST:PORT", help="Another engine's directory, or a doctor.")
@click.option("--serve", is_flag=True, help="Be the peer of other doctors, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(
    config: Path | None,
    engine: str | None,
    device: str | None,
    peers: tuple[str, ...],
    serve: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find out whether KV can be pushed from and to this machine.

    Ends with status 0 if all is well, 1 if there are warnings, 2 if something is broken. Without --peer a transfer is
    tried between two processes here; on two machines, run it with --serve on one and with --peer on the other.
    """
    from neuron_pushkv.doctor import command

    fleet = load_fleet(config) if config is not None else None
    given = {name: value for name, value in options.items() if value is not None}
    with _ending_on_signals():
        sys.exit(command.run(fleet, engine, given, device, peers, serve=serve, as_json=as_json))


@main.command(name="config")
@click.argument("config", type=click.Path(path_type=Path))
def show_config(config: Path) -> None:
    """Check CONFIG, a fleet file, and print all settings that result from it, without secrets."""
    from neuron_pushkv.fleet.commands import fleet_router

    settings = load_fleet(config)
    settings = settings.model_copy(update={"router": fleet_router(settings)})
    values = _masked(settings.model_dump(mode="json"))
    click.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold settings, one `name: value` a line")
    return values


def _masked(value: Any, secret: bool = False) -> Any:
    """``value`` with whatever looks like a secret hidden: the fleet key, and variables that are named like one."""
    if isinstance(value, dict):
        return {
            name: _masked(inner, any(word in name.lower() for word in _SECRET_WORDS) and not name.endswith("_file"))
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return MASK if secret and value is not None else value


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT leave the block in order, as an exception; while that is under way they are ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
