"""What nvFuser fused: batch norm of mixed dtypes, division of integers, copies in single-node mode."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse, groups, kinds, script
from tsfuser.ops import table
from tsfuser.ops.trials import NodeArg

pytestmark = pytest.mark.usefixtures("single_nodes")

# ---- batch norm

ORDER = ("weight", "bias", "running_mean", "running_var")
MIXES = [
    (("float16",) * 2 + ("float32",) * 2, True),
    (("float32",) * 2 + ("float16",) * 2, False),
    (("float32",) * 4, True),
    (("float16",) * 4, True),
    (("float16", "float32", "float32", "float32"), False),
    (("float32", "float32", "float16", "float32"), False),
    (("float64",) * 4, False),
]


def refusal_of(device, dtypes, training):
    """Why a batch norm of half tensors with parameters and statistics in `dtypes` is not fused."""
    arguments = {"input": NodeArg("tensor", "float16", 4)}
    arguments |= {name: NodeArg("tensor", dtype, 1) for name, dtype in zip(ORDER, dtypes)}
    arguments |= {"training": NodeArg("number", "bool", None, training)}
    arguments |= {name: NodeArg("number", "float", None, 0.1) for name in ("momentum", "eps")}
    arguments["cudnn_enabled"] = NodeArg("number", "bool", None, True)
    return table.find("aten::batch_norm").refusal(arguments, device)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtypes, taken", MIXES, ids=str)
def test_dtypes_of_a_batch_norm_that_eager_takes_on_cuda(dtypes, taken, training):
    assert (refusal_of("cuda:0", dtypes, training) is None) == taken
    assert (refusal_of("cpu", dtypes, training) is None) == (taken and len(set(dtypes)) == 1)


NORM = """
def f(x, w, b, m, v, training: bool):
    return torch.relu(torch.batch_norm(x, w, b, m, v, training, 0.1, 1e-5, True))
"""


@pytest.mark.each_value
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtypes", [dtypes for dtypes, taken in MIXES if taken], ids=str)
def test_batch_norm_of_mixed_dtypes(device, dtypes, training):
    x = torch.randn(8, 6, 5, 5, device=device).half()
    made = [(torch.rand(6, device=device) + 0.5).to(getattr(torch, d)) for d in dtypes]
    scripted, plain = script(NORM), script(NORM)
    if device == "cpu" and len(set(dtypes)) > 1:
        with tsfuser.fuser(), pytest.raises(RuntimeError, match="Half|Float|dtype"):
            for _ in range(3):
                scripted(x, *made, training)
        return
    with tsfuser.fuser():
        for _ in range(3):
            own, eager = [t.clone() for t in made], [t.clone() for t in made]
            actual, expected = scripted(x, *own, training), plain(x, *eager, training)
    assert {kind for group in groups(scripted) for kind in kinds(group)} >= {"aten::batch_norm"}
    for a, e in zip((actual, *own), (expected, *eager)):
        assert_matches(a, e, ops=8, precision=torch.float16)


# ---- division of integers

DIVISIONS = {
    "remainder": "torch.remainder(x, y)",
    "fmod": "torch.fmod(x, y)",
    "floor_divide": "torch.floor_divide(x, y)",
    "trunc": 'torch.div(x, y, rounding_mode="trunc")',
    "floor": 'torch.div(x, y, rounding_mode="floor")',
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def integers(dtype, device):
    """Every pair of some dividends and divisors, the ends of the range among them; the last divisor is 0.
    Eager's division of the lowest number by -1 ends the process on the CPU."""
    info = torch.iinfo(dtype)
    dividends = [-7, -1, 0, 1, 7, info.min + 1, info.max] + [info.min] * (device != "cpu")
    divisors = [-3, -1, 1, 2, 3, info.max] + [info.min] * (info.min < 0)
    x, y = ([v for v in values if v >= info.min] for values in (dividends, divisors))
    x, y = (torch.tensor(values, dtype=dtype, device=device) for values in (x, y + [0]))
    return x[:, None].expand(len(x), len(y)).contiguous(), y.expand(len(x), len(y)).contiguous()


