"""Uniforms as a pure function of their key."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct

import pytest
import torch
from scipy import stats

from specgen.sampling.device import DeviceNoise
from specgen.sampling.randomness import KeyedUniforms, SharedNoise, Stream, keyed_uniform, prompt_digest

N = 20_000
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def oracle(*words: int) -> float:
    """The same uniform in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    state = 0
    for word in words:
        state = mix(((state ^ mix((word + GAMMA) & MASK)) + GAMMA) & MASK)
    return (state >> 11) / 2**53


def test_equal_to_the_oracle() -> None:
    words = [0, 1, 2**31, 2**53 - 1, 2**63 - 1, 2**63, MASK, 0xDEADBEEF12345678]
    for key in [*itertools.product(words, repeat=3), (7,), tuple(range(6))]:
        assert float(keyed_uniform(*key)) == oracle(*key)


def test_the_oracles_mixer_is_splitmix64() -> None:
    """Published first outputs of SplitMix64 from state 0 and 1234567."""
    for state, outputs in {
        0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4],
        1234567: [6457827717110365317, 3203168211198807973],
    }.items():
        for i, output in enumerate(outputs, 1):
            x = (state + i * GAMMA) & MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
            assert x ^ (x >> 31) == output


@pytest.mark.parametrize("negative", [-1, -(2**63)])
def test_a_negative_word_is_its_64_bits(negative: int) -> None:
    assert float(keyed_uniform(negative, 5)) == oracle(negative & MASK, 5)


def series(which: str, **fixed: int) -> torch.Tensor:
    key = {"seed": 3, "digest": 99, "stream": 1, "position": 4, "round": 2} | fixed
    words: dict[str, torch.Tensor | int] = {**key, which: torch.arange(N)}
    return keyed_uniform(*words.values())


AXES = ["seed", "digest", "stream", "position", "round"]


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_word_of_the_key(axis: str) -> None:
    u = series(axis).numpy()
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    # the low bits too
    low = (u * 2**53) % 2**12 / 2**12
    assert stats.kstest(low, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_along_a_word_are_independent(axis: str) -> None:
    u = series(axis).numpy()
    for lag in (1, 2, 3, 64):
        assert abs(stats.pearsonr(u[:-lag], u[lag:]).statistic) < 4.5 / N**0.5
        pairs, *_ = stats.binned_statistic_2d(u[:-lag], u[lag:], None, "count", bins=8)
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


@pytest.mark.parametrize(("axis", "other"), [(axis, other) for axis in AXES for other in AXES if axis != other])
def test_series_that_differ_in_another_word_are_independent(axis: str, other: str) -> None:
    a, b = series(axis, **{other: 5}).numpy(), series(axis, **{other: 6}).numpy()
    assert abs(stats.pearsonr(a, b).statistic) < 4.5 / N**0.5
    pairs, *_ = stats.binned_statistic_2d(a, b, None, "count", bins=8)
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_these_checks_see_a_shared_key() -> None:
    a = series("position", stream=1).numpy()
    shifted = keyed_uniform(3, 99, 1, torch.arange(1, N + 1), 2).numpy()
    assert abs(stats.pearsonr(a[1:], shifted[:-1]).statistic) > 0.99
    assert stats.kstest(a**1.05, "uniform").pvalue < 1e-4


def test_broadcasting_and_order_of_the_words() -> None:
    grid = keyed_uniform(1, torch.arange(3)[:, None], torch.arange(4)[None, :])
    assert grid.shape == (3, 4)
    assert float(grid[2, 3]) == oracle(1, 2, 3)
    assert float(keyed_uniform(1, 2, 3)) != float(keyed_uniform(1, 3, 2))
    assert grid.dtype == torch.float64


def test_a_block_equals_single_evaluations() -> None:
    """In whatever order they are asked for: no state but the key."""
    uniforms = KeyedUniforms(7, 0xF00D_F00D_F00D_F00D)
    keys = list(itertools.product([Stream.DRAFT, Stream.ACCEPT, Stream.CHECK], [0, 1, 63, 64, 65, 200], [0, 1, 9]))
    for stream, position, index in [*keys, *reversed(keys), *keys[::3]]:
        expected = oracle(7, 0xF00D_F00D_F00D_F00D, stream, position, index)
        assert uniforms(stream, position, index) == expected


def test_global_generators_neither_matter_nor_move() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(1)
    a = float(keyed_uniform(1, 2))
    torch.manual_seed(2)
    seeded = torch.get_rng_state()
    assert float(keyed_uniform(1, 2)) == a
    assert torch.equal(torch.get_rng_state(), seeded)
    torch.set_rng_state(before)


def test_digest() -> None:
    texts = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (256,), (1, 0), (12,), (2**33,)]
    digests = [prompt_digest(t) for t in texts]
    assert len(set(digests)) == len(texts)
    assert all(0 <= d < 2**64 for d in digests)
    assert prompt_digest([1, 2]) == prompt_digest((1, 2)) == prompt_digest(torch.tensor([1, 2]).tolist())
    a, b = (KeyedUniforms(0, prompt_digest(t)) for t in ([1, 2], [1, 3]))
    assert a(Stream.DRAFT, 5, 0) != b(Stream.DRAFT, 5, 0)


def test_seeds_beyond_64_bits_and_below_zero_are_taken() -> None:
    assert float(keyed_uniform(2**64 + 3, 1)) == float(keyed_uniform(3, 1))
    assert float(keyed_uniform(-1, 1)) != float(keyed_uniform(1, 1))


def test_the_digest_is_of_eight_bytes_a_token() -> None:
    """Every seeded text depends on it, so the numbers stand here; and no token's upper half is lost."""
    for tokens in ((), (7,), (1, 2, 49_151), (2**32, 2**40 + 5)):
        data = struct.pack(f"<{len(tokens)}q", *tokens)
        wanted = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        assert prompt_digest(tokens) == wanted
    assert prompt_digest((1, 2, 3)) == 0xB4FB5A8DE61ABA77
    for token in (0, 1, 77):
        for far in (8, 16, 31, 32, 33, 48):
            assert prompt_digest([token]) != prompt_digest([token + 2**far])


def test_shared_noise_never_comes_back() -> None:
    """At any position it is the Gumbel number of that very key, for host and device alike: none is used twice."""
    positions = [*range(0, 300), *(2**n + d for n in range(9, 34) for d in (-1, 0, 1))]
    like, digest = torch.zeros(3, dtype=torch.float64), 0xF00D_F00D_F00D_F00D
    noise, device = SharedNoise(7, digest), DeviceNoise(torch.device("cpu"))
    device.take(noise)
    seen = set()
    for position in positions:
        found = noise.gumbel(position, like).tolist()
        wanted = [-math.log(-math.log(oracle(7, digest, 0, position, token) + 2.0**-54)) for token in range(3)]
        assert found == pytest.approx(wanted, rel=1e-12)
        assert device.gumbel(torch.tensor([position]), like).flatten().tolist() == found
        assert KeyedUniforms(7, digest)(Stream.DRAFT, position, 0) == oracle(7, digest, Stream.DRAFT, position, 0)
        seen.add(tuple(found))
    assert len(seen) == len(set(positions))
