"""Ops that tests drop stay alive (kit/torch_ops.py): TorchScript knows them by their ids."""

import gc
import weakref

import torch


def test_an_op_that_gets_another_overload_and_a_dropped_library_leave_no_free_id():
    with torch.library._scoped_library("tsfuser_test_kept", "FRAGMENT") as library:
        library.define("one(Tensor x) -> Tensor")
        first = weakref.ref(torch.ops.tsfuser_test_kept.one._op)
        library.define("one.other(Tensor x, int n) -> Tensor")
        second = weakref.ref(torch.ops.tsfuser_test_kept.one._op)
    gc.collect()
    assert first() is not None and second() is not None and first() is not second()
