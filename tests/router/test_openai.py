"""What clients may send. Case F20: nothing that a client says about transfers gets through, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from neuron_pushkv.router.openai import (
    ROUTER_KEYS,
    Coordinates,
    Endpoint,
    Refusal,
    Refused,
    check_transfer_parameters,
    decode_body,
    error_body,
    parse,
    prefill_body,
)

GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "p"},
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "p"}]},
}
SENT_BY_PROXIES: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_host": "127.0.0.1",
    "remote_port": 14600,
    "remote_request_id": "r",
    "remote_block_ids": None,
    "tp_size": 1,
    "pp_size": 1,
    "transfer_id": "t",
    "deliveries": 1,
}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
anything = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


def refused(endpoint: Endpoint, content: bytes) -> Refused:
    """The refusal of that body."""
    with pytest.raises(Refused) as caught:
        parse(endpoint, content)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("p", 1), ([1, 2], 1), (["a", "b"], 2), ([[1], [2, 3], [4]], 3), (["a"], 1)]
)
@pytest.mark.parametrize(("copies", "times"), [({}, 1), ({"n": None}, 1), ({"n": 4}, 4)])
def test_deliveries_are_copies_times_prompts(prompt: object, prompts: int, copies: dict[str, Any], times: int) -> None:
    request = parse(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt, **copies}).encode())
    assert request.deliveries == prompts * times


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": None}, "model is missing; /v1/models lists what is served"),
        ({"model": 7}, "model must be a name, not a number"),
        ({"model": ""}, "model must be a name, not empty"),
        ({"n": 0}, "n must be a whole number of at least 1"),
        ({"n": True}, "n must be a whole number of at least 1"),
        ({"n": 1.5}, "n must be a whole number of at least 1"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stream": 1}, "stream must be true or false"),
        ({"use_beam_search": True}, "beam search is not supported by this router; leave use_beam_search out"),
        ({"kv_transfer_params": 7}, "kv_transfer_params must be an object, not a number; leave it out"),
        (
            {"kv_transfer_params": {"remote_host": "10.0.0.1"}},
            (
                'kv_transfer_params: "remote_host" is set by the router, not by clients; clients set no keys of '
                "kv_transfer_params, leave it out"
            ),
        ),
        (
            {"kv_transfer_params": {"x": 1}},
            'kv_transfer_params: "x" is not known; clients set no keys of kv_transfer_params, leave it out',
        ),
    ],
)
@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_wrong_fields_are_named(endpoint: Endpoint, change: dict[str, Any], sentence: str) -> None:
    refusal = refused(endpoint, json.dumps({**GOOD[endpoint], **change}).encode())
    assert (str(refusal), refusal.status) == (sentence, 400)
    assert refusal.field is not None
    assert refusal.field.startswith(next(iter(change)))


@pytest.mark.parametrize(
    "prompt", [None, "", [], 7, {"a": 1}, [""], [[]], [1, "a"], [1, True], [-1], [1.0], ["a", [1]], [[1], 2], [None]]
)
def test_a_prompt_is_text_or_tokens(prompt: object) -> None:
    refusal = refused(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert str(refusal).startswith("prompt ")
    assert refusal.field == "prompt"


@pytest.mark.parametrize("messages", [None, [], "hi", {"role": "user"}, ["hi"], [{}, 1]])
def test_messages_are_objects(messages: object) -> None:
    refusal = refused(Endpoint.CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert refusal.field == "messages"


def test_embeddings_are_refused_in_words() -> None:
    refusal = refused(Endpoint.COMPLETIONS, b'{"model": "m", "prompt_embeds": "AAAA"}')
    assert str(refusal) == "prompt_embeds are not supported by this router; send the prompt as text or tokens"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b"nonsense", id="no JSON at all"),
        pytest.param(b'{"model": NaN}', id="not a number"),
        pytest.param(b'{"a": Infinity}', id="infinity"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", id="an endless number"),
        pytest.param(b'{"a":' + b"[" * 200_000, id="nested without end"),
    ],
)
def test_what_is_not_json_is_said_to_be_none(content: bytes) -> None:
    refusal = refused(Endpoint.COMPLETIONS, content)
    assert refusal.refusal is Refusal.BAD_JSON
    assert str(refusal).startswith("the body is not valid JSON: ")
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("content", "kind"), [(b"[]", "a list"), (b"7", "a number"), (b'"s"', "a string"), (b"null", "null")]
)
def test_a_body_is_an_object(content: bytes, kind: str) -> None:
    assert str(refused(Endpoint.CHAT, content)) == f"the body must be a JSON object, not {kind}"


@pytest.mark.parametrize("endpoint", list(Endpoint))
@quick
@given(value=anything)
def test_no_transfer_parameters_get_through(endpoint: Endpoint, value: Any) -> None:
    body = {**GOOD[endpoint], "kv_transfer_params": value}
    try:
        content = json.dumps(body, allow_nan=False).encode()
    except ValueError:
        content = json.dumps(body).encode()
    if value is None or value == {}:
        request = parse(endpoint, content)
        for leg in (prefill_body(request, "t"), decode_body(request, "t", "r", Coordinates("e", "h", 1, 1))):
            assert json.loads(leg)["kv_transfer_params"]["transfer_id"] == "t"
    else:
        refusal = refused(endpoint, content)
        assert refusal.status == 400
        assert refusal.refusal in (Refusal.BAD_PARAMETERS, Refusal.BAD_JSON)


@quick
@given(
    dropped=some.sets(some.sampled_from(sorted(SENT_BY_PROXIES))),
    changed=some.dictionaries(some.sampled_from(sorted(SENT_BY_PROXIES)), anything),
    added=some.dictionaries(some.text(max_size=200), anything, max_size=2),
)
def test_parameters_of_a_proxy_are_refused_with_the_key(
    dropped: set[str], changed: dict[str, Any], added: dict[str, Any]
) -> None:
    values = {key: value for key, value in {**SENT_BY_PROXIES, **changed, **added}.items() if key not in dropped}
    if not values:
        return
    with pytest.raises(Refused) as caught:
        check_transfer_parameters(values)
    sentence = str(caught.value)
    assert sentence.startswith("kv_transfer_params: ")
    assert sentence.endswith("clients set no keys of kv_transfer_params, leave it out")
    assert len(sentence) < 600
    assert "\n" not in sentence
    first = next(iter(values))
    assert ("is set by the router" in sentence) == (first in ROUTER_KEYS)


def test_every_key_that_the_router_sends_is_known() -> None:
    request = parse(Endpoint.COMPLETIONS, json.dumps(GOOD[Endpoint.COMPLETIONS]).encode())
    legs = [prefill_body(request, "t"), decode_body(request, "t", "r", Coordinates("e", "h", 1, 1))]
    for leg in legs:
        assert set(json.loads(leg)["kv_transfer_params"]) <= ROUTER_KEYS
    assert set(SENT_BY_PROXIES) <= ROUTER_KEYS


@pytest.mark.parametrize("endpoint", list(Endpoint))
@quick
@given(
    body=some.dictionaries(some.sampled_from(["model", "prompt", "messages", "n", "stream"]) | some.text(), anything)
)
def test_any_body_is_taken_or_refused(endpoint: Endpoint, body: dict[str, Any]) -> None:
    try:
        request = parse(endpoint, json.dumps(body).encode())
    except Refused as error:
        refusal = error
    else:
        assert request.deliveries >= 1
        return
    assert refusal.status == 400
    assert json.loads(error_body(refusal.status, str(refusal), refusal.field))["error"]["message"] == str(refusal)


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_prefill_is_spared_what_shapes_only_the_answer(endpoint: Endpoint) -> None:
    shaping = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "min_tokens": 3, "stream_options": {}, "stream": True}
    request = parse(endpoint, json.dumps({**GOOD[endpoint], **shaping, "seed": 1, "cache_salt": "s"}).encode())
    leg = json.loads(prefill_body(request, "t"))
    assert set(leg) - set(GOOD[endpoint]) == (
        {"seed", "cache_salt", "stream", "n", "max_tokens", "kv_transfer_params"}
        | ({"max_completion_tokens"} if endpoint is Endpoint.CHAT else set())
    )
    assert leg["stream"] is False
    decode = json.loads(decode_body(request, "t", "r", Coordinates("e", "h", 1, 1)))
    del decode["kv_transfer_params"]
    assert decode == request.body


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "BadRequestError"), (404, "NotFoundError"), (500, "InternalServerError"), (503, "ServiceUnavailableError")],
)
def test_errors_are_typed_as_vllm_does(status: int, kind: str) -> None:
    assert json.loads(error_body(status, "m"))["error"] == {"message": "m", "type": kind, "param": None, "code": status}
