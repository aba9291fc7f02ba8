"""``pushkv doctor``, without its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from neuron_pushkv.config import ConnectorSettings, FleetSettings, host_port, parse
from neuron_pushkv.doctor.examination import Patient, apply_environment, examine, opened, patient, static
from neuron_pushkv.doctor.findings import EXIT_CODES, Level, worst
from neuron_pushkv.doctor.peer import Place
from neuron_pushkv.doctor.report import as_json as to_json
from neuron_pushkv.doctor.report import show
from neuron_pushkv.doctor.serving import Server
from neuron_pushkv.errors import ConfigError


def run(
    fleet: FleetSettings | None,
    engine: str | None,
    options: Mapping[str, Any],
    device: str | None,
    peers: Sequence[str],
    *,
    serve: bool,
    as_json: bool,
) -> int:
    """The exit status. ``options``: a connector's settings, where there is no fleet. Raises :class:`ConfigError`."""
    if fleet is None and engine is not None:
        raise ConfigError(f"engine {engine} of which fleet? name its file with --config")
    if fleet is not None and options:
        raise ConfigError(f"--{min(options).replace('_', '-')} and --config are both given; the fleet file has it")
    if serve and (peers or as_json):
        raise ConfigError("--serve waits for others; it goes with neither --peer nor --json")
    settings = parse(ConnectorSettings, options, "doctor") if fleet is None else ConnectorSettings()
    who = patient(fleet, engine, settings, device)
    places = [Place(*host_port(text, "--peer")) for text in peers]
    if serve:
        return _serve(who)
    findings = list(examine(who, places))
    if as_json:
        click.echo(to_json(findings))
    else:
        show(findings, Console())
    return EXIT_CODES[worst(findings)]


def _serve(who: Patient) -> int:
    findings = list(static(who))
    apply_environment(who, 0)
    with opened(who) as (device, transport, more):
        findings += more
        show(findings, Console())
        if transport is None or worst(findings) is Level.ERROR:
            return EXIT_CODES[worst(findings)]
        server = Server(who.settings, who.machine, transport, device, who.settings.port)
        try:
            host, port = server.listening
            click.echo(f"waiting for others: pushkv doctor --peer {host}:{port} (Ctrl-C stops it)")
            server.run(click.echo)
        finally:
            server.close()
    return 0
