"""The bytes of blocks: copies that are whole, and checksums that the xxhash package gives too."""

import mmap
import random
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import xxhash

import kernels.block_bytes
from kernels.block_bytes import checksums, copy_blocks

VARIANTS = ("avx512", "avx2", "plain", "package")
LENGTHS = [*range(1100), 2047, 2048, 2049, 65_536, 368_640, 368_641]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every way of computing them that this processor has."""
    native: ModuleType | None = kernels.block_bytes._native
    if request.param == "package":
        monkeypatch.setattr(kernels.block_bytes, "_native", None)
    elif native is None or not native.blocks_use(request.param):
        pytest.skip(f"no {request.param} here")
    yield request.param
    if native is not None:
        assert any(native.blocks_use(name) for name in VARIANTS)


@pytest.fixture
def content() -> random.Random:
    return random.Random()  # fresh data every time


def test_every_length_has_the_checksum_of_the_xxhash_package(variant: str, content: random.Random) -> None:
    sources = [content.randbytes(length) for length in LENGTHS]
    wanted = [xxhash.xxh3_64_intdigest(source) for source in sources]
    assert list(checksums(sources)) == wanted
    targets = [bytearray(b"\xa5" * (length + 2)) for length in LENGTHS]
    inside = [memoryview(target)[1:-1] for target in targets]  # at odd addresses, with a guard on each side
    assert list(copy_blocks(inside, sources)) == wanted
    assert [bytes(target) for target in targets] == [b"\xa5" + source + b"\xa5" for source in sources]


@pytest.mark.parametrize("shift", [0, 1, 32, 64])
def test_aligned_and_other_targets_hold_the_same(variant: str, content: random.Random, shift: int) -> None:
    """Whole lines are stored past the caches, others are not."""
    source = content.randbytes(36_864)
    memory = memoryview(mmap.mmap(-1, len(source) + 256))  # at a page's start
    target = memory[shift : shift + len(source)]
    assert list(copy_blocks([target], [source])) == [xxhash.xxh3_64_intdigest(source)]
    assert target == source and not any(memory[shift + len(source) :]) and not any(memory[:shift])


def test_one_bit_changes_the_checksum(variant: str, content: random.Random) -> None:
    for length in (1, 9, 100, 200, 241, 5000):
        block = bytearray(content.randbytes(length))
        (before,) = checksums([memoryview(block)])
        block[content.randrange(length)] ^= 1 << content.randrange(8)
        assert checksums([memoryview(block)])[0] != before


def test_the_checksum_is_of_the_copy(variant: str, content: random.Random) -> None:
    """A source that is written to meanwhile: whatever was copied, the checksum is of that."""
    source, target = bytearray(content.randbytes(1 << 20)), memoryview(bytearray(1 << 20))
    other, done = content.randbytes(1 << 20), threading.Event()

    def spoil() -> None:
        while not done.is_set():
            source[: 1 << 19] = other[: 1 << 19]
            source[1 << 19 :] = other[1 << 19 :]
            source[:] = bytes(1 << 20)

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        for _ in range(50):
            assert copy_blocks([target], [memoryview(source)])[0] == xxhash.xxh3_64_intdigest(target)
    finally:
        done.set()
        thread.join()


def test_sizes_and_kinds_are_checked(variant: str) -> None:
    with pytest.raises(ValueError):
        copy_blocks([memoryview(bytearray(10))], [b"x" * 11])
    with pytest.raises(ValueError):
        copy_blocks([memoryview(bytearray(10))], [])
    with pytest.raises((TypeError, BufferError)):
        copy_blocks([memoryview(b"x" * 10)], [b"x" * 10])
    assert list(copy_blocks([], [])) == [] and list(checksums([])) == []
