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
from neuron_pushkv.connector.guard import guarded
from neuron_pushkv.connector.metadata import PushKVMetadata
from neuron_pushkv.connector.parameters import AllowedHosts, BadParameters, DecodeLeg, Leg, PrefillLeg, parse
from neuron_pushkv.connector.receiving import Receiving
from neuron_pushkv.connector.sending import Keeping, Sending
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Ready, StepOrders

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
        block_size: int,
        tp_size: int,
        pp_size: int,
        hosts: AllowedHosts,
        coordinates: Mapping[str, Any],
        directory: Keeping,
        fail_refused: bool,
        by_step: bool = True,
    ) -> None:
        self._model = model
        self._tp_size = tp_size
        self._pp_size = pp_size
        self._hosts = hosts
        self._fail_refused = fail_refused
        self._sending = Sending(
            block_size,
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                **coordinates,
                "tp_size": tp_size,
                "pp_size": pp_size,
            },
            directory,
            by_step=by_step,
        )
        self._receiving = Receiving(block_size)
        self._pool: Any = None
        self._counters: Counter[str] = Counter()
        self._untried: Counter[str] = Counter()
        self._step = 0

    @property
    def kept(self) -> int:
        """How many finished requests' blocks are held for receivers."""
        return self._sending.kept

    def count(self, event: str) -> None:
        """Count an event; the workers report it with their own."""
        self._counters[event] += 1

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool

    # Hooks, in the order of a request's life.

    @guarded(lambda self, request: self._sending.dropped(request.request_id))
    def on_new_request(self, request: Any) -> None:
        """A request has been queued. Prefill legs are announced to the workers with the next step, scheduled or not."""
        self._free()
        if compat.is_phantom(request) or not request.kv_transfer_params:
            return
        try:
            leg = self._parse(request)
        except BadParameters as bad:
            if not _receives(request):  # A decode leg's are looked at when vLLM asks for its tokens.
                self._refuse(request.request_id, "out", bad.reason, str(bad))
            return
        if not isinstance(leg, PrefillLeg):
            return
        why = compat.unsupported(request)
        if why is not None:
            self._refuse(request.request_id, "out", Reason.UNSUPPORTED, why)
        elif not self._sending.arrived(request.request_id, leg, compat.content_of(self._model, request)):
            self.count("request_id_in_use")

    @guarded(lambda self, request, computed: self._compute(request.request_id))
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens will be pushed to us: the rest of the prompt, once per request."""
        self._free()
        if not request.kv_transfer_params:
            return NOTHING
        if not self._receiving.knows(request.request_id):
            self._admit(request)
        missing = request.num_prompt_tokens - computed
        if missing <= 0 or not self._receiving.wants(request.request_id):
            return NOTHING
        return missing, True

    @guarded(lambda self, request, blocks, external: self._give_up(request, blocks, external))
    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has allocated the prompt's blocks, and waits for ``external`` tokens if there are any."""
        if not self._receiving.wants(request.request_id):
            return  # Not one of ours, or the second call, after its load.
        if external == 0:
            self._receiving.settle(request.request_id)
            return
        (table,) = blocks.get_block_ids()
        leg = self._receiving.leg(request.request_id)
        if leg is None:
            self._receiving.refuse(request.request_id, request.num_prompt_tokens - external, table)
            return
        content = compat.content_of(self._model, request)
        self._receiving.order(request.request_id, leg, content, content.length - external, table)

    def build_connector_meta(self, output: Any) -> PushKVMetadata:
        """All orders of the step that ``output`` describes."""
        self._free()
        preempted, ready = self._read_step(output)
        offers, finishes = self._sending.take()
        receives, withdrawn, refused = self._receiving.take()
        counters, self._counters = dict(self._counters), Counter()
        untried, self._untried = dict(self._untried), Counter()
        self._step += 1
        orders = StepOrders(
            preempted=preempted,
            withdrawn=withdrawn,
            finished=finishes,
            offers=offers,
            receives=receives,
            ready=ready,
            counters=counters,
        )
        return PushKVMetadata(self._step, orders, refused, untried)

    @guarded(lambda self, finished_receiving: None)
    def update_connector_output(self, finished_receiving: Sequence[str]) -> None:
        """All workers have reported these loads."""
        self._free()
        self._receiving.reported(finished_receiving)

    @guarded(lambda self, request, block_ids: self._sending.dropped(request.request_id))
    def request_finished(self, request: Any, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """vLLM ends a request, and frees its blocks when this returns. The answer goes to the router."""
        self._free()
        self._receiving.finished(request.request_id)
        if request.request_id not in self._sending:
            return None
        return self._sending.finished(request.request_id, self._pool, block_ids)

    # Steps that several of the above share.

    @guarded(lambda self: None)
    def _free(self) -> None:
        if self._pool is not None:
            self._sending.free(self._pool.free_blocks)

    @guarded(lambda self, output: self._sending.blind_step())
    def _read_step(self, output: Any) -> tuple[tuple[str, ...], tuple[Ready, ...]]:
        return self._sending.step(compat.step_view(output, self._sending))

    def _parse(self, request: Any) -> Leg | None:
        return parse(request.kv_transfer_params, self._hosts, self._tp_size, self._pp_size)

    def _admit(self, request: Any) -> None:
        """Decide, once, what to do about a request that vLLM wants to know the tokens of."""
        name = request.request_id
        try:
            leg = self._parse(request)
        except BadParameters as bad:
            if not _receives(request):
                self._receiving.settle(name)
                return
            self._refuse(name, "in", bad.reason, str(bad))
            if self._fail_refused:
                self._receiving.admit(name, None)
            else:
                self._receiving.settle(name)
            return
        if not isinstance(leg, DecodeLeg):
            self._receiving.settle(name)
            return
        why = compat.unsupported(request)
        if why is not None:
            self._refuse(name, "in", Reason.UNSUPPORTED, why)
            self._receiving.settle(name)
            return
        self._receiving.admit(name, leg)

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
            start = request.num_prompt_tokens - external
            self._receiving.refuse(request.request_id, start, blocks.get_block_ids()[0])
        else:
            self._receiving.settle(request.request_id)


def _receives(request: Any) -> bool:
    """Whether these parameters, good or bad, are a decode leg's."""
    parameters = request.kv_transfer_params
    return isinstance(parameters, Mapping) and bool(parameters.get("do_remote_prefill"))
