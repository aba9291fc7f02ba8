"""Equal content has equal digests and unlike content has not, whatever the block size."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from neuron_pushkv.content import DIGEST_BYTES, PAGE_TOKENS, Content, seed

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)
SEED = seed("model")


@given(tokens, tokens)
def test_a_prefix_has_the_same_content_whatever_follows(head: list[int], tail: list[int]) -> None:
    short, long = Content.of(SEED, head), Content.of(SEED, head + tail)
    for count in range(len(head) + 1):
        assert short.at(count) == long.at(count)
        assert len(short.at(count)) == DIGEST_BYTES


@given(tokens, st.data())
def test_a_changed_token_changes_all_content_from_there_on(ids: list[int], data: st.DataObject) -> None:
    assume(ids)
    place = data.draw(st.integers(0, len(ids) - 1))
    other = ids.copy()
    other[place] = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != ids[place]))
    one, two = Content.of(SEED, ids), Content.of(SEED, other)
    for count in range(len(ids) + 1):
        assert (one.at(count) == two.at(count)) == (count <= place)


@given(tokens)
def test_every_length_has_its_own_content(ids: list[int]) -> None:
    content = Content.of(SEED, ids)
    assert len({content.at(count) for count in range(len(ids) + 1)}) == len(ids) + 1


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.lists(st.text(max_size=5), min_size=1, max_size=4))
def test_seeds_tell_their_parts_apart(one: list[str], two: list[str]) -> None:
    assert (seed(*one) == seed(*two)) == (one == two)


def test_the_seed_is_in_every_digest() -> None:
    one, two = Content.of(seed("model"), range(40)), Content.of(seed("model", "a LoRA"), range(40))
    assert not {one.at(count) for count in range(41)} & {two.at(count) for count in range(41)}


def test_the_chain_is_what_it_says() -> None:
    """Two engines of different releases must agree, so this is computed by hand."""
    ids = list(range(2 * PAGE_TOKENS + 3))
    link = SEED
    for page in (ids[:16], ids[16:32], ids[32:]):
        packed = b"".join(token.to_bytes(4, "little") for token in page)
        link = hashlib.blake2b(link + packed, digest_size=16).digest()
    assert Content.of(SEED, ids).at(len(ids)) == link
    assert Content.of(SEED, ids).length == 35
    assert Content.of(SEED, []).at(0) == SEED


@pytest.mark.parametrize("count", [-1, 4])
def test_there_is_no_content_outside_the_prompt(count: int) -> None:
    with pytest.raises(ValueError, match=f"a prompt of 3 tokens has no content at {count}"):
        Content.of(SEED, [1, 2, 3]).at(count)
