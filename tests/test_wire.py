"""Messages survive the wire, and nothing else does."""

from __future__ import annotations

import contextlib
import struct
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv import wire
from neuron_pushkv.errors import Reason, WireError
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.transport import base

ALL = typing.get_args(wire.AnyMessage)
IDENTITY = wire.Identity("engine", 1, wire.Rank())


def strategy(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a message field's type, within the bounds that the type gives."""
    node = msgspec.inspect.type_info(annotation)
    return of_node(node)


def of_node(node: msgspec.inspect.Type) -> st.SearchStrategy[typing.Any]:
    """Values of one type, as msgspec describes it."""
    match node:
        case msgspec.inspect.IntType():
            low = node.ge if node.ge is not None else -(2**63)
            high = node.le if node.le is not None else node.lt - 1 if node.lt is not None else 2**64 - 1
            return st.integers(int(low), int(high))
        case msgspec.inspect.StrType():
            return st.text(max_size=min(node.max_length or 20, 20))
        case msgspec.inspect.BytesType():
            return st.binary(min_size=node.min_length or 0, max_size=min(node.max_length or 40, 40))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType():
            return st.sampled_from(list(node.cls))
        case msgspec.inspect.LiteralType():
            return st.sampled_from(node.values)
        case msgspec.inspect.UnionType():
            return st.one_of([of_node(each) for each in node.types])
        case msgspec.inspect.VarTupleType():
            return st.lists(of_node(node.item_type), max_size=4).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(of_node, node.item_types))
        case msgspec.inspect.StructType():
            return st.builds(node.cls, **{field.name: of_node(field.type) for field in node.fields})
    raise AssertionError(f"no strategy for {node}")


def body(message: wire.Message) -> bytes:
    """Without the header."""
    return wire.encode(message)[wire.HEADER_BYTES :]


@given(st.one_of([strategy(kind) for kind in ALL]))
def test_every_message_comes_back_as_it_was(message: wire.AnyMessage) -> None:
    frame = wire.encode(message)
    assert wire.body_length(frame[: wire.HEADER_BYTES]) == len(frame) - wire.HEADER_BYTES
    assert wire.decode(frame[wire.HEADER_BYTES :]) == message


def test_all_messages_are_in_the_union() -> None:
    kinds = {kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, wire.Message)} - {
        wire.Message
    }
    assert set(ALL) == kinds
    assert len({kind.__struct_config__.tag for kind in ALL}) == len(ALL)


@pytest.mark.parametrize("kind", ALL)
def test_messages_are_frozen_and_skip_what_they_do_not_know(kind: type[wire.Message]) -> None:
    assert kind.__struct_config__.frozen
    assert not kind.__struct_config__.forbid_unknown_fields


def test_unknown_fields_are_skipped() -> None:
    later = {**msgspec.msgpack.decode(body(wire.Done(1, 2))), "colour": ["green", {"deep": 1}]}
    assert wire.decode(msgspec.msgpack.encode(later)) == wire.Done(1, 2)


@pytest.mark.parametrize("cut", range(len(body(wire.Done(1, 2)))))
def test_every_truncation_is_a_bad_frame(cut: int) -> None:
    with pytest.raises(WireError) as error:
        wire.decode(body(wire.Done(1, 2))[:cut])
    assert error.value.reason is Reason.BAD_FRAME


@given(st.binary(max_size=100))
def test_random_bytes_are_a_bad_frame_or_a_message(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(wire.decode(data), ALL)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_byte_is_a_bad_frame_or_a_message(place: int, value: int) -> None:
    data = bytearray(body(wire.Register("t", 1, 1, 0, 16, b"s", b"e", ((1, 2),), 16)))
    data[place % len(data)] = value
    with contextlib.suppress(WireError):
        assert isinstance(wire.decode(bytes(data)), ALL)


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (wire.Done(1, 2), "slot", -1),
        (wire.Done(1, 2), "slot", base.SLOTS),
        (wire.Done(1, 2), "epoch", base.EPOCHS),
        (wire.Done(1, 2), "slot", 1.5),
        (wire.Done(1, 2), "slot", None),
        (wire.Commit(1, 2, 3, 4), "writes", -1),
        (wire.Release("t"), "transfer", "t" * (wire.MAX_NAME + 1)),
        (wire.Release("t"), "transfer", b"t"),
        (wire.Fail(1, 2, 3, 4, Reason.ABORTED, "d"), "reason", "because"),
        (wire.Listening(wire.Rank(), "h", 1, "p", "l"), "port", 0),
        (wire.Listening(wire.Rank(), "h", 1, "p", "l"), "port", 65536),
        (wire.Listening(wire.Rank(), "h", 1, "p", "l"), "rank", {"tp": -1}),
        (wire.Hello(1, 0, "worker", "e", 1, wire.Rank(), bytes(32)), "nonce", bytes(31)),
        (wire.Hello(1, 0, "worker", "e", 1, wire.Rank(), bytes(32)), "nonce", bytes(33)),
        (wire.Hello(1, 0, "worker", "e", 1, wire.Rank(), bytes(32)), "incarnation", -1),
        (wire.Proof(bytes(32), IDENTITY), "proof", b""),
    ],
)
def test_values_out_of_bounds_are_a_bad_frame(message: wire.Message, field: str, value: object) -> None:
    changed = {**msgspec.msgpack.decode(body(message)), field: value}
    with pytest.raises(WireError, match=field) as error:
        wire.decode(msgspec.msgpack.encode(changed))
    assert error.value.reason is Reason.BAD_FRAME


