"""index_select and gather in groups: values, layouts and sizes."""

import pytest
import torch

from kit.lookups import DTYPES, compare, indices
from kit.support import (
    assert_matches,
    counted,
    fuse,
    no_fallback,
    script,
)

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
HOST = pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])


# ---- what is done with what was looked up

SELECTED = {
    "rows": "(x.index_select(0, i) * 2.0 + y).relu()",
    "a bias": "x.index_select(0, i) + y[0]",
    "softmax": "torch.softmax(x.index_select(0, i) * 0.5, 1)",
    "softmax over the indices": "torch.softmax(x.index_select(0, i) * 0.5, 0)",
    "layer norm": "torch.layer_norm(x.index_select(0, i) + y, [x.size(1)])",
    "sum over the indices": "(x.index_select(0, i) * 2.0).sum(0)",
    "sum over the rest": "(x.index_select(0, i) * 2.0).sum(1)",
    "sum of all": "(x.index_select(0, i) * y).sum()",
    "variance": "torch.var(x.index_select(0, i) * 2.0, 1, unbiased=False)",
    "a reduction and what it is of": "x.index_select(0, i) - x.index_select(0, i).mean(1, keepdim=True)",
    "neighbours": "(x.index_select(0, i) - x.index_select(0, (i - 1).clamp(min=0))).abs()",
    "computed indices": "x.index_select(0, x.size(0) - 1 - i).exp() * y",
    "looked up indices": "x.index_select(0, i.index_select(0, (i * 0).clamp(max=i.size(0) - 1))) + y",
    "a transposed reader": "(x.index_select(0, i) * 2.0).t() + y.t()",
    "another dim": "(x.index_select(0, i).unsqueeze(1) * y.unsqueeze(2)).relu()",
    "split dims": "(x.index_select(0, i) * 2.0).view(i.size(0), 1, -1).relu() + y.unsqueeze(1)",
    "split before anything else": "x.index_select(0, i).view(-1, 1, x.size(1)).relu() + y.unsqueeze(1)",
    "a mask": "torch.where(x.index_select(0, i) > 0, y, x.index_select(0, i) * 0.1)",
    "indices as values": "x.index_select(0, i) * i.unsqueeze(1)",
}
SIZES = [(5, 4, 8), (3, 7, 33), (1, 6, 5), (4, 1, 1), (19, 130, 257)]


def some(sizes, program, programs, target, request):
    """All of five sizes with --long, else the second one and, where kernels run natively, one of the others,
    with which programs take turns."""
    if request.config.getoption("--long") and target in NATIVE:
        return sizes
    others = [*sizes[:1], *sizes[2:]]
    turn = [others[list(programs).index(program) % len(others)]]
    return sizes[1:2] + (turn if target in NATIVE else [])


@pytest.mark.parametrize("program", SELECTED)
def test_index_select(device, target, program, request):
    for count, rows, columns in some(SIZES, program, SELECTED, target, request):
        if program == "looked up indices" and rows > count:
            rows = count
        x, y = torch.randn(rows, columns, device=device), torch.randn(count, columns, device=device)
        text, i = SELECTED[program], indices((count,), rows, device)
        if program == "another dim":
            y = torch.randn(count, 6, device=device)
        compare(text, x, i, y) if "y" in text else compare(text, x, i)


GATHERED = {
    "along rows": "(torch.gather(x, 0, i) * 2.0 + 1.0).relu()",
    "along columns": "(torch.gather(x, 1, i) * 2.0 + 1.0).relu()",
    "along the last dim": "x.gather(-1, i).exp() - 1.0",
    "softmax": "torch.softmax(x.gather(1, i) * 0.5, 1)",
    "softmax across": "torch.softmax(x.gather(0, i) * 0.5, 0)",
    "sum": "(x.gather(1, i) * 2.0).sum(1)",
    "sum across": "(x.gather(1, i) * 2.0).sum(0)",
    "sum of all": "(x.gather(0, i) * 2.0).sum()",
    "both dims": "x.gather(0, i) * x.gather(1, i)",
    "computed indices": "x.gather(1, (i + 1).clamp(max=x.size(1) - 1)).exp()",
    "one of each row": "-(torch.log_softmax(x, 1).gather(1, i[:, :1])).squeeze(1) * 2.0",
    "broadcast afterwards": "x.gather(1, i[:, :1]) * i",
}


