"""What reports need that the package itself doesn't, and what to say where it isn't there."""

from __future__ import annotations

from importlib.util import find_spec

from neuron_pushkv.errors import ConfigError

PACKAGES = ("matplotlib", "jinja2", "pyarrow")


def check(command: str) -> None:
    """Raises :class:`ConfigError` that says what to install, before anything has been run for nothing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}: pip install 'neuron-pushkv[bench]'")