def test_slot_and_epoch_are_as_wide_as_in_an_immediate() -> None:
    widest = wire.Done(base.SLOTS - 1, base.EPOCHS - 1)
    assert wire.decode(body(widest)) == widest


def test_an_array_that_only_claims_to_be_huge_takes_no_memory() -> None:
    """Four bytes may claim 32 GiB of pointers; a decoder that believes them dies."""
    data = body(wire.Freed(wire.Rank(), ()))
    assert data.endswith(b"\x90")
    with pytest.raises(WireError):
        wire.decode(data[:-1] + b"\xdd\xff\xff\xff\xff")


def test_lengths_are_bounded() -> None:
    assert wire.body_length(struct.pack(">I", 5), limit=5) == 5
    with pytest.raises(WireError, match="a frame of 6 bytes is over the limit of 5") as error:
        wire.body_length(struct.pack(">I", 6), limit=5)
    assert error.value.reason is Reason.BAD_FRAME
    with pytest.raises(WireError, match=r"Release takes \d+ bytes"):
        wire.encode(wire.Release("x" * (wire.MAX_FRAME_BYTES + 1)))


def test_an_identity_is_as_long_as_its_regions_and_not_its_blocks() -> None:
    def identity(regions: int, blocks: int) -> bytes:
        held = (Region(f"model.layers.{n}.attn", "kv", 0, 2**47, 65536, 8192, 0, 8192, 8, 8) for n in range(regions))
        layout = Layout("kernel", blocks, (Group(16),), tuple(held), 64)
        places = tuple(wire.RemoteRegion(0, 2**47) for _ in range(regions))
        proved, memory = bytes(wire.PROOF_BYTES), (bytes(64),)
        ours = wire.Identity("e", 2**63, wire.Rank(), "m", "tcp", layout, memory, places)
        return wire.encode(wire.Proof(proved, ours))

    assert len(identity(128, 1_000_000)) < 32 * 1024
    assert abs(len(identity(128, 1_000_000)) - len(identity(128, 100_000))) < 1024
    assert len(identity(1000, 1_000_000)) < wire.MAX_HANDSHAKE_BYTES // 4


def test_a_proof_covers_everything() -> None:
    challenge = wire.Challenge("e", 1, wire.Rank(), bytes(32), bytes(32))
    good = wire.proof(b"key", "opener", b"hello", challenge)
    others = [
        wire.proof(b"kez", "opener", b"hello", challenge),
        wire.proof(b"", "opener", b"hello", challenge),
        wire.proof(b"key", "acceptor", b"hello", challenge),
        wire.proof(b"key", "opener", b"hellp", challenge),
        wire.proof(b"key", "opener", b"hello", msgspec.structs.replace(challenge, engine_id="f")),
        wire.proof(b"key", "opener", b"hello", msgspec.structs.replace(challenge, incarnation=2)),
        wire.proof(b"key", "opener", b"hello", msgspec.structs.replace(challenge, rank=wire.Rank(tp=1))),
        wire.proof(b"key", "opener", b"hello", msgspec.structs.replace(challenge, nonce=b"1" * 32)),
    ]
    assert good not in others
    assert len(set(others)) == len(others)
    assert wire.proof(b"key", "opener", b"hello", msgspec.structs.replace(challenge, proof=b"1" * 32)) == good
    assert wire.proof_matches(good, bytes(good))
    assert not wire.proof_matches(good, others[0])
    assert len(good) == wire.PROOF_BYTES