@pytest.mark.parametrize("program", GATHERED)
def test_gather(device, target, program, request):
    sizes = [
        ((5, 6), (5, 6)),
        ((6, 6), (3, 4)),
        ((130, 65), (130, 33)),
        ((1, 1), (1, 1)),
        ((40, 1500), (7, 1400)),
    ]
    for size, wanted in some(sizes, program, GATHERED, target, request):
        wanted = (size[0], wanted[1]) if program == "one of each row" else wanted
        compare(GATHERED[program], torch.randn(size, device=device), indices(wanted, min(size), device))


def test_a_gathered_dim_may_be_longer_than_its_table(device):
    x = torch.randn(3, 5, device=device)
    compare("x.gather(0, i) * 2.0", x, indices((40, 5), 3, device))
    compare("x.gather(1, i[:, :, None].squeeze(2)) * 2.0", x, indices((2, 70), 5, device))


@pytest.mark.parametrize("rank", [1, 3, 5, 8])
def test_ranks(device, target, rank):
    sizes = [2, 3, 1, 4, 2, 1, 2, 3][:rank]
    x = torch.randn(sizes, device=device)
    for dim in range(-1, rank) if target in NATIVE else [rank // 2]:
        below = x.size(dim)
        compare(f"x.index_select({dim}, i) * 2.0 + 1.0", x, indices((3,), below, device))
        compare(f"x.index_select({dim}, i) * 2.0 + 1.0", x, indices((), below, device))
        compare(f"torch.gather(x, {dim}, i) * 2.0 + 1.0", x, indices(sizes, below, device))


# ---- dtypes and layouts


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("target", NATIVE)
def test_dtypes(device, dtype, index):
    x = torch.randn(6, 33, device=device).mul(4).to(dtype)
    more = (
        "x.index_select(0, i) | x.index_select(0, i)" if dtype == torch.bool else "x.index_select(0, i) * 2"
    )
    compare(more, x, indices((9,), 6, device, index))
    compare(more.replace("index_select(0, i)", "gather(1, i)"), x, indices((5, 30), 33, device, index))


def test_not_a_number_and_infinities_are_looked_up(device):
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), -float("inf")]], device=device)
    compare("x.index_select(0, i) * 2.0", x, indices((7,), 2, device))


def laid_out(sizes, layout, device, make):
    rows, columns = sizes
    if layout == "permuted":
        return make((columns, rows)).t()
    if layout == "expanded rows":
        return make((1, columns)).expand(rows, columns)
    if layout == "expanded columns":
        return make((rows, 1)).expand(rows, columns)
    if layout == "strided":
        return make((rows, 2 * columns + 1))[:, 1::2]
    return make((rows, columns + 3))[:, 3:] if layout == "misaligned" else make((rows, columns))


LAYOUTS = ["row-major", "permuted", "expanded rows", "expanded columns", "strided", "misaligned"]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("others", LAYOUTS)
@pytest.mark.parametrize("target", NATIVE)
def test_layouts(device, layout, others):
    for rows, columns in ((9, 16), (33, 130)):
        x = laid_out((rows, columns), layout, device, lambda size: torch.randn(size, device=device))
        i = laid_out((rows, columns), others, device, lambda size: indices(size, rows, device))
        for text in (
            "x.gather(0, i) * 2.0",
            "x.gather(1, i.clamp(max=x.size(1) - 1)).sum(1)",
            "torch.softmax(x.gather(0, i), 1)",
        ):
            compare(text, x, i)
        y = laid_out((rows, columns), others, device, lambda size: torch.randn(size, device=device))
        compare("x.index_select(0, i) * y", x, i[:, 0], y)
        compare("x.index_select(1, i.clamp(max=x.size(1) - 1)) * 2.0", x, i[0])
        compare("torch.softmax(x.index_select(0, i) + y, 1)", x, i[:, 0], y)


