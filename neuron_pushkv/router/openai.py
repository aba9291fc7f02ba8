"""What a client may ask for, and what each engine is asked in turn.

Only what the router itself relies on is checked here; everything else in a request is the engines' to judge, and their
answer reaches the client unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any

MAX_BODY_BYTES = 32 << 20
"""Enough for a prompt of millions of tokens; a larger body is refused before it is parsed."""
MAX_REQUEST_ID = 256

ROUTER_KEYS = frozenset(
    {
        "do_remote_decode",
        "do_remote_prefill",
        "deliveries",
        "pp_size",
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_num_tokens",
        "remote_port",
        "remote_request_id",
        "tp_size",
        "transfer_id",
    }
)
"""Keys of ``kv_transfer_params`` that this router or an engine sets: where KV is read from and written to."""

_UNUSED_BY_PREFILL = (
    "echo",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "prompt_logprobs",
    "stream_options",
    "top_logprobs",
)
"""Fields that shape the answer only. The prefill leg's answer is thrown away, and some of these are refused with
``stream`` off, make the engine skip its prefix cache or compute logits of the whole prompt."""


class Refusal(StrEnum):
    """Why a request got no further than the router; a label in the metrics."""

    BAD_JSON = "bad_json"
    BAD_REQUEST = "bad_request"
    BAD_PARAMETERS = "bad_parameters"
    TOO_LARGE = "too_large"
    MEDIA_TYPE = "media_type"
    NOT_FOUND = "not_found"
    METHOD = "method"
    TIMEOUT = "timeout"


class Endpoint(StrEnum):
    """The two kinds of generation request; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Refused(Exception):
    """A request that the router itself turns down. ``str()`` is one sentence for the client."""

    def __init__(self, refusal: Refusal, message: str, *, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status
        self.field = field


@dataclass(frozen=True)
class Request:
    """A checked generation request."""

    endpoint: Endpoint
    body: Mapping[str, Any]
    deliveries: int
    """How many decode requests it becomes, and so how many receivers one prefill may have: n x prompts."""


@dataclass(frozen=True)
class Coordinates:
    """Where the decode engine asks for the KV: the prefill engine's directory and shape."""

    engine_id: str
    host: str
    port: int
    ranks: int


def error_body(status: int, message: str, field: str | None = None) -> bytes:
    """An error in OpenAI's shape, as vLLM writes it."""
    kind = HTTPStatus(status).phrase.replace(" ", "").replace("-", "").removesuffix("Error") + "Error"
    return json.dumps({"error": {"message": message, "type": kind, "param": field, "code": status}}).encode()


def parse(endpoint: Endpoint, content: bytes) -> Request:
    """Check a request's body. Raises :class:`Refused`."""
    body = _object(content)
    _model(body)
    prompts = _prompts(body) if endpoint is Endpoint.COMPLETIONS else _messages(body)
    copies = body.get("n")
    if copies is None:
        copies = 1
    if type(copies) is not int or copies < 1:
        raise _bad("n", "n must be a whole number of at least 1")
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise _bad("stream", "stream must be true or false")
    if body.get("use_beam_search"):
        raise _bad("use_beam_search", "beam search is not supported by this router; leave use_beam_search out")
    check_transfer_parameters(body.get("kv_transfer_params"))
    return Request(endpoint, body, copies * prompts)


def check_transfer_parameters(value: Any) -> None:
    """Refuse what a client says about KV transfers. Raises :class:`Refused` with the reason.

    A client sets none of them: they decide into whose memory KV is written and from where it is fetched. An absent
    field, ``null`` and ``{}`` are the same.
    """
    field = "kv_transfer_params"
    if value is None:
        return
    if not isinstance(value, dict):
        raise Refused(
            Refusal.BAD_PARAMETERS, f"{field} must be an object, not {_kind(value)}; leave it out", field=field
        )
    for key in value:
        known = key in ROUTER_KEYS
        shown = json.dumps(key if len(key) <= 64 else key[:64] + "...")
        reason = "is set by the router, not by clients" if known else "is not known"
        raise Refused(
            Refusal.BAD_PARAMETERS,
            f"{field}: {shown} {reason}; clients set no keys of {field}, leave it out",
            field=f"{field}.{key}" if known else field,
        )


def prefill_body(request: Request, transfer: str) -> bytes:
    """The prefill leg: the same prompt, one token, one sample, no stream."""
    body = {key: value for key, value in request.body.items() if key not in _UNUSED_BY_PREFILL}
    body |= {"stream": False, "n": 1, "max_tokens": 1}
    if request.endpoint is Endpoint.CHAT:
        body["max_completion_tokens"] = 1
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer,
        "deliveries": request.deliveries,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def decode_body(request: Request, transfer: str, request_id: str, source: Coordinates) -> bytes:
    """The decode leg: the client's body, and where its KV comes from."""
    parameters = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.engine_id,
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_request_id": request_id,
        "tp_size": source.ranks,
        "pp_size": 1,
        "transfer_id": transfer,
    }
    return json.dumps({**request.body, "kv_transfer_params": parameters}, separators=(",", ":")).encode()


def _object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(Refusal.BAD_JSON, f"the body is not valid JSON: {detail}") from error
    if not isinstance(body, dict):
        raise Refused(Refusal.BAD_REQUEST, f"the body must be a JSON object, not {_kind(body)}")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _model(body: Mapping[str, Any]) -> None:
    model = body.get("model")
    if model is None:
        raise _bad("model", "model is missing; /v1/models lists what is served")
    if not isinstance(model, str) or not model:
        raise _bad("model", f"model must be a name, not {_kind(model) if model != '' else 'empty'}")


def _prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a completion request holds."""
    if body.get("prompt_embeds") is not None:
        raise _bad("prompt_embeds", "prompt_embeds are not supported by this router; send the prompt as text or tokens")
    prompt = body.get("prompt")
    if prompt is None:
        raise _bad("prompt", "prompt is missing")
    if isinstance(prompt, str) and prompt:
        return 1
    if isinstance(prompt, list) and prompt:
        if _tokens(prompt):
            return 1
        if all(isinstance(one, str) and one for one in prompt):
            return len(prompt)
        if all(isinstance(one, list) and one and _tokens(one) for one in prompt):
            return len(prompt)
    raise _bad("prompt", "prompt must be text, a list of token ids, or a list of either, and not empty")


def _tokens(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _messages(body: Mapping[str, Any]) -> int:
    """A chat request holds one prompt."""
    messages = body.get("messages")
    if messages is None:
        raise _bad("messages", "messages is missing")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise _bad("messages", "messages must be a list of at least one message object")
    return 1


def _bad(field: str, message: str) -> Refused:
    return Refused(Refusal.BAD_REQUEST, message, field=field)


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
