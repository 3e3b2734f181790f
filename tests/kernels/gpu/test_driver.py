"""The driver's functions as ctypes calls them: in a library with the types of `cuda.h`, and where there is none."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.gpu.driver import HANDLE_BYTES, Driver, DriverError
from tests.kernels.gpu.host_driver import HostMemory, build

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def driver(library: str) -> Driver:
    return Driver(library)


@pytest.fixture
def allocation(library: str) -> Iterator[tuple[int, int]]:
    """Address and bytes."""
    size = 4 * PAGE
    fd = os.memfd_create("allocation")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    host = HostMemory(library)
    host.add(address, size, fd)
    yield address, size
    host.free(address)
    os.close(fd)
    assert host.contexts() == 0, "every context is let go"


def test_a_machine_without_a_driver_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"no CUDA driver: .*no-such-library"):
        Driver("no-such-library.so.1")
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int cuInit(unsigned int flags) { return flags; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    with pytest.raises(DriverError, match=r"no CUDA driver: .*cuGetErrorString"):
        Driver(str(library))


def test_what_the_driver_refuses_is_said_in_its_words(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGet: invalid device ordinal \(101\)"):
        driver.uuid(3)
    with pytest.raises(DriverError, match=r"cuMemGetAddressRange_v2: invalid device context \(201\)"):
        driver.address_range(1 << 40)
    with driver.context(0), pytest.raises(DriverError, match="invalid argument"):
        driver.address_range(1 << 40)


def test_devices_have_names_and_reach_each_other_or_not(driver: Driver) -> None:
    assert driver.num_devices() == 3
    assert [driver.uuid(number) for number in range(3)] == [b"host device no.%d" % n for n in range(3)]
    assert driver.can_access(0, 1) and not driver.can_access(0, 2)


def test_a_context_is_let_go_whatever_happens_in_it(driver: Driver, library: str) -> None:
    with pytest.raises(KeyError), driver.context(1):
        assert HostMemory(library).contexts() == 2, "held and current"
        raise KeyError
    assert HostMemory(library).contexts() == 0


def test_addresses_and_handles_keep_all_their_bits(driver: Driver, allocation: tuple[int, int]) -> None:
    address, size = allocation
    assert address >> 32, "an address that 32 bits would cut"
    with driver.context(0):
        assert driver.address_range(address + size - 1) == (address, size)
        assert driver.can_be_shared(address)
        handle = driver.handle(address)
        assert len(handle) == HANDLE_BYTES and handle[40:] == b"\xee" * (HANDLE_BYTES - 40)
        opened = driver.open(handle)
        ctypes.memset(address, 7, size)
        assert ctypes.string_at(opened, size) == bytes([7]) * size, "one memory"
        assert driver.open(handle) == opened
        driver.close(opened)
        assert ctypes.string_at(opened, 1) == b"\7", "opened twice, closed once"
        driver.close(opened)
        with pytest.raises(DriverError, match="cuIpcCloseMemHandle: invalid argument"):
            driver.close(opened)
        with pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2: invalid resource handle"):
            driver.open(bytes(HANDLE_BYTES))