@pytest.mark.each_value
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_division_of_integers_by_a_tensor(device, dtype, division):
    """On the CPU a division by 0 raises, so that torch does it; on CUDA it gives what eager gives."""
    x, y = integers(dtype, device)
    source = f"def f(x, y):\n    return {DIVISIONS[division]} + 1\n"
    scripted, plain = script(source), script(source)
    with tsfuser.fuser():
        for _ in range(3):
            actual = scripted(x[:, :-1], y[:, :-1])
        assert torch.equal(actual, plain(x[:, :-1], y[:, :-1]))
        if device == "cpu":
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                scripted(x, y)
        else:
            assert any(k != "aten::add" for group in groups(scripted) for k in kinds(group))
            assert torch.equal(scripted(x, y), plain(x, y))


@pytest.mark.graphs
@pytest.mark.parametrize("division", DIVISIONS)
def test_division_of_integers_and_bools(device, division):
    """Bools are integers there; two of them cannot be divided."""
    x = torch.tensor([-7, 0, 5], device=device)
    truth = torch.ones(3, dtype=torch.bool, device=device)
    source = f"def f(x, y):\n    return {DIVISIONS[division]}\n"
    for pair in ((x, truth), (x.float(), truth), (truth, x.float() + 0.5)):
        scripted, plain = script(source), script(source)
        with tsfuser.fuser():
            for _ in range(3):
                actual = scripted(*pair)
        assert_matches(actual, plain(*pair))
        if device != "cpu" or pair[0].is_floating_point() or pair[1].is_floating_point():
            assert groups(scripted)
    with tsfuser.fuser(), pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
        for _ in range(3):
            script(source)(truth, truth)


@pytest.mark.parametrize("name", ["remainder", "fmod", "floor_divide"])
def test_a_known_divisor_of_0_is_left_to_torch(name):
    row = table.find(f"aten::{name}", "Scalar")
    for device in ("cpu", "cuda:0"):
        arguments = {"self": NodeArg("tensor", "int64", 1), "other": NodeArg("number", "int", None, 0)}
        assert "known to be 0" in row.refusal(arguments, device)


# ---- copies

COPIES = {
    "clone": "x.clone()",
    "_to_copy": "torch.ops.aten._to_copy(x)",
    "_to_copy to its dtype": "torch.ops.aten._to_copy(x, dtype=torch.float32)",
    "to with copy": "x.to(torch.float32, copy=True)",
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_alone_is_a_group_in_single_node_mode(device, copy):
    x = torch.randn(4, 5, device=device).t()
    scripted = script(f"def f(x):\n    return {COPIES[copy]}\n")
    fuse(scripted, x)
    actual = scripted(x)
    assert len(groups(scripted)) == 1
    assert torch.equal(actual, x) and actual.stride() == x.clone().stride()
    assert actual.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("cast", ["x.to(torch.float32)", "x.float()", "x.type_as(x)"])
def test_a_cast_to_the_dtype_that_a_tensor_has_gives_the_tensor(device, cast):
    x = torch.randn(4, 5, device=device)
    scripted = fuse(script(f"def f(x):\n    return {cast}\n"), x)
    assert scripted(x).data_ptr() == x.data_ptr()
    assert scripted(x.double()).dtype == (torch.float64 if "type_as" in cast else torch.float32)


# ---- nothing to normalise

EMPTY = {
    "group_norm": "torch.group_norm(x, 2)",
    "native_group_norm": "torch.native_group_norm(x, None, None, x.size(0), 4, 3, 2, 1e-5)[0]",
}


@pytest.mark.parametrize("norm", EMPTY)
def test_a_norm_of_an_empty_batch_makes_no_group(device, norm):
    scripted, x = script(f"def f(x):\n    return {EMPTY[norm]}\n"), torch.randn(0, 4, 3, device=device)
    before = dict(tsfuser.stats()["fallbacks"])
    fuse(scripted, x)
    assert scripted(x).shape == x.shape and not groups(scripted)
    assert tsfuser.stats()["fallbacks"] == before
    full = torch.randn(2, 4, 3, device=device)
    torch.testing.assert_close(scripted(full), torch.group_norm(full, 2))
