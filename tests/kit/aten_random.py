"""torch's random CUDA kernels, thread by thread, in Python: what tests compare eager_random with where there
is no GPU.

In: the key and the offset of a generator, the most blocks of a grid, tensors. Out: what eager's ops give.
The loops are those of ATen/native/cuda/DistributionTemplates.h and Dropout.cu, the formulas those of cuRAND.
Example:

    generator = Generator(key, most=8)
    y, mask = generator.native_dropout(x, 0.5)
"""

import math
import struct
from typing import NamedTuple

import torch

BLOCK = 256
WORD = 0xFFFFFFFF


class Launch(NamedTuple):
    """`most`: blocks that run at the same time."""

    most: int

    def threads(self, elements):
        return BLOCK * min(self.most, -(-elements // BLOCK))


def philox(key, low, high):
    """Philox 4x32-10 (Salmon and others, SC'11)."""
    a, b, c, d = low & WORD, low >> 32 & WORD, high & WORD, high >> 32
    k0, k1 = key & WORD, key >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k0, q & WORD, p >> 32 ^ d ^ k1, p & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return a, b, c, d


class State:
    """curandStatePhilox4_32_10 of one thread: `next` gives its next four words."""

    def __init__(self, key, thread, offset):
        assert offset % 4 == 0
        self.key, self.thread, self.counter = key, thread, offset // 4

    def next(self):
        self.counter += 1
        return philox(self.key, self.counter - 1, self.thread)


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def uniforms(words, double):
    """curand_uniform4, curand_uniform2_double."""
    if not double:
        return [f32(f32(w) * 2.0**-32 + 2.0**-33) for w in words]
    return [(words[k] ^ words[k + 1] << 21) * 2.0**-53 + 2.0**-54 for k in (0, 2)]


def normals(words, double):
    """curand_normal4, curand_normal2_double; in double arithmetic, so near to what floats give."""
    if not double:
        pairs = [
            (f32(words[k]) * 2.0**-32 + 2.0**-33, (words[k + 1] + 0.5) * 2.0**-32 * 2 * math.pi)
            for k in (0, 2)
        ]
    else:
        u, v = ((words[k] ^ words[k + 1] << 21) for k in (0, 2))
        pairs = [(u * 2.0**-53 + 2.0**-54, (v * 2.0**-52 + 2.0**-53) * math.pi)]
    return [math.sqrt(-2 * math.log(u)) * part(v) for u, v in pairs for part in (math.sin, math.cos)]


def nullary(key, offset, launch, elements, law, double):
    """distribution_elementwise_grid_stride_kernel: the numbers in the order of memory, and the offset after
    them."""
    if elements == 0:
        return [], offset
    threads, unroll = launch.threads(elements), 2 if double else 4
    step = threads * unroll
    found = [None] * elements
    for thread in range(min(threads, elements)):
        state = State(key, thread, offset)
        for start in range(thread, ((elements - 1) // step + 1) * step, step):
            drawn = law(state.next(), double)
            for k in range(unroll):
                if start + k * threads < elements:
                    found[start + k * threads] = drawn[k]
    return found, offset + ((elements - 1) // step + 1) * 4


def dropout(key, offset, launch, elements, width):
    """fused_dropout_kernel_vec, or fused_dropout_kernel where `width` is 1: likewise."""
    if width == 1:
        return nullary(key, offset, launch, elements, uniforms, False)
    threads = launch.threads(elements)
    found = [None] * elements
    for thread in range(threads):
        state = State(key, thread, offset)
        for start in range(thread * width, elements, threads * width):
            drawn = [u for _ in range(-(-width // 4)) for u in uniforms(state.next(), False)]
            found[start : start + width] = drawn[:width]
    return found, offset + ((elements - 1) // (threads * 4) + 1) * 4


def width_of(x):
    """get_vector_size: elements that the dropout of `x` reads at once."""
    if not is_dense(x):
        return 1
    width = next(n for n in (8, 4, 2, 1) if x.data_ptr() % (n * x.itemsize) == 0)
    width = min(width, 16 // x.itemsize)
    while x.numel() % width:
        width //= 2
    return width


def is_dense(x):
    """is_non_overlapping_and_dense."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


class Generator:
    """torch's CUDA generator: `key` and offset; its methods are eager's ops."""

    def __init__(self, key, most, offset=0):
        self.key, self.launch, self.offset = key, Launch(most), offset

    def _like(self, x, law, dtype):
        dtype = dtype or x.dtype
        found, self.offset = nullary(
            self.key, self.offset, self.launch, x.numel(), law, dtype is torch.float64
        )
        result = torch.empty_like(x, dtype=dtype)  # dense: filled in the order of memory
        torch.as_strided(result, (x.numel(),), (1,)).copy_(torch.tensor(found, dtype=torch.float64))
        return result

    def rand_like(self, x, dtype=None):
        result = self._like(x, uniforms, dtype)
        return torch.where(result == 1, torch.zeros_like(result), result)

    def randn_like(self, x, dtype=None):
        return self._like(x, normals, dtype)

    def native_dropout(self, x, p):
        if x.numel() == 0:
            return x.clone(), x.bool()
        width = width_of(x)
        found, self.offset = dropout(self.key, self.offset, self.launch, x.numel(), width)
        uniform = torch.empty_like(x, dtype=torch.float32)
        numbers = torch.tensor(found, dtype=torch.float64)
        if width > 1:
            torch.as_strided(uniform, (x.numel(),), (1,)).copy_(numbers)
        else:
            uniform.copy_(numbers.view(x.shape))
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        keep = torch.tensor(1.0 - p, dtype=wide)
        mask = uniform < keep
        return (x.to(wide) * mask * (1.0 / keep.double()).to(wide)).to(x.dtype), mask
