"""Programs that look elements up in a tensor, against eager."""

import pytest
import torch

from kit.support import all_graphs, assert_matches, counted, fuse, groups, kinds, no_fallback, script

LOOKUPS = {f"aten::{name}" for name in "index_select gather embedding index take_along_dim one_hot".split()}

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.complex128]


def compare(text, *inputs, ops=40, fused=True):
    """The program of `x, i, y` against eager; all lookups of it are in groups, and its kernels find no index
    out of range: then eager's ops would run once more, and be right."""
    source = f"def f({', '.join('xiyz'[: len(inputs)])}):\n    return {text}\n"
    scripted, plain = script(source), script(source)
    with torch.jit.fuser("fuser0"):
        eager = plain(*inputs)
        exact = plain(*(t.double() if t.is_floating_point() else t for t in inputs))
    with no_fallback():
        fuse(scripted, *inputs)
        with counted() as rise:
            result = scripted(*inputs)
    assert_matches(result, eager, exact, ops=ops)
    if fused:
        assert rise["launches"] or not result.numel()
        assert LOOKUPS & {kind for group in groups(scripted) for kind in kinds(group)}
        assert not any(graph.findAllNodes(kind, True) for graph in all_graphs(scripted) for kind in LOOKUPS)
    return scripted


def indices(shape, below, device, dtype=torch.int64):
    return torch.randint(0, below, shape, device=device, dtype=dtype)


def failure(function, *inputs):
    """Type and text of a call's error, without the traceback of TorchScript."""
    with pytest.raises(Exception) as caught:
        function(*inputs)
    return type(caught.value), str(caught.value).strip().splitlines()[-1]
