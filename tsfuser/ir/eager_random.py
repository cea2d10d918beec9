"""How torch's own CUDA kernels hand out random numbers, for groups that are to give the same ones.

In: a value whose elements get a number each. Out: a `Random` with the walk that ATen's kernel would take:
`distribution_nullary_kernel` (ATen/native/cuda/DistributionTemplates.h) for rand_like and randn_like,
`fused_dropout_kernel_vec` or `fused_dropout_kernel` (ATen/native/cuda/Dropout.cu) for dropout. What a walk
means for an element is codegen/runtime/eager_random.h. Example, a dropout of 1000 dense floats:

    counter 0, threads 1024 (4 blocks of 256), width 4; the generator advances by 4
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Refusal
from . import layout as lay
from . import size as sz
from .build import Builder
from .dtypes import DOUBLE, FLOAT, DType
from .fusion import Random, Value, Walk
from .size import Size

_BLOCK = 256  # threads of a block in both kernels
_WORDS = 4  # of a Philox block; an offset of the generator counts words
_VECTOR = 16  # bytes of the longest vector that dropout reads
_MOST = 2**31 - 1  # elements or bytes beyond which eager cuts a tensor up, or takes other indices


@dataclass(frozen=True)
class Grid:
    """The most blocks that eager's random kernels have on one device: those that run at the same time."""

    blocks: int

    def threads(self, elements: Size) -> Size:
        """How many threads share that many elements."""
        return sz.minimum(sz.ceildiv(elements, _BLOCK), self.blocks) * _BLOCK


def numbers(b: Builder, law: str, like: Value, dtype: DType, itemsize: int) -> Value:
    """Those of eager's rand_like (`law` is `uniform`: in (0, 1], where it turns 1 to 0) or randn_like
    (`normal`), in `dtype`, float or double, for a result with elements of `itemsize` bytes. Raises
    Refusal."""
    elements = _elements(b, like)
    if b.call.decide(sz.lt(_MOST - 1, (elements - 1) * itemsize)):
        raise Refusal(
            "eager fills a tensor of more than 2 GB piece by piece, with random numbers of another order"
        )
    output = b.copied(b.new(law, dtype, like.dims), like)
    walk = _walk(b, elements, _WORDS // (2 if dtype is DOUBLE else 1), sz.const(1))
    b.ops.append(Random(law, 0, (like,), output, b.layout(output).strides, walk))
    return output


def dropout_numbers(b: Builder, like: Value) -> Value:
    """The numbers that eager's dropout of `like` compares with 1 - p: floats in (0, 1]. Raises Refusal."""
    elements = _elements(b, like)
    if b.call.decide(sz.lt(_MOST, elements)):
        raise Refusal("eager's dropout of 2^31 elements or more has another kernel")
    output = b.copied(b.new("uniform", FLOAT, like.dims), like)
    width = _width(b, like, elements)
    row_major = lay.contiguous(b.sizes(output)).strides
    in_memory = b.layout(output).strides
    # Vectors walk through memory, single elements row by row.
    if lay.is_contiguous(b.call, b.layout(like)) or not b.call.decide(sz.lt(1, width)):
        strides = row_major
    else:
        strides = in_memory
    walk = _walk(b, elements, _WORDS, width)
    b.ops.append(Random("uniform", 0, (like,), output, strides, walk))
    return output


def _elements(b: Builder, like: Value) -> Size:
    if b.is_on_cpu(like):
        raise Refusal("eager draws the random numbers of a CPU tensor on the CPU")
    return sz.product(b.sizes(like))


def _walk(b: Builder, elements: Size, unroll: int, width: Size) -> Walk:
    """The next walk of the group, which begins where the one before ends for eager's generator. `unroll`: the
    numbers that a thread is expected to take in a round, though vectors may make it fewer."""
    threads = b.eager(b.device).threads(elements)
    begin = b.drawn if b.drawn is not None else sz.const(0)
    b.drawn = begin + sz.ceildiv(elements, threads * unroll)
    return Walk(begin, threads, width)


def _width(b: Builder, like: Value, elements: Size) -> Size:
    """How many neighbours a thread of eager's dropout reads at once: as many as 16 bytes hold, fewer where
    the address or the number of elements is no multiple of them, 1 where memory has gaps or overlaps."""
    if not lay.is_dense(b.call, b.layout(like)):
        return sz.const(1)
    source = b.sources.get(like.name)
    alignment = source.alignment if source else sz.const(_VECTOR)  # what eager allocates is aligned
    return sz.minimum(sz.minimum(alignment, _VECTOR) // like.dtype.itemsize, sz.pow2(elements))
