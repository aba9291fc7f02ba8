"""What transfers do, for people and their tools: counts and times, a log line for each, and a span if it is traced."""

from neuron_pushkv.telemetry.counts import FRACTIONS, GAUGES, Gauge
from neuron_pushkv.telemetry.recorder import Telemetry
from neuron_pushkv.telemetry.transfer import PHASES, Transfer, Way, transfer_of

__all__ = ["Telemetry", "Transfer", "Way", "transfer_of", "PHASES", "Gauge", "GAUGES", "FRACTIONS"]
