"""The callable of a region.

In: symbols, and the proxies that go in and out. Out: a function that thunder calls with tensors and numbers.
Its program is made at the first call: thunder makes the callable of one region about three times, and calls
the last. thunder's prologue has tested dtypes and devices, not strides, and under symbolic values not sizes:
each set of sizes, strides and numbers has a program of its own, up to a limit, behind which the region runs
unfused. The kernels of the first program may have sizes as numbers; those of later ones serve all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol

from ... import log
from ...planning import failures
from ..dynamo.program import compile_graph
from ..dynamo.settings import Settings
from .narrow import narrow
from .retrace import function_of, graph_of, say_sizes
from .roundings import Roundings

#: Programs of one region. They share plans and kernels, but each is traced.
MOST_PROGRAMS = 16


class RegionCall:
    """What `tsfuser0` stands for in a trace."""

    def __init__(
        self,
        name: str,
        symbols: Sequence[BoundSymbol],
        inputs: Sequence[Proxy],
        outputs: Sequence[Proxy],
        roundings: Roundings,
    ):
        self.name = name
        self._symbols, self._ends, self._roundings = tuple(symbols), (inputs, outputs), roundings
        self._programs: dict[tuple, Callable[[list], Any]] = {}

    @cached_property
    def unfused(self) -> Callable[..., Any]:
        """What thunder's torch executor does."""
        return function_of(self._symbols, *self._ends)

    def __call__(self, *operands: Any) -> Any:
        # `repr`, as 0.0 and -0.0, and 1 and True, are equal
        key = tuple([(x.shape, x.stride()) if isinstance(x, torch.Tensor) else repr(x) for x in operands])
        program = self._programs.get(key)
        if program is None:
            program = self._make(key, operands)
        return program(list(operands))

    def _make(self, key: tuple, operands: Sequence[Any]) -> Callable[[list], Any]:
        """The program for such operands; what runs the region unfused, where there is none."""
        if len(self._programs) >= MOST_PROGRAMS:
            log.write("partition", f"{self.name} runs unfused", f"it has {MOST_PROGRAMS} programs already")
            return self._run_unfused
        try:
            function = function_of(self._roundings.put_in(self._symbols), *self._ends)
            module = graph_of(function, operands)
            narrow(module)
            if self._programs:  # the sizes vary
                say_sizes(module)
            program = compile_graph(module, Settings())
        except Exception as error:  # a mistake of ours must not break the user's program
            failures.gave_up(f"thunder region {self.name}", error, "")
            program = self._run_unfused
        self._programs[key] = program
        return program

    def _run_unfused(self, operands: list) -> Any:
        return self.unfused(*operands)
