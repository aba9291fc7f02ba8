"""The whole exception tree, and the one closed list of reasons.

An exception is for whoever called; a :class:`Reason` is for whoever is told later: it crosses the wire, labels
metrics and logs, and is what a user sees when a transfer did not happen.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a transfer, a connection or a request was refused, failed or given up. Shared by wire, metrics and logs."""

    # The request itself.
    BAD_PARAMETERS = "bad_parameters"  # kv_transfer_params are malformed
    HOST_NOT_ALLOWED = "host_not_allowed"  # remote_host is not in the allow-list
    UNSUPPORTED = "unsupported"  # prompt embeds, several KV cache groups, ...
    ABORTED = "aborted"  # the engine aborted the request
    # The sender has no such KV, or not any more.
    UNKNOWN_SOURCE = "unknown_source"  # never heard of within the patience
    GONE = "gone"  # known once, ended since
    CONTENT_MISMATCH = "content_mismatch"  # other tokens, LoRA, salt or model at the asked-for positions
    PREFILL_FAILED = "prefill_failed"  # the sender's request ended before its prefill did
    PREEMPTED = "preempted"  # the sender's engine took the blocks while they were being pushed
    REVOKED = "revoked"  # kept KV was given back because memory was capped
    # The registration can't be served.
    BAD_RANGE = "bad_range"  # token range outside the source, or not on a block boundary
    BAD_BLOCKS = "bad_blocks"  # block ids outside the cache, or too few
    LAYOUT_MISMATCH = "layout_mismatch"  # the two KV caches can't be mapped onto each other
    TABLE_FULL = "table_full"  # a bounded table has no room
    # The way between.
    UNREACHABLE = "unreachable"  # no connection within the connect time
    REFUSED = "refused"  # the peer refused the handshake
    PEER_LOST = "peer_lost"  # the connection ended
    WRITE_FAILED = "write_failed"  # the transport reported an error
    DEVICE_FAILED = "device_failed"  # the device's memory could not be copied from or into
    TIMEOUT = "timeout"  # a deadline passed
    CANCELLED = "cancelled"  # withdrawn by the receiver
    SHUTDOWN = "shutdown"  # this process is stopping
    # The handshake.
    BAD_FRAME = "bad_frame"
    VERSION_MISMATCH = "version_mismatch"
    MODEL_MISMATCH = "model_mismatch"
    TRANSPORT_MISMATCH = "transport_mismatch"
    WRONG_KEY = "wrong_key"
    STALE_INCARNATION = "stale_incarnation"  # an older process of that name, or a replayed hello
    DUPLICATE = "duplicate"  # another connection for the same pair stays
    INTERNAL = "internal"  # a bug of ours; logged with its traceback


class PushKVError(Exception):
    """Base of everything this package raises on purpose. ``str()`` is one sentence that says what to do."""


class ConfigError(PushKVError):
    """A setting is wrong, unknown or missing."""


class FabricError(PushKVError):
    """libfabric can't be loaded, opened or used as asked."""


class ProviderMismatch(FabricError):
    """libfabric offers another provider than the one that was asked for."""


class RegistrationError(FabricError):
    """Memory could not be registered with the network. ``error`` is the library's own number for it, negative, or 0."""

    def __init__(self, detail: str, error: int = 0) -> None:
        super().__init__(detail)
        self.error = error


class TransportError(PushKVError):
    """A transport was used after its end or against its contract."""


class BlockError(PushKVError):
    """Blocks were asked for, shared or released that aren't there or aren't the owner's."""


class LayoutError(PushKVError):
    """Two KV cache layouts can't be mapped onto each other; names both."""


class WireError(PushKVError):
    """A frame or message breaks the protocol; carries the counted reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class HandshakeRefused(PushKVError):
    """The other side, or this one, refused a connection; names both values."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class DeviceError(PushKVError):
    """Device memory can't be used for transfers; says why and what to set."""


class NeuronError(DeviceError):
    """The Neuron runtime has refused or failed; ``status`` is its code (``nrt_status.h``)."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class NeuronUninitialized(NeuronError):
    """The runtime was used before it was initialised."""


class NeuronClosed(NeuronError):
    """The runtime was used after it was closed; it can't be opened again in this process."""


class NeuronOutOfMemory(NeuronError):
    """No device or host memory, or no other resource of the runtime's, is left."""


class NeuronInvalid(NeuronError):
    """The runtime rejects an argument or a handle."""


class NeuronOutOfBounds(NeuronError):
    """An access lies outside of its tensor."""


class NeuronBusy(NeuronError):
    """Queues are full, or a core belongs to somebody else: may work later."""


class NeuronFault(NeuronError):
    """A device, or what runs on it, has failed."""


class FleetError(PushKVError):
    """A process of a fleet on this machine has ended, or does not become ready; says why."""
