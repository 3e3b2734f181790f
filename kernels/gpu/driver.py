"""The few functions of the CUDA driver that share a device's memory between processes, by ctypes.

Why the driver and not torch: torch hands over tensors, counts their uses between the processes and wants to be told of
each; we hand over one pool, once, and its life is that of a connection. The names and types are those of `cuda.h`: a
function whose meaning has changed has a number, and the newest is what `cuda.h` calls by the name without one.

Devices are numbered as torch numbers them: `CUDA_VISIBLE_DEVICES` is the driver's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_ENABLE_PEER_ACCESS = 1  # the one flag that cuIpcOpenMemHandle takes; it must be given
_IS_LEGACY_IPC_CAPABLE = 10  # of CUpointer_attribute, since CUDA 11.0


class DriverError(Exception):
    """There is no driver, or it says no; the message has its words."""


class _Handle(Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = [("reserved", c_ubyte * HANDLE_BYTES)]


class _Uuid(Structure):
    """CUuuid."""

    _fields_ = [("bytes", c_ubyte * UUID_BYTES)]


_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}
"""Each gives a CUresult, 0 where all is well. CUdevice is an int, CUdeviceptr an unsigned 64-bit number."""


class Driver:
    """Whatever is about memory is to be called inside `context`. Everything raises DriverError."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = list(arguments), c_int
        except (OSError, AttributeError) as error:  # no such library, or one that lacks a function
            raise DriverError(f"no CUDA driver: {error}") from error
        self._call("cuInit", 0)

    def num_devices(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def uuid(self, device: int) -> bytes:
        """What the device is called in every process, 16 bytes; a MIG instance has one of its own."""
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", byref(found), self._device(device))
        return bytes(found.bytes)

    def can_access(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can read the memory of `peer`."""
        can = c_int()
        self._call("cuDeviceCanAccessPeer", byref(can), self._device(device), self._device(peer))
        return bool(can.value)

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context, the one that torch uses, is this thread's meanwhile."""
        number, context = self._device(device), c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), number)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", byref(c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number)

    def address_range(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds `address` begins, and its bytes."""
        base, size = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def can_be_shared(self, address: int) -> bool:
        """Whether its allocation is one that handles can be had of; virtual memory (cuMemMap) is not."""
        can = c_int()
        self._call("cuPointerGetAttribute", byref(can), _IS_LEGACY_IPC_CAPABLE, address)
        return bool(can.value)

    def handle(self, base: int) -> bytes:
        """By which another process opens the allocation that begins at `base`, 64 bytes."""
        found = _Handle()
        self._call("cuIpcGetMemHandle", byref(found), base)
        return bytes(found.reserved)

    def open(self, handle: bytes) -> int:
        """Where another process's allocation begins in this one; several times the same, to be closed as often."""
        base = c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(base), given, _LAZY_ENABLE_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        """Of what `open` gave."""
        self._call("cuIpcCloseMemHandle", base)

    def _device(self, number: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), number)
        return device.value

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            words = c_char_p()
            self._library.cuGetErrorString(result, byref(words))
            said = (words.value or b"unknown to this driver").decode(errors="replace")
            raise DriverError(f"{name}: {said} ({result})")
