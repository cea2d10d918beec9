"""Ops that tests define and drop, kept for torch's sake.

In: nothing. Out: no list of a module is taken for an op. Example:

    keep_ops()
"""

import sys


def keep_ops():
    """TorchScript knows ops by their ids in a table that does not keep them alive. Where a library of a test
    is dropped, or an op gets another overload, the next object at that address is scripted as that op.
    Does nothing where torch is not imported, or twice."""
    builtins = sys.modules.get("torch.jit._builtins")
    if builtins is None or hasattr(builtins._register_builtin, "kept"):
        return
    register, kept = builtins._register_builtin, []

    def register_and_keep(function, name):
        kept.append(function)
        register(function, name)

    register_and_keep.kept = kept
    builtins._register_builtin = register_and_keep
