"""The order in which random numbers are counted, as the length of the tensor that holds their seed.

In: the order of dims in memory, outermost first. Out: a length, from which a later kernel, whose operands may
be in another layout, has the order again. So a seed describes itself: there is no second value to keep. It is
2 for row-major tensors, and one more for each permutation before that of the order. The elements behind the
first two are never read. Example: `length_of((0, 2, 3, 1))`, channels last, is 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, permutations

MOST = 64  # elements of a seed: 512 bytes, which is as little as torch's allocator for CUDA gives


def length_of(order: Sequence[int]) -> int | None:
    """The length of the seed; None where it would be too long."""
    orders = islice(permutations(range(len(order))), MOST - 1)
    return next((2 + k for k, found in enumerate(orders) if found == tuple(order)), None)


def order_of(rank: int, length: int) -> tuple[int, ...] | None:
    """The inverse of `length_of`, for tensors of `rank` dims; None for a number that is no length of a
    seed."""
    if not 2 <= length <= MOST:
        return None
    return next(islice(permutations(range(rank)), length - 2, None), None)
