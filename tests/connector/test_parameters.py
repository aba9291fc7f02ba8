"""kv_transfer_params: what proxies send, and everything that nobody should."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.connector.parameters import MAX_TEXT, AllowedHosts, BadParameters, DecodeLeg, PrefillLeg, parse
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Remote

HOSTS = AllowedHosts("10.1.2.3", ["192.168.0.0/16", "prefill-0.example", "2001:db8::7"])
DECODE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_host": "10.1.2.9",
    "remote_port": 14600,
    "tp_size": 1,
    "pp_size": 1,
    "remote_request_id": "cmpl-r-0-12345678",
    "transfer_id": "t1",
    "remote_num_tokens": 12,
}


def asked(parameters: Any) -> Any:
    return parse(parameters, HOSTS, tp_size=1, pp_size=1)


@pytest.mark.parametrize(
    "nothing",
    [None, {}, {"other": 1}, {"do_remote_decode": False, "do_remote_prefill": False}, {"do_remote_decode": None}],
)
def test_requests_that_are_nobody_elses_business(nothing: Any) -> None:
    assert asked(nothing) is None


def test_a_prefill_leg_of_an_older_proxy() -> None:
    """Exactly what proxies for vLLM's own connectors send; no transfer id, and nulls where P's coordinates would be."""
    sent = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert asked(sent) == PrefillLeg(transfer="", deliveries=1)


def test_a_decode_leg_of_an_older_proxy() -> None:
    sent = {
        key: DECODE[key] for key in ("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id")
    }
    sent |= {"remote_host": "127.0.0.1", "remote_port": 14600, "tp_size": 1, "transfer_mode": "push", "dcp_size": 1}
    assert asked(sent) == DecodeLeg("", Remote("127.0.0.1", 14600))


def test_legs_of_our_own_router() -> None:
    assert asked(DECODE) == DecodeLeg("t1", Remote("10.1.2.9", 14600, 1, 1))
    assert asked({"do_remote_decode": True, "transfer_id": "t1", "deliveries": 4}) == PrefillLeg("t1", 4)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1", "10.1.2.3", "10.1.2.255"),
        *("192.168.77.1", "::ffff:192.168.0.1", "prefill-0.example", "Prefill-0.Example", "2001:db8::7"),
    ],
)
def test_hosts_that_are_allowed(host: str) -> None:
    assert host in HOSTS


@pytest.mark.parametrize(
    "host",
    [
        *("10.1.3.3", "8.8.8.8", "192.169.0.1", "::ffff:8.8.8.8", "2001:db8::8", "0.0.0.0", "10.1.2.3/24"),
        *("prefill-1.example", "example", "127.0.0.1.example", "localhost.", "0x7f000001", "127.1", " 127.0.0.1", ""),
    ],
)
def test_hosts_that_are_not(host: str) -> None:
    assert host not in HOSTS


def test_the_listeners_own_subnet_is_a_64_for_ipv6_and_nothing_for_loopback() -> None:
    assert "2001:db8:0:1::9" in AllowedHosts("2001:db8:0:1::1", ())
    assert "2001:db8:0:2::9" not in AllowedHosts("2001:db8:0:1::1", ())
    assert "10.0.0.1" not in AllowedHosts("127.0.0.1", ())
    assert "node-7" in AllowedHosts("node-7", ())


BAD: dict[str, list[Any]] = {
    "remote_host": [None, 5, "", "a" * (MAX_TEXT + 1), "10.1.2.9\n", ["10.1.2.9"], {}],
    "remote_port": [None, "14600", 0, -1, 65536, 1e4, True, 10**30, [], float("nan")],
    "remote_engine_id": [None, 1, "", b"p0", "\0"],
    "remote_request_id": [1, "x" * (MAX_TEXT + 1), {}],
    "transfer_id": [1, True, "x" * (MAX_TEXT + 1), ["t"], "t\x1b[31m"],
    "tp_size": ["1", 0, -1, 1.0, True, 1 << 40],
    "pp_size": ["1", 0, [], 1 << 40],
    "remote_num_tokens": [-1, "12", 1.5, 1 << 60],
    "do_remote_prefill": ["true", 1, [True]],
    "do_remote_decode": ["false", 0, {}, True],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(BadParameters, match=key) as refused:
        asked({**DECODE, key: value})
    assert refused.value.reason is Reason.BAD_PARAMETERS
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", [[], "x", 5, [("do_remote_decode", True)]])
def test_parameters_that_are_no_object_are_refused(value: Any) -> None:
    with pytest.raises(BadParameters, match="must be an object"):
        asked(value)


@pytest.mark.parametrize("key", ["deliveries", "transfer_id"])
@pytest.mark.parametrize("value", [0, -1, [], 1 << 20, True])
def test_a_bad_prefill_leg_is_refused(key: str, value: Any) -> None:
    with pytest.raises(BadParameters, match=key):
        asked({"do_remote_decode": True, key: value})


def test_other_parallel_sizes_are_followed_and_missing_ones_are_ours() -> None:
    assert asked({**DECODE, "tp_size": 8, "pp_size": 2}) == DecodeLeg("t1", Remote("10.1.2.9", 14600, 8, 2))
    sizes = {"tp_size": None, "pp_size": None}
    assert parse({**DECODE, **sizes}, HOSTS, 4, 2) == DecodeLeg("t1", Remote("10.1.2.9", 14600, 4, 2))


def test_a_host_that_is_not_allowed_has_a_reason_of_its_own() -> None:
    with pytest.raises(BadParameters, match=r"'8\.8\.8\.8' is not allowed") as refused:
        asked({**DECODE, "remote_host": "8.8.8.8"})
    assert refused.value.reason is Reason.HOST_NOT_ALLOWED


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=300)
    | st.sampled_from(["127.0.0.1", 14600]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(DECODE)), JSON), st.sets(st.sampled_from(sorted(DECODE))))
def test_whatever_is_sent_is_followed_or_refused(changes: dict[str, Any], dropped: set[str]) -> None:
    """F20: nothing else is ever raised, and what is followed has been checked."""
    parameters = {key: value for key, value in {**DECODE, **changes}.items() if key not in dropped}
    try:
        leg, refused = asked(parameters), None
    except BadParameters as error:
        leg, refused = None, error
    if refused is not None:
        assert refused.reason in Reason
        assert str(refused).isprintable()
    if isinstance(leg, DecodeLeg):
        assert leg.remote.host in HOSTS
        assert 1 <= leg.remote.port <= 65535
        assert leg.remote.tp_size >= 1
        assert leg.remote.pp_size >= 1
        assert len(leg.transfer) <= MAX_TEXT
