"""`thunder.jit(model, executors=["tsfuser", ...])`: traces of lightning-thunder in, regions of them fused.

Importing this registers the executor under the name "tsfuser". lightning-thunder is the extra
`tsfuser[thunder]`; without it the import raises ImportError.

executor.py  what thunder asks: which symbols are claimed, and which of them make a region
claims.py    whether a symbol is claimed: whether all that torch does for it has rows in the op table
compared.py  values that no region computes again
dropout.py   dropout and its gradient as symbols that regions take
roundings.py where the 16-bit values of a trace are rounded
narrow.py    16-bit ops that thunder has taken apart, put together again
retrace.py   symbols as a function of torch, and that function as an FX graph of ATen ops
region.py    the callable of a region, whose programs are made when calls come
"""

from thunder.extend import register_executor

from .executor import TsfuserExecutor

__all__ = ["TsfuserExecutor", "executor"]

executor = register_executor(TsfuserExecutor())
