"""The few calls of the CUDA driver that loading a kernel takes, through ctypes.

In: a compiled module's bytes and a device index. Out: a function handle in the device's primary context,
the one torch uses. Going to the driver directly keeps CuPy's import (0.1 s) out of a process whose kernels
are all in the disk cache, and lets a kernel be loaded while a stream is being captured.
"""

from __future__ import annotations

import ctypes
import functools

from ..errors import Refusal
from .function import Function

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OPTIN = 75, 76, 97  # CUdevice_attribute
_MULTIPROCESSORS, _THREADS_OF_MULTIPROCESSOR, _SHARED_OF_MULTIPROCESSOR = 16, 39, 81
_MEMORY_KILOHERTZ, _MEMORY_BITS = 36, 37
# CUfunction_attribute
_STATIC_SHARED, _LOCAL_BYTES, _REGISTERS, _PTX_VERSION, _MAX_DYNAMIC_SHARED = 1, 3, 4, 5, 8
_CAPTURE_RELAXED = 2  # CUstreamCaptureMode


class DriverError(RuntimeError):
    """A driver call failed; the message has its name and the driver's reason."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Refusal("CUDA tensors need the CUDA driver: libcuda.so.1 cannot be loaded") from error
    if library.cuInit(0):
        raise Refusal("CUDA tensors need a CUDA device: the driver found none")
    return library


def _call(name: str, *args) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


def _device_attribute(index: int, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, _device(index))
    return value.value


@functools.cache
def capability(index: int) -> int:
    """Compute capability of device `index` as one number: 90 for 9.0."""
    return _device_attribute(index, _CAPABILITY_MAJOR) * 10 + _device_attribute(index, _CAPABILITY_MINOR)


@functools.cache
def multiprocessors(index: int) -> tuple[int, int, int]:
    """(multiprocessors of device `index`, bytes of shared memory of each, threads that each has room for)."""
    wanted = (_MULTIPROCESSORS, _SHARED_OF_MULTIPROCESSOR, _THREADS_OF_MULTIPROCESSOR)
    return tuple(_device_attribute(index, attribute) for attribute in wanted)


@functools.cache
def memory_bandwidth(index: int) -> float | None:
    """Bytes a second that the memory of device `index` moves at most: two transfers a clock over the width of
    its bus, as nvFuser counts it; None where the driver does not tell."""
    clock, bits = _device_attribute(index, _MEMORY_KILOHERTZ), _device_attribute(index, _MEMORY_BITS)
    return 2 * clock * 1e3 * bits / 8 or None


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The primary context of device `index`, kept until the process ends."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(index))
    return context


def load(image: bytes, name: str, index: int) -> Function:
    """Kernel `name` of the cubin or PTX text `image` on device `index`; it may use all the shared memory
    that a block can have."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), image + b"\0")
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        dynamic = _device_attribute(index, _SHARED_OPTIN) - _function_attribute(function, _STATIC_SHARED)
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, dynamic)
        registers, local, version = (
            _function_attribute(function, a) for a in (_REGISTERS, _LOCAL_BYTES, _PTX_VERSION)
        )
        return Function(function.value, module, registers, local, version >= 90)
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _function_attribute(function: ctypes.c_void_p, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
    return value.value
