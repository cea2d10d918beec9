"""The few calls of the CUDA driver that loading a kernel takes, through ctypes.

In: a compiled module's bytes and a device index. Out: a function handle in the device's primary context,
the one torch uses. Going to the driver directly keeps CuPy's import (0.1 s) out of a process whose kernels
are all in the disk cache, and lets a kernel be loaded while a stream is being captured.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

from ..errors import Refusal
from ..schedule.machine import GPU, Machine
from .function import Function

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OPTIN = 75, 76, 97  # CUdevice_attribute
_MULTIPROCESSORS, _THREADS_OF_MULTIPROCESSOR, _SHARED_OF_MULTIPROCESSOR = 16, 39, 81
_REGISTERS_OF_MULTIPROCESSOR, _THREADS_OF_BLOCK, _L2_BYTES, _SHARED_RESERVED = 82, 1, 38, 111
_MEMORY_KILOHERTZ, _MEMORY_BITS = 36, 37
# CUfunction_attribute
_STATIC_SHARED, _LOCAL_BYTES, _REGISTERS, _PTX_VERSION, _MAX_DYNAMIC_SHARED = 1, 3, 4, 5, 8
_ANY_CLUSTER = 14  # clusters of up to 16 blocks, if the device has room for them
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
def machine(index: int) -> Machine:
    """Device `index` as schedulers know it; what the driver does not tell is as on an H200."""
    return replace(
        GPU,
        name=_name(index),
        capability=capability(index),
        multiprocessors=_device_attribute(index, _MULTIPROCESSORS),
        registers=_device_attribute(index, _REGISTERS_OF_MULTIPROCESSOR),
        shared_per_multiprocessor=_device_attribute(index, _SHARED_OF_MULTIPROCESSOR),
        shared_per_block=_device_attribute(index, _SHARED_OPTIN),
        shared_reserved=_device_attribute(index, _SHARED_RESERVED),
        threads_per_multiprocessor=_device_attribute(index, _THREADS_OF_MULTIPROCESSOR),
        block_threads=_device_attribute(index, _THREADS_OF_BLOCK),
        l2=_device_attribute(index, _L2_BYTES),
        bandwidth=_bandwidth(index),
    )


def _name(index: int) -> str:
    text = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", text, len(text), _device(index))
    return text.value.decode(errors="replace")


#: Bytes a second by the makers' data sheets, of devices whose driver tells no memory clock; the first entry
#: that the name contains counts.
_BANDWIDTHS = {
    "B200": 8.0e12, "GB200": 8.0e12, "B300": 8.0e12, "H200": 4.8e12, "GH200": 4.0e12, "H100 PCIe": 2.04e12,
    "H100 NVL": 3.9e12, "H100": 3.35e12, "A100-SXM4-40GB": 1.555e12, "A100-PCIE-40GB": 1.555e12,
    "A100": 2.039e12, "V100": 0.9e12, "L40S": 0.864e12, "L40": 0.864e12, "L4": 0.3e12, "A40": 0.696e12,
    "A10": 0.6e12, "T4": 0.32e12, "RTX 5090": 1.792e12, "RTX 4090": 1.008e12, "RTX 3090": 0.936e12,
}  # fmt: skip


def _bandwidth(index: int) -> float | None:
    """Bytes a second that the memory of device `index` moves at most: two transfers a clock over the width of
    its bus, as nvFuser counts it, or by the data sheet; None where neither tells."""
    clock, bits = _device_attribute(index, _MEMORY_KILOHERTZ), _device_attribute(index, _MEMORY_BITS)
    found = (rate for part, rate in _BANDWIDTHS.items() if part in _name(index))
    return 2 * clock * 1e3 * bits / 8 or next(found, None)


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The primary context of device `index`, kept until the process ends."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(index))
    return context


def load(image: bytes, name: str, index: int) -> Function:
    """Kernel `name` of the cubin or PTX text `image` on device `index`; it may use all the shared memory
    that a block can have, and clusters of 16 blocks where the device has clusters."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), image + b"\0")
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        dynamic = _device_attribute(index, _SHARED_OPTIN) - _function_attribute(function, _STATIC_SHARED)
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, dynamic)
        if capability(index) >= 90:
            _call("cuFuncSetAttribute", function, _ANY_CLUSTER, 1)
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
