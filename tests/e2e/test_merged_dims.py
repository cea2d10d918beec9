"""Reshapes that merge dims of computed values: in a group, the merged dim is walked by the loops of its
parts."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.support import assert_matches, counted, fuse, groups, kinds, no_fallback, script, train

pytestmark = pytest.mark.graphs

#: The targets of the larger sweeps: a kernel for fibers is compiled for five GPUs as well: a second each.
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

#: Programs over x [4, 6, 10], a bias y [60] and a residual z [4, 60] that are one kernel.
ONE_KERNEL = {
    "flatten": "(x * 2.0).flatten(1).relu()",
    "flatten all": "(x * 2.0).flatten().relu()",
    "bias": "(x * 2.0).flatten(1) + y",
    "residual": "(x * y.view(6, 10) + 1.0).reshape(4, 60) + z",
    "what is broadcast": "(x * 2.0).flatten(1) * z[:, :1] + 1.0",
    "transposed": "(x.transpose(1, 2) * 2.0).reshape(4, 60) + z",
    "heads": "(x * 2.0 + 1.0).permute(2, 0, 1).reshape(10, -1) * y[:24]",
    "view": "torch.sigmoid(x).view(-1, 10) + y[:10]",
    "view_as": "(z * 2.0).view_as(x).relu() + x",
    "merge and split": "(x * 2.0).flatten(1).view(4, 12, 5).relu()",
    "there and back": "((x * 2.0).flatten(1) + z).view(4, 6, 10) * x",
    "to halves and back": "((x * 2.0).view(8, 30) + 1.0).view(4, 60) + z",
    "softmax": "torch.softmax((x * 2.0).flatten(1), 1) * z",
    "layer norm": "F.layer_norm((x * 2.0).flatten(1), [60], y, y)",
    "sum": "(x * 2.0).flatten(1).sum(1)",
    "group norm": "F.group_norm((x * 2.0).view(2, 12, 10), 4).view(4, 6, 10) * x",
    "channels of a group": "F.group_norm(x * 2.0, 3).flatten(1) * z",
    "two of them": "(x * 2.0).flatten(1) + (x + 1.0).view(4, 60) * (z * y)",
    "of an input that is permuted": "x.permute(2, 1, 0).reshape(-1).exp() * 2.0",
    "of one after another": "x.permute(2, 1, 0).reshape(-1).view(20, 12).reshape(60, 4).exp() + z.t()",
    "of an expanded input": "(x[:, :1].expand(4, 6, 10).reshape(4, 60) * 2.0).relu() + z",
    "a comparison": "((x > 0.0).flatten(1) & (z > 0.0)) * 1.0",
}
#: The same that need several kernels: what follows a reduction of columns, or no loops can walk both ways.
SEVERAL = {
    "variance": "(x * 2.0).flatten(0, 1).var(0)",
    "sum of the rest": "(x * 2.0).flatten(1).sum(0) * y",
    "a reduction after another": "torch.softmax(x * 2.0, -1).flatten(1).sum(1)",
    "no nesting": "(x * 2.0).view(4, 5, 12).relu()",
    "no nesting, twice": "torch.softmax((x * 2.0).view(5, 48), 1).view(12, 20).sum(1) * 2.0",
    "no nesting, of sums": "(x.sum(0).view(4, 15) * 2.0).relu().sum(1) + x.sum()",
    "rows and columns": "(x * 2.0).flatten(1).relu() + (x * 3.0).transpose(1, 2).reshape(4, 60)",
    "norms of rows and columns": "torch.softmax(x, 1).flatten(1) * torch.softmax(x.transpose(1, 2), "
    "1).reshape(4, 60)",
    "beside a part": "(x * 2.0).flatten(1).relu().unsqueeze(1) * x.sum(1).unsqueeze(2)",
    "itself without nesting": "((x * 2.0).flatten() + 1.0).view(16, 15) * (x * 2.0).view(16, 15) + "
    "(z.reshape(15, 16) * 2.0).t()",
}
PROGRAMS = {**ONE_KERNEL, **SEVERAL}


def scripted_pair(text):
    text = text.replace("F.", "torch.nn.functional.")
    return (script(f"def f(x, y, z):\n    return {text}\n") for _ in range(2))


def compare(name, x, y, z):
    """The program against eager, all of it in one group that runs fused."""
    scripted, plain = scripted_pair(PROGRAMS[name])
    with torch.jit.fuser("fuser0"):
        eager = plain(x, y, z)
        exact = plain(x, y, z) if x.is_complex() else plain(x.double(), y.double(), z.double())
    with no_fallback():
        fuse(scripted, x, y, z)
        with counted() as rise:
            result = scripted(x, y, z)
    assert_matches(result, eager, exact, ops=60)
    return scripted, rise["launches"]


def operands(device, sizes=(4, 6, 10), dtype=torch.float32):
    n, h, d = sizes
    return [torch.randn(s, device=device).to(dtype) for s in ((n, h, d), (h * d,), (n, h * d))]


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_merged_dims_are_part_of_one_kernel(device, name):
    scripted, launches = compare(name, *operands(device))
    [group] = groups(scripted)
    assert {"aten::view", "aten::reshape", "aten::flatten", "aten::view_as"} & set(kinds(group))
    assert launches == 1


@pytest.mark.parametrize("name", SEVERAL)
def test_what_one_kernel_cannot_do_is_one_group_all_the_same(device, name):
    scripted, launches = compare(name, *operands(device))
    assert len(groups(scripted)) == 1 and launches > 1


LAYOUTS = {
    "permuted": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "inner dims exchanged": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
    "rows apart": lambda x: torch.cat([x, x], 2)[:, :, : x.size(2)],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.each_value
@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_tensors_in_other_layouts(device, name, layout):
    x, y, z = operands(device)
    # eager refuses to view what is not dense
    if not any(view in PROGRAMS[name] for view in (".view(", "view_as")):
        compare(name, LAYOUTS[layout](x), y, z)
    compare(name, x, y[:1].expand(60), z.t().contiguous().t())


@pytest.mark.each_value
@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["residual", "softmax", "no nesting", "norms of rows and columns", "layer norm"]
)
def test_other_dtypes(device, name, dtype):
    compare(name, *operands(device, dtype=dtype))


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.complex64], ids=str)
def test_values_that_are_not_floating(device, dtype):
    x, y, z = (torch.randint(0, 2, v.shape, device=device).to(dtype) for v in operands(device))
    for text in (
        "(x * y.view(6, 10)).flatten(1) == z",
        "(x * y.view(6, 10)).reshape(5, 48) != z.view(5, 48)",
    ):
        scripted, plain = scripted_pair(text)
        with no_fallback():
            assert torch.equal(fuse(scripted, x, y, z)(x, y, z), plain(x, y, z))
        assert len(groups(scripted)) == 1


# ---- sizes that change


def any_size(text):
    """The program for an `x` of other sizes."""
    return text.replace("4, 60", "x.size(0), x.size(1) * x.size(2)").replace(
        "4, 6, 10", "x.size(0), x.size(1), x.size(2)"
    )


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize(
    "name", ["flatten", "flatten all", "bias", "what is broadcast", "softmax", "sum", "transposed"]
)
def test_other_sizes_than_were_profiled(device, name):
    scripted, plain = scripted_pair(any_size(PROGRAMS[name]))
    fuse(scripted, *operands(device))
    for sizes in (
        (4, 6, 1),
        (4, 1, 10),
        (1, 6, 10),
        (1, 1, 1),
        (3, 5, 7),
        (0, 6, 10),
        (4, 0, 10),
        (4, 6, 10),
    ):
        x, y, z = operands(device, sizes)
        with tsfuser.fuser(), torch.no_grad():
            result = scripted(x, y, z)
        assert_matches(result, plain(x, y, z), plain(x.double(), y.double(), z.double()), ops=60)


@pytest.mark.parametrize("target", [*NATIVE, "cpu-fibers"])
# Classes of rows that registers keep, and of dims below 128 that tiles cut, are narrower.
@pytest.mark.parametrize("name", ["bias", "transposed", "there and back", "rows and columns"])
def test_a_new_shape_of_a_known_class_compiles_nothing(device, name):
    scripted, plain = scripted_pair(any_size(PROGRAMS[name]))
    with no_fallback():
        fuse(scripted, *operands(device, (8, 48, 64)))
        with counted() as rise:
            for sizes in ((16, 48, 64), (8, 64, 112), (8, 48, 128), (24, 112, 128)):
                x, y, z = operands(device, sizes)
                assert_matches(
                    scripted(x, y, z), plain(x, y, z), plain(x.double(), y.double(), z.double()), ops=60
                )
    assert rise["kernels_compiled"] == rise["plans_built"] == 0 and rise["class_hits"] == 4


SIZED = [
    "v = (x * 2.0).flatten(1)\n    return v.relu() * v.size(1)",
    "v = (x * 2.0).reshape(x.size(0), -1)\n    return v.sum(1) / v.size(1)",
    "v = (x * 2.0).view(-1, x.size(2)).relu()\n    return (v + 1.0).view(x.size(0), -1).exp() * v.size(0)",
]


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("body", SIZED)
def test_a_merged_value_is_not_stored_for_its_sizes(device, body):
    scripted, plain = (script(f"def f(x):\n    {body}\n") for _ in range(2))
    with no_fallback():
        fuse(scripted, torch.randn(4, 6, 10, device=device))
        for sizes in ((4, 6, 10), (3, 5, 7), (1, 6, 10), (4, 6, 1)):
            x = torch.randn(sizes, device=device)
            assert_matches(scripted(x), plain(x), plain(x.double()), ops=20)
    [group] = groups(scripted)
    assert group.outputsSize() == 1


def test_splits_that_nest_in_one_call_and_not_in_the_next(device):
    scripted, plain = (
        script("def f(x, n: int):\n    return (x * 2.0).view(n, -1).relu() + 1.0\n") for _ in range(2)
    )
    with no_fallback():
        fuse(scripted, torch.randn(4, 6, 10, device=device), 8)
        for n in (8, 4, 2, 24, 5, 16, 240, 1, 48, 80):
            x = torch.randn(4, 6, 10, device=device)
            assert_matches(scripted(x, n), plain(x, n), ops=4)


# ---- eager's views, copies and errors


def test_a_view_that_eager_refuses_raises_its_error(device):
    scripted = script("def f(x):\n    return (x * 2.0).view(x.size(0), -1).relu()\n")
    fuse(scripted, torch.randn(2, 3, 4, 5, device=device))
    x = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    with tsfuser.fuser(), pytest.raises(RuntimeError, match="view size is not compatible"):
        scripted(x)
    with tsfuser.fuser(), pytest.raises(RuntimeError, match="invalid for input of size"):
        script("def f(x):\n    return (x * 2.0).view(7, -1).relu()\n")(x)


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize(
    "text",
    ["(x * 2.0).flatten(2).relu()", "(x * 2.0).reshape(2, 12, 5) + 1.0", "(x * 2.0).flatten(0, 1).relu()"],
)
def test_strides_are_those_of_eagers_view_or_copy(device, text):
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=layout)
        scripted, plain = (script(f"def f(x):\n    return {text}\n") for _ in range(2))
        with no_fallback():
            assert_matches(fuse(scripted, x)(x), plain(x), ops=4)
        assert len(groups(scripted)) == 1


def test_a_write_after_a_copy_does_not_reach_it(device):
    body = "v = x.t().reshape(-1)\n    x.add_(1.0)\n    return (v * 2.0).relu() + x.flatten()"
    fused, plain = (script(f"def f(x):\n    {body}\n") for _ in range(2))
    x = torch.randn(4, 4, device=device)
    fuse(fused, x.clone())
    assert_matches(fused(x.clone()), plain(x.clone()), ops=4)


def test_a_merged_dropout_is_one_mask(device):
    def program(x):
        y = F.dropout(x, 0.5, True)
        return y, y.flatten(1) * 2.0, (y * 3.0).view(5, 48) + 1.0, (y + 1.0).view(2, 2, 3, 2, 10) * 2.0

    x = torch.rand(4, 6, 10, device=device) + 1.0
    with no_fallback():
        y, merged, stored, split = fuse(program, x)(x)
    assert 0 < int((y == 0).sum()) < y.numel()
    assert torch.equal(merged, y.flatten(1) * 2.0)
    assert_matches(split, (y + 1.0).view(2, 2, 3, 2, 10) * 2.0, ops=2)
    assert_matches(stored, (y * 3.0).view(5, 48) + 1.0, ops=2)


# ---- gradients

TRAINED = [
    "((x * y.view(6, 10)).reshape(4, 60) * z).sigmoid()",
    "((x * 2.0).flatten(1) * y + z).tanh() * z",
    "torch.softmax((x * 2.0).transpose(1, 2).reshape(4, 60) * y, 1) * z",
    "((z * y).unflatten(1, [6, 10]) * x).sigmoid() * 2.0",
]


@pytest.mark.parametrize("text", TRAINED)
def test_gradients_through_merged_dims(device, text):
    scripted, plain = scripted_pair(text)
    inputs = [x.requires_grad_() for x in operands(device)]
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs, calls=5)
    with torch.jit.fuser("fuser0"):
        expected, wanted = train(plain, inputs, calls=1)
    assert_matches(out, expected, ops=60)
    for mine, eager in zip(gradients, wanted):
        assert_matches(mine, eager, ops=60, strides=False)


def test_a_gradient_written_by_hand(device):
    """The backward of an unflatten merges dims of a computed gradient, that of a flatten splits one."""

    def program(g, x, w):
        inner = torch.ops.aten.gelu_backward(g, x)
        return inner.flatten(1) * w, (inner.flatten(1) * w).sum(0), (inner * 2.0).sum([0, 2])

    g, x = (torch.randn(4, 6, 10, device=device) for _ in range(2))
    w = torch.randn(60, device=device)
    with no_fallback():
        scripted = fuse(program, g, x, w)
        results = scripted(g, x, w)
    assert len(groups(scripted)) == 1
    for mine, eager, exact in zip(results, program(g, x, w), program(g.double(), x.double(), w.double())):
        assert_matches(mine, eager, exact, ops=60)


#: y of z [4, 60] and w [60] is a result itself, and is read in other dims -> the results, the kernels.
STORED = {
    "elementwise": ("y, torch.tanh(y.view(4, 6, 10) * x).view(4, 60)", 1),
    "with a sum": ("y, y.view(4, 6, 10) + x.sum()", 2),
    "a first part": ("y, y.view(2, 2, 60).exp()", 1),
    "rows of parts": ("y, torch.softmax(y.view(4, 6, 10), 2)", 1),
    "sums of parts": ("y, y.view(4, 6, 10).sum(2) * 2.0", 1),
    "in two ways": ("y, y.view(4, 6, 10).exp(), y.view(4, 2, 30) * 3.0", 1),
    "in two ways that do not nest": ("y, y.view(4, 6, 10).exp(), y.view(4, 4, 15) * 3.0", 2),
    "against itself": ("y, y.view(4, 6, 10) * y.t().reshape(10, 24)[:4, :1].unsqueeze(2)", None),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_and_read_in_other_dims_is_computed_once(device, name, dtype):
    results, kernels = STORED[name]
    source = f"""def f(x: Tensor, w: Tensor, z: Tensor):
    y = z * 2.0 + w
    return {results}
"""
    scripted, plain = script(source), script(source)
    inputs = [v.to(dtype) for v in operands(device)]
    with torch.jit.fuser("fuser0"):
        eager, exact = plain(*inputs), plain(*map(torch.Tensor.double, inputs))
    with no_fallback():
        fuse(scripted, *inputs)
        with counted() as rise:
            found = scripted(*inputs)
    for mine, its, best in zip(found, eager, exact):
        assert_matches(mine, its, best, ops=60)
    assert kernels in (None, rise["launches"])
