"""Known answers of Philox4x32-10 (Random123's kat_vectors), and how a draw is addressed."""

import numpy as np
import pytest

from kernels.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, wanted: str) -> None:
    words = philox4x32(_words(counter)[None], _words(key)[None])[0]
    assert [f"{int(word):08x}" for word in words] == wanted.split()


def _words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)


def test_a_draw_is_a_function_of_seed_index_child_and_draw() -> None:
    seeds = [0, 1, 2**64 - 1, 1 << 32]
    together = uniforms(seeds, [0, 7, 3, 0], [0, 1, 0, 0])
    alone = [
        uniforms([seed], [index], [child])[0]
        for seed, index, child in zip(seeds, [0, 7, 3, 0], [0, 1, 0, 0], strict=True)
    ]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()
    others = [
        uniforms([0], [1], [0]),
        uniforms([0], [0], [1]),
        uniforms([0], [0], [0], draw=1),
        uniforms([1 << 32], [0], [0]),
    ]
    assert len({together[0], *(other[0] for other in others)}) == 5


def test_53_bits_spread_evenly() -> None:
    numbers = uniforms(list(range(20_000)), [0] * 20_000, [0] * 20_000)
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 100  # 49 degrees of freedom, p about 2e-5
    assert len(np.unique(numbers)) == 20_000
