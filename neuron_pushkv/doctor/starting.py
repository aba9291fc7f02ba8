"""The checks that an engine makes of itself when it starts: errors end it, warnings are logged, each with its id."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Accelerator
from neuron_pushkv.doctor import configuration, network
from neuron_pushkv.doctor.examination import at_start
from neuron_pushkv.doctor.findings import Finding, Level
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.transport.base import Transport

logger = logging.getLogger(__name__)


def before_opening(settings: ConnectorSettings, accelerator: Accelerator, machine: Machine | None = None) -> None:
    """Before anything is registered. Raises :class:`ConfigError` for what can't work."""
    act([configuration.deadlines(settings), *at_start(machine or Machine(), settings, accelerator.name)])


def after_opening(settings: ConnectorSettings, transport: Transport, accelerator: Accelerator) -> None:
    """What libfabric has made of it. Raises :class:`ConfigError` if that is not what was asked for."""
    act([network.library(transport, accelerator.name), network.provider(settings.provider, transport.provider)])


def act(findings: Iterable[Finding]) -> None:
    """Raise for the first error, and log the warnings."""
    for finding in findings:
        if finding.level is Level.ERROR:
            raise ConfigError(f"{finding.sentence} [{finding.id}]")
        if finding.level is Level.WARNING:
            logger.warning("%s [%s]", finding.sentence, finding.id)
