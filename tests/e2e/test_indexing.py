"""`x[i, j]`, embeddings and take_along_dim in groups: values, layouts, sizes, and indices out of range."""

import pytest
import torch

import tsfuser
from kit.lookups import DTYPES, LOOKUPS, compare, failure, indices
from kit.support import assert_matches, counted, fuse, groups, kinds, no_fallback, script
from tsfuser.graph.rows import Knowledge
from tsfuser.grouping.support import examine

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
HOST = pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])

# x[4, 5, 6], two tensors of places below 4 that are [3]
INDEXED = {
    "the first": "x[i] * 2.0 + 1.0",
    "the second": "x[:, i] * 2.0 + 1.0",
    "the last": "x[:, :, i] * 2.0 + 1.0",
    "two": "x[i, y] * 2.0 + 1.0",
    "the last two": "x[:, i, y] * 2.0 + 1.0",
    "two apart": "x[i, :, y] * 2.0 + 1.0",
    "all": "x[i, y, i] * 2.0 + 1.0",
    "a grid": "x[i.unsqueeze(1), y] * 2.0 + 1.0",
    "a grid of one": "x[i.unsqueeze(1), i] * 2.0 + 1.0",
    "a matrix": "x[torch.stack((i, y))] * 2.0 + 1.0",
    "a matrix inside": "x[:, torch.stack((i, y))] * 2.0 + 1.0",
    "broadcast": "x[i[:1], y] * 2.0 + 1.0",
    "without dims": "x[i[0], y] * 2.0 + 1.0",
    "negative": "x[i - 4, y - 2] * 2.0 + 1.0",
    "a new dim": "x[None, i] * 2.0 + 1.0",
    "a slice": "x[1:, i] * 2.0 + 1.0",
    "repeated": "x[i * 0, y * 0 + 3] * 2.0 + 1.0",
    "twice": "x[i] * x[y] + x[i]",
    "looked up places": "x[i[y - 4] - 1] * 2.0 + 1.0",
    "summed": "(x[i] * 2.0).sum(0)",
    "summed over the rest": "(x[:, i] * 2.0).sum(-1)",
    "softmax": "torch.softmax(x[i, y] * 0.5, -1)",
    "a table's sum as a place": "x[(x.sum([1, 2]) * 0.0).long()] * 2.0",
    "one hot": "x[:3, :4, 0] * torch.nn.functional.one_hot(i, 4) + 1.0",
    "taken along": "torch.take_along_dim(x, i.view(3, 1, 1), 0) * 2.0 + 1.0",
    "taken along the last": "torch.take_along_dim(x, i.view(1, 1, 3), -1) * 2.0 + 1.0",
    "taken along, wrapped": "torch.take_along_dim(x, i.view(1, 3, 1) * 9 - 17, 1) * 2.0 + 1.0",
}


@pytest.mark.parametrize("program", INDEXED)
def test_x_of_indices(device, target, program):
    text, x = INDEXED[program], torch.randn(4, 5, 6, device=device)
    i, y = indices((3,), 4, device), indices((3,), 4, device)
    if program == "looked up places":
        y = 1 + indices((3,), 3, device)  # minus 4: from -3 to -1
    compare(text, x, i, y) if "y" in text else compare(text, x, i)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("target", NATIVE)
def test_dtypes(device, dtype, index):
    x = torch.randn(6, 33, device=device).mul(4).to(dtype)
    i, y = indices((9,), 6, device, index), indices((9,), 33, device, index)
    op = "x[i, y - 33] | x[i - 6, y]" if dtype == torch.bool else "x[i, y - 33] * 2"
    compare(op, x, i, y)
    if dtype != torch.bool:
        compare("torch.embedding(x, i) * 2", x, i)


def laid_out(sizes, layout, device):
    rows, columns, depth = sizes
    if layout == "permuted":
        return torch.randn(depth, rows, columns, device=device).permute(1, 2, 0)
    if layout == "turned":
        return torch.randn(depth, columns, rows, device=device).permute(2, 1, 0)
    if layout == "expanded":
        return torch.randn(rows, 1, depth, device=device).expand(rows, columns, depth)
    if layout == "strided":
        return torch.randn(rows, columns, 2 * depth + 1, device=device)[:, :, 1::2]
    if layout == "misaligned":
        return torch.randn(rows, columns, depth + 3, device=device)[:, :, 3:]
    return torch.randn(rows, columns, depth, device=device)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["row-major", "permuted", "turned", "expanded", "strided", "misaligned"])
@pytest.mark.parametrize("text", ["x[i]", "x[:, i]", "x[:, :, i]", "x[i, y]", "x[:, i, y]", "x[i, :, y]"])
@pytest.mark.parametrize("places", ["dense", "turned", "expanded"])
def test_layouts(device, target, layout, text, places):
    """The strides of a result are eager's, too."""
    x = laid_out((7, 9, 16), layout, device)
    i, y = indices((5, 4), 7, device), indices((5, 4), 7, device)
    if places == "turned":
        i, y = i.t(), y.t()
    if places == "expanded":
        i = i[:1].expand(5, 4)
    text = f"{text}.exp().relu()"
    compare(text, x, i, y) if "y" in text.partition(".")[0] else compare(text, x, i)


@pytest.mark.graphs
def test_sizes_of_0_and_1(device):
    x = torch.randn(4, 1, 6, device=device)
    one, none = indices((1,), 4, device), indices((0,), 4, device)
    compare("x[i] * 2.0 + 1.0", x, one)
    compare("x[:, i * 0] * 2.0 + 1.0", x, one)
    compare("x[:, i * 0 - 1] * 2.0 + 1.0", x, one)
    compare("x[i] * 2.0 + 1.0", x, none)
    compare("torch.embedding(x.view(4, 6), i) * 2.0 + 1.0", x, none)
    compare("torch.embedding(x.view(4, 6), i) * 2.0 + 1.0", x, indices((), 4, device))
    compare("x[i, y] * 2.0 + 1.0", x, none, none)
    compare("x[i] * 2.0 + 1.0", torch.randn(0, 3, device=device), none)


