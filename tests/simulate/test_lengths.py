"""Distributions of lengths and arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from neuron_pushkv.simulate.lengths import Lengths, gaps


def drawn(text: str, count: int = 4000) -> list[int]:
    random = np.random.default_rng(7)
    lengths = Lengths.read(text)
    return [lengths.draw(random) for _ in range(count)]


def test_a_number_is_always_that() -> None:
    assert set(drawn("512", 10)) == {512}


def test_uniform_covers_both_ends_evenly() -> None:
    values = drawn("uniform:3:6")
    assert {values.count(each) > 800 for each in (3, 4, 5, 6)} == {True}
    assert set(values) == {3, 4, 5, 6}


def test_lognormal_has_its_median_and_ends() -> None:
    values = drawn("lognormal:1000:1:4000")
    assert float(np.median(values)) == pytest.approx(1000, rel=0.06)
    assert max(values) == 4000 == Lengths.read("lognormal:1000:1:4000").longest
    # 8.3 % of it lie beyond four times the median: ln 4 standard deviations.
    assert values.count(4000) / len(values) == pytest.approx(0.083, abs=0.02)
    assert np.std(np.log(drawn("lognormal:1000:0.1:4000"))) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "1.5", "nan", "inf", "uniform:5", "uniform:6:5", "lognormal:9:1:8", "zipf:1:2", "1:2"]
)
def test_what_is_no_length_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no length; write 16384, uniform:LOW:HIGH"):
        Lengths.read(text)


def test_arrivals_keep_their_rate() -> None:
    random = np.random.default_rng(1)
    assert gaps("fixed", 4.0, 3, random) == [0.25, 0.25, 0.25]
    poisson = gaps("poisson", 4.0, 20_000, random)
    assert float(np.mean(poisson)) == pytest.approx(0.25, rel=0.03)
    assert float(np.std(poisson)) == pytest.approx(0.25, rel=0.03)
