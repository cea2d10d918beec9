"""What compiled models save for their backward, in bytes, beside inductor's partition of the same model."""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from kit.compiled_models import MODELS
from tsfuser.frontends.dynamo.decompositions import decompositions
from tsfuser.frontends.dynamo.partition import partition

pytestmark = pytest.mark.graphs


OURS = partial(partition, recompute=True, layout=None)


def saved_bytes(model, x, partition_fn, table):
    """Of the memory that autograd saves, what is neither a parameter, an argument nor a result."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda module, inputs: module, partition_fn=partition_fn, decompositions=table
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            result = torch.compile(model, backend=backend, dynamic=False)(x)
    results = result if isinstance(result, tuple) else (result,)
    known = {t.untyped_storage().data_ptr() for t in (*results, x, *model.parameters(), *model.buffers())}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in found.items() if address not in known)


@pytest.mark.parametrize(
    "name, n",
    [
        ("mlp", 64),
        ("encoder", 64),
        ("gpt", 64),
        ("unet", 64),
        ("convnext", 64),
        ("residual", 64),
        ("llama", 8),
    ],
)
def test_no_more_is_saved_than_inductor_saves(name, n):
    """But for the statistics of norms, which inductor has in other shapes, of rows as short as these."""
    make, example = MODELS[name]
    torch.manual_seed(1)
    model, x = make(), example(n)
    inductors = saved_bytes(model, x, min_cut_rematerialization_partition, select_decomp_table())
    assert 0 < saved_bytes(model, x, OURS, decompositions()) <= 1.1 * inductors


def test_autograd_alone_saves_more():
    make, example = MODELS["unet"]
    model, x = make(), example(64)
    plain = partial(partition, recompute=False, layout=None)
    assert saved_bytes(model, x, plain, decompositions()) > 1.1 * saved_bytes(
        model, x, OURS, decompositions()
    )
