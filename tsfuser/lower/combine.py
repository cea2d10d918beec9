"""How the combinations of a reduction are spelled.

In: the `combine` word of a Reduce. Out: its `Combination`. A new one is one row here and its functor in runtime/reduce.h.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Combination:
    """`template` combines an accumulator with a value, `functor` (runtime/reduce.h) two accumulators; `identity` changes nothing."""

    template: str
    functor: str
    identity: float


COMBINATIONS = {"sum": Combination("({0} + {1})", "Sum", 0)}
