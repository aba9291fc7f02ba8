"""All that an engine needs to bounce its KV, put together."""

from __future__ import annotations

import threading

from neuron_pushkv.bounce.cache import StagingCache
from neuron_pushkv.bounce.copier import Copier
from neuron_pushkv.bounce.landing import Ended, Landings
from neuron_pushkv.bounce.sending import BouncedPosting
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Accelerator
from neuron_pushkv.layout import Layout
from neuron_pushkv.transport.base import Transport


class Bounce:
    """``layout`` is the device's cache; ``lock`` is the engine's. Raises like :class:`StagingCache` and ``register``.

    ``cache`` is what is shown to the network, ``posting`` what sends from it.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: Layout,
        transport: Transport,
        accelerator: Accelerator,
        lock: threading.RLock,
    ) -> None:
        self._patience = settings.no_progress_seconds
        self.cache = StagingCache(layout, settings.bounce_bytes, transport)
        self._copier = Copier(accelerator, lock)
        self.posting = BouncedPosting(transport, settings.staging_bytes, self.cache, self._copier)

    def landings(self, ended: Ended) -> Landings:
        """For what is received; see there."""
        return Landings(self.cache, self._copier, ended, self._patience)

    def close(self) -> None:
        """No byte of the device is copied any more. Not under the lock."""
        self._copier.close()
