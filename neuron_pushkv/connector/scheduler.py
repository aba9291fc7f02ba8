"""The connector in vLLM's scheduler process: decides what the workers shall do, and answers vLLM's questions.

Every hook is guarded: one that raises would end vLLM's engine core. Each guard's fallback leaves the request to be
computed here, and no block held by anyone who will never let go.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from neuron_pushkv.connector import compat
from neuron_pushkv.connector.contiguity import Contiguity
from neuron_pushkv.connector.guard import guarded
from neuron_pushkv.connector.metadata import PushKVMetadata
from neuron_pushkv.connector.parameters import AllowedHosts, BadParameters, DecodeLeg, Leg, parse
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.connector.receiving import Receiving, Wanted
from neuron_pushkv.connector.sending import Sending, Step
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Blocks, Release, StepOrders

logger = logging.getLogger(__name__)

NOTHING = (0, False)
"""To ``get_num_new_matched_tokens``: compute all of it."""


class SchedulerSide:
    """See the module's text. ``model`` is the model's fingerprint, ``coordinates`` what a decode leg needs to find us.

    ``fail_refused``: a load whose parameters are bad is reported to vLLM as failed, so that its policy ``fail`` ends
    the request; otherwise the request is simply computed here. ``by_step``: see :class:`Sending`.
    """

    def __init__(
        self,
        *,
        model: str,
        groups: Sequence[Group],
        tp_size: int,
        pp_size: int,
        hosts: AllowedHosts,
        coordinates: Mapping[str, Any],
        parking: Parking,
        fail_refused: bool,
        contiguity: Contiguity,
        by_step: bool = True,
    ) -> None:
        self._model = model
        self._tp_size = tp_size
        self._pp_size = pp_size
        self._hosts = hosts
        self._fail_refused = fail_refused
        self._parking = parking
        self._sending = Sending(
            groups,
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                **coordinates,
                "tp_size": tp_size,
                "pp_size": pp_size,
            },
            parking,
            by_step=by_step,
        )
        self._receiving = Receiving(groups)
        self._block_size = groups[0].block_size
        self._contiguity = contiguity
        self._releases: list[Release] = []
        self._pool: Any = None
        self._gauges: dict[str, int] = {}
        self._counters: Counter[str] = Counter()
        self._untried: Counter[str] = Counter()
        self._step = 0
        self._ended = 0

    def count(self, event: str) -> None:
        """Count an event; the workers report it with their own."""
        self._counters[event] += 1

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool
        self._sending.bind_pool(pool)
        self._contiguity.bind(pool)

    # Hooks, in the order of a request's life.

    @guarded(lambda self, request: self._forget(request.request_id))
    def on_new_request(self, request: Any) -> None:
        """A request has been queued. Workers hear of its leg with the next step, scheduled or not."""
        self._free()
        if not request.kv_transfer_params:
            return
        if compat.is_phantom(request):
            self._release(request)
            return
        try:
            leg = self._parse(request)
        except BadParameters as bad:
            receives = _receives(request)
            self._refuse(request.request_id, "in" if receives else "out", bad.reason, str(bad))
            if receives and self._fail_refused:
                self._receiving.admit(request.request_id, None)
            return
        if leg is None:
            return
        why = compat.unsupported(request)
        if why is not None:
            direction = "in" if isinstance(leg, DecodeLeg) else "out"
            self._refuse(request.request_id, direction, Reason.UNSUPPORTED, why)
            return
        self._admit(request, leg)

    @guarded(lambda self, request, computed: self._compute(request.request_id))
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens will be pushed to us: the rest of the prompt, once per request."""
        self._free()
        self._contiguity.begin(-(-(request.num_prompt_tokens - computed) // self._block_size))
        if not self._receiving.wants(request.request_id):
            return NOTHING
        missing = self._receiving.end(request.num_prompt_tokens) - computed
        return (missing, True) if missing > 0 else NOTHING

    @guarded(lambda self, request, blocks, external: self._give_up(request, blocks, external))
    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has allocated the prompt's blocks, and waits for ``external`` tokens if there are any."""
        self._contiguity.begun()
        if not self._receiving.wants(request.request_id):
            return  # Not one of ours, or the second call, after its load.
        if external == 0:
            self._receiving.settle(request.request_id)
            return
        wanted = self._receiving.wanted(request.request_id)
        if wanted is None:
            self._give_up(request, blocks, external)
            return
        self._receiving.order(request.request_id, wanted, external, compat.tables(blocks.get_block_ids()))

    def build_connector_meta(self, output: Any) -> PushKVMetadata:
        """All orders of the step that ``output`` describes."""
        self._free()
        step, empty = self._read_step(output)
        offers, finishes = self._sending.take()
        evicted = self._parking.evict()
        receiving = self._receiving.take()
        releases, self._releases = tuple(self._releases), []
        if evicted:
            self._counters["evicted"] += len(evicted)
        counters, self._counters = dict(self._counters), Counter()
        untried, self._untried = dict(self._untried), Counter()
        self._step += 1
        orders = StepOrders(
            preempted=step.preempted,
            withdrawn=receiving.withdrawn,
            finished=finishes,
            evicted=evicted,
            offers=offers,
            releases=releases,
            intents=receiving.intents,
            receives=receiving.receives,
            cached=step.cached,
            ready=step.ready,
            counters=counters,
        )
        return PushKVMetadata(
            self._step, orders, receiving.refused, untried, self._measure(), ended=self._ended, empty=empty
        )

    @guarded(lambda self, finished_receiving, ended=0: None)
    def update_connector_output(self, finished_receiving: Sequence[str], ended: int = 0) -> None:
        """All workers have reported these loads, and vLLM has their outputs of step ``ended`` (0: nobody asks)."""
        self._ended = max(self._ended, ended)
        self._free()
        self._receiving.reported(finished_receiving)

    @guarded(lambda self, request, tables: self._sending.dropped(request.request_id))
    def request_finished(self, request: Any, tables: Blocks) -> dict[str, Any] | None:
        """vLLM ends a request, and frees its blocks (per group) when this returns. The answer goes to the router."""
        self._free()
        self._receiving.finished(request.request_id)
        if request.request_id not in self._sending:
            return None
        return self._sending.finished(request.request_id, tables)

    # Steps that several of the above share.

    @guarded(lambda self: None)
    def _free(self) -> None:
        if self._pool is not None:
            self._parking.free(self._pool)

    @guarded(lambda self, output: (self._sending.blind_step(), False))
    def _read_step(self, output: Any) -> tuple[Step, bool]:
        view = compat.step_view(output, self._sending)
        step = self._sending.step(view)
        self._contiguity.grow(self._sending.growing())
        return step, view.empty

    def _parse(self, request: Any) -> Leg | None:
        return parse(request.kv_transfer_params, self._hosts, self._tp_size, self._pp_size)

    def _admit(self, request: Any, leg: Leg) -> None:
        name, content = request.request_id, compat.content_of(self._model, request)
        traceparent = compat.traceparent(request)
        if isinstance(leg, DecodeLeg):
            self._receiving.admit(name, Wanted(leg, content, traceparent))
        elif not self._sending.arrived(name, leg, content, traceparent):
            self.count("request_id_in_use")

    def _release(self, request: Any) -> None:
        """A decode leg was rejected before it got here: nobody of this engine will ask for its KV."""
        try:
            leg = self._parse(request)
        except BadParameters as bad:
            logger.warning("what was computed for rejected request %s is not released: %s", request.request_id, bad)
            return
        if isinstance(leg, DecodeLeg) and leg.transfer:
            self._releases.append(Release(leg.transfer, leg.remote))

    def _forget(self, request: str) -> None:
        self._sending.dropped(request)
        self._receiving.settle(request)

    def _measure(self) -> dict[str, int]:
        """What has changed of what is kept. Bytes are those of one rank."""
        before = self._gauges
        self._gauges = {"parked_bytes": self._parking.bytes, "parked_requests": len(self._parking)}
        return self._gauges if self._gauges != before else {}

    def _refuse(self, request: str, direction: str, reason: Reason, why: str) -> None:
        """Say once why a request is not transferred, and count it among the transfers that failed."""
        logger.warning("request %s is not transferred (%s): %s", request, reason, why)
        self._untried[f"{direction}:failed:{reason}"] += 1

    def _compute(self, request: str) -> tuple[int, bool]:
        self._receiving.settle(request)
        return NOTHING

    def _give_up(self, request: Any, blocks: Any, external: int) -> None:
        """A load that vLLM waits for can't be ordered: only a report of its failure lets go of its blocks."""
        if external:
            start = self._receiving.end(request.num_prompt_tokens) - external
            self._receiving.refuse(request.request_id, start, compat.tables(blocks.get_block_ids()))
        else:
            self._receiving.settle(request.request_id)


def _receives(request: Any) -> bool:
    """Whether these parameters, good or bad, are a decode leg's."""
    parameters = request.kv_transfer_params
    return isinstance(parameters, Mapping) and bool(parameters.get("do_remote_prefill"))