@pytest.mark.graphs
def test_a_new_shape_compiles_nothing(device):
    scripted = script("def f(x, i, y):\n    return x[i, y] * 2.0 + 1.0\n")

    def operands(rows, count, columns):
        return (
            torch.randn(rows, columns, 48, device=device),
            indices((count,), rows, device) - rows,
            indices((count,), columns, device),
        )

    fuse(scripted, *operands(10, 9, 4))
    scripted(*operands(6, 8, 5))
    with no_fallback(), counted() as rise:
        for rows, count, columns in ((11, 5, 2), (3, 70, 9), (50, 2, 3)):
            x, i, y = operands(rows, count, columns)
            assert torch.equal(scripted(x, i, y), x[i, y] * 2.0 + 1.0)
    assert rise["kernels_compiled"] == 0 and rise["launches"] == 3


# ---- indices out of range; on the host only: CUDA's context does not survive one

WRONG = {
    "x[i] * 2.0 + 1.0": (5, -6),
    "x[:, i] * 2.0 + 1.0": (7, -8, 1 << 40, -(1 << 62)),
    "x[i, i] * 2.0 + 1.0": (5, 6, -6, -7),
    "x[i * 0, i] * 2.0 + 1.0": (7, -8),
    "x[i, :, i * 0].sum(0)": (5, -6),
    "torch.embedding(x[0], i).exp() + 1.0": (7, -1, -7),
    "torch.softmax(torch.embedding(x[:, 0], i), 1)": (5, -1),
    "torch.nn.functional.one_hot(i, 6) * x[0, 0]": (6, -1, 1 << 40),
}


@HOST
@pytest.mark.parametrize("text", WRONG)
def test_an_index_out_of_range_raises_what_eager_raises(device, target, text):
    source = f"def f(x, i):\n    return {text}\n"
    scripted, plain = script(source), script(source)
    x, good = torch.randn(5, 7, 6, device=device), indices((9,), 5, device)
    with torch.jit.fuser("fuser0"):
        plain(x, good)
    with no_fallback():
        fuse(scripted, x, good)
        assert LOOKUPS & {kind for group in groups(scripted) for kind in kinds(group)}
        for wrong in WRONG[text]:
            for place in (0, 4, 8):
                bad = good.clone()
                bad[place] = wrong
                with torch.jit.fuser("fuser0"):
                    expected = failure(plain, x, bad)
                assert failure(scripted, x, bad) == expected
        assert scripted(x, good).shape == plain(x, good).shape


@pytest.mark.graphs
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_a_mask_is_left_to_torch(device, dtype):
    scripted = script("def f(x, i):\n    return (x[i] * 2.0).relu()\n")
    x, i = torch.randn(5, 7, device=device), torch.tensor([0, 1, 1, 0, 1], device=device).to(dtype)
    fuse(scripted, x, i)
    assert [kinds(group) for group in groups(scripted)] == [["aten::mul", "aten::relu"]]
    reason = "the size of a selection by a mask depends on the mask's elements"
    assert reason in str(tsfuser.explain(scripted, x, i))


DEVICES = """
graph(%x : Float(4, 5, strides=[5, 1], requires_grad=0, device=cuda:0),
      %i : Long(requires_grad=0, device={}),
      %j : Long(3, strides=[1], requires_grad=0, device=cuda:0)):
  %l : Tensor?[] = prim::ListConstruct(%i, %j)
  %y : Float(3, strides=[1], requires_grad=0, device=cuda:0) = aten::index(%x, %l)
  return (%y)
"""


@pytest.mark.parametrize("where, reason", [("cpu", "its `indices` is on another device"), ("cuda:0", None)])
def test_an_index_on_another_device_is_left_to_torch(where, reason):
    """A number on the CPU would travel as an argument of the kernel, and only be found wrong there."""
    graph = torch._C.parse_ir(DEVICES.format(where))
    [node] = graph.findAllNodes("aten::index")
    assert examine(node, Knowledge()).reason == reason


@pytest.mark.graphs
@pytest.mark.parametrize(
    "text", ["torch.batch_norm(x[i] * 2.0, {})", "torch.batch_norm(x * 2.0, {})[:3] + x[i]"]
)
def test_statistics_are_changed_in_another_group(device, text):
    """An index out of range raises before or after they change, as in eager."""
    text = text.format("None, None, m, v, True, 0.1, 1e-5, False")
    source = f"def f(x, i, m, v):\n    return {text}.relu() + 1.0\n"
    scripted, plain = script(source), script(source)
    x, i = torch.randn(30, 40, device=device), indices((3,), 30, device)
    own, eagers = ([torch.zeros(40, device=device), torch.ones(40, device=device)] for _ in range(2))
    with no_fallback():
        fuse(scripted, x, i, *own, calls=4)
        found = scripted(x, i, *own)
    with torch.jit.fuser("fuser0"):
        for _ in range(5):
            expected = plain(x, i, *eagers)
    for mine, eager in zip((found, *own), (expected, *eagers)):
        assert_matches(mine, eager, ops=60)
    together = [kinds(group) for group in groups(scripted)]
    assert not any({"aten::index", "aten::batch_norm"} <= set(found) for found in together)
    assert {"aten::index", "aten::batch_norm"} <= {kind for found in together for kind in found}