@pytest.mark.parametrize("layout", ["permuted", "misaligned"])
def test_layouts_in_the_shape_of_cuda(device, layout):
    x = laid_out((40, 36), layout, device, lambda size: torch.randn(size, device=device))
    compare("x.index_select(0, i) * y.t()", x, indices((50,), 40, device), torch.randn(36, 50, device=device))
    compare("(x.gather(0, i) * 2.0).sum(0)", x, indices((37, 35), 40, device).t().contiguous().t())


def test_channels_last_becomes_row_major_as_in_eager(device):
    x = torch.randn(2, 8, 5, 7, device=device).to(memory_format=torch.channels_last)
    compare("x.index_select(1, i).relu() * 2.0", x, indices((4,), 8, device))


# ---- sizes that change


@pytest.mark.graphs
def test_a_new_shape_compiles_nothing(device):
    text = "torch.softmax(x.index_select(0, i) * 0.5 + y, 1)"
    scripted = script(f"def f(x, i, y):\n    return {text}\n")

    def operands(rows, count, columns=48):
        return (
            torch.randn(rows, columns, device=device),
            indices((count,), rows, device),
            torch.randn(count, columns, device=device),
        )

    fuse(scripted, *operands(10, 9))
    scripted(*operands(6, 8))
    with no_fallback(), counted() as rise:
        for rows, count in ((11, 5), (3, 700), (500, 2), (64, 64)):
            x, i, y = operands(rows, count)
            assert_matches(scripted(x, i, y), torch.softmax(x[i] * 0.5 + y, 1), ops=20)
    assert rise["kernels_compiled"] == 0 and rise["launches"] == 4


@pytest.mark.graphs
def test_long_rows_and_many(device, target):
    sizes = [(3, 5, 40000), (4000, 50, 64)] if target in NATIVE else [(2, 3, 9000)]
    for count, rows, columns in sizes:
        x, i = torch.randn(rows, columns, device=device), indices((count,), rows, device)
        compare("torch.softmax(x.index_select(0, i), 1)", x, i)
        compare("torch.layer_norm(x.index_select(0, i), [x.size(1)])", x, i)
        compare("x.index_select(0, i).sum(0) * 2.0", x, i)


@HOST
def test_a_table_of_more_than_2_31_elements(device, target):
    """Of which only the beginning of each row is ever touched."""
    memory = torch.empty((3 << 30) + 8, dtype=torch.int8)
    x = memory.as_strided((4, 8), (1 << 30, 1))
    x.copy_(torch.arange(32).view(4, 8))
    i = torch.tensor([3, 2, 1, 0, 3])
    compare("x.index_select(0, i) + 1", x, i)
    compare("x.gather(0, i.unsqueeze(1).expand(5, 8)) + 1", x, i)


@pytest.mark.graphs
@pytest.mark.parametrize("text", ["x.index_select(0, i) * 2.0", "x.index_select(0, i).sum(0) * 2.0"])
def test_no_indices(device, text):
    compare(text, torch.randn(4, 5, device=device), indices((0,), 4, device))


@pytest.mark.graphs
def test_a_table_without_entries_and_no_indices(device):
    compare(
        "x.index_select(0, i) * 2.0",
        torch.randn(0, 5, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


@pytest.mark.graphs
def test_guards_off(device):
    """A group serves other index dtypes, ranks of which it knows, and sizes of 1."""
    scripted = script("def f(x, i):\n    return x.index_select(0, i) * 2.0 + 1.0\n")
    x = torch.randn(5, 8, device=device)
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    try:
        fuse(scripted, x, indices((4,), 5, device))
        with no_fallback():
            for table, i in (
                (x, indices((4,), 5, device, torch.int32)), (x[:1], indices((3,), 1, device)),
                (x.half(), indices((1,), 5, device)), (x, indices((), 5, device)),
                (x.t(), indices((2,), 8, device)),
            ):  # fmt: skip
                assert_matches(scripted(table, i), table.index_select(0, i) * 2.0 + 1.0, ops=2)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)
