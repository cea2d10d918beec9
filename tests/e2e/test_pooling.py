"""Max and average pooling in groups, with what is around it: windows, paddings, formats, gradients."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.testing import assert_close

import tsfuser
from kit.support import assert_matches, fresh, fuse, train
from tsfuser.frontends.dynamo.joint_graph import partition, pool_offsets
from tsfuser.graph import worth
from tsfuser.ops import pooling
from tsfuser.schedule.machine import Machine

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error", "gathered")]


_gathers_well = pool_offsets.gathers_well


@pytest.fixture
def gathered(monkeypatch):
    """Groups make gradients of max pooling on CPUs also where torch's are faster."""
    monkeypatch.setattr(pool_offsets, "gathers_well", lambda *given: True)


#: Size, step, padding, dilation, whether the last window may end behind the tensor.
WINDOWS = {
    "pairs": (2, 2, 0, 1, False),
    "a network's first": (3, 2, 1, 1, False),
    "neighbours": (3, 1, 1, 1, False),
    "rounded up": (3, 2, 0, 1, True),
    "rounded up and padded": (3, 2, 1, 1, True),
    "two dims differ": ((2, 3), (3, 2), (1, 0), 1, True),
    "dilated": (2, 1, 0, 2, False),
    "few of many": (2, 3, 0, 1, False),
    "large": (5, 3, 2, 1, True),
    "one element": (1, 1, 0, 1, False),
}
FORMATS = {"rows": torch.contiguous_format, "channels last": torch.channels_last}


def images(device, dtype=torch.float32, sizes=(2, 3, 7, 9), form="rows"):
    x = torch.randn(sizes, dtype=dtype, device=device)
    return x.to(memory_format=FORMATS[form]) if x.dim() == 4 else x


def pooled(kind, windows):
    size, step, padding, dilation, up = WINDOWS[windows]
    if kind == "max":
        return lambda x: F.max_pool2d(x, size, step, padding, dilation, up)
    if dilation > 1:
        pytest.skip("averages have no dilation")
    return lambda x: F.avg_pool2d(x, size, step, padding, up, count_include_pad=kind == "avg")


@pytest.mark.each_value(("kind", "windows"))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", ["max", "avg", "avg without padding"])
def test_one_kernel_forward_and_one_or_two_backward(device, kind, windows, dtype, form):
    pool = pooled(kind, windows)

    def program(x):
        return pool(x * 2.0).sin()

    x = images(device, dtype, form=form).requires_grad_()
    compiled = torch.compile(program, backend="tsfuser", dynamic=False)
    out, grad, launches = counted_step(compiled, x)
    expected, wanted, _ = eager_step(program, x)
    reference, exact, _ = eager_step(program, x.detach().double().requires_grad_())
    assert_matches(out, expected, reference, ops=60)
    assert_matches(grad, wanted, exact, ops=120)
    assert 2 <= launches <= 5


def batch_norm(x):
    numbers = [torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype, device=x.device).roll(k) for k in range(4)]
    return F.batch_norm(x, *numbers)


BEFORE = {"relu": torch.relu, "batch norm": batch_norm, "sine": torch.sin, "sum": lambda x: x + x.roll(1, 0)}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize("before, launches", list(zip(BEFORE, (1, 1, 2, 2))))
def test_cheap_ops_before_it_are_computed_again(device, monkeypatch, before, launches, pool, form):
    """Where instructions cost less than memory; what costs more, or reads more, is stored for the windows."""
    monkeypatch.setattr(Machine, "computes_fast", True)

    def program(x):
        return pool(BEFORE[before](x), 3, 2, 1)

    compiled = torch.compile(program, backend="tsfuser")
    for dtype in (torch.float32, torch.bfloat16):
        x = images(device, dtype, form=form)
        with torch.no_grad():
            compiled(x)
            start = tsfuser.stats()["launches"]
            assert_matches(compiled(x), program(x), program(x.double()), ops=60)
        assert tsfuser.stats()["launches"] - start == launches


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_alone_it_is_a_group_on_a_gpu(device, monkeypatch, kind, form):
    monkeypatch.setattr(worth, "_is_on_gpu", lambda value: True)
    pool = pooled(kind, "a network's first")
    compiled = torch.compile(lambda x: pool(x), backend="tsfuser")
    x = images(device, sizes=(2, 8, 17, 19), form=form).requires_grad_()
    out, grad, launches = counted_step(compiled, x)
    assert launches == 2
    expected, wanted, _ = eager_step(pool, x)
    reference, exact, _ = eager_step(pool, x.detach().double().requires_grad_())
    assert_matches(out, expected, reference, ops=30)
    assert_matches(grad, wanted, exact, ops=60)
    with torch.no_grad():
        start = tsfuser.stats()["launches"]
        assert_matches(compiled(x), expected, reference, ops=30)
    assert tsfuser.stats()["launches"] - start == 1


def counted_step(function, x):
    before = tsfuser.stats()["launches"]
    result = function(x)
    generator = torch.Generator(x.device).manual_seed(1)
    gradient = torch.randn(result.shape, generator=generator, device=x.device).to(result)
    [grad] = torch.autograd.grad(result, x, gradient.contiguous(memory_format=_format(result)))
    return result.detach(), grad, tsfuser.stats()["launches"] - before


def eager_step(function, x):
    """In rows, and then in the format of `x`: torch's gradient of a padded average pooling in channels last
    on CUDA takes no account of the padding (ATen/native/cuda/AveragePool2d.cu)."""
    found = counted_step(function, x.detach().contiguous().requires_grad_())
    return (*(value.contiguous(memory_format=_format(x)) for value in found[:2]), found[2])


def _format(x):
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_places_of_the_largest_elements(device, windows, form):
    """Equal elements, NaN, and windows of -inf alone: the first place that is no padding; the last NaN."""
    size, step, padding, dilation, up = WINDOWS[windows]

    def program(x):
        values, places = F.max_pool2d(x, size, step, padding, dilation, up, return_indices=True)
        return values * 2.0, places

    x = torch.randint(-2, 3, (2, 3, 8, 7), device=device).float().to(memory_format=FORMATS[form])
    x[0, 0, 2:4, 3], x[0, 1, :5], x[1] = float("nan"), float("-inf"), x[1].masked_fill(x[1] > 1, float("inf"))
    values, places = torch.compile(program, backend="tsfuser")(x)
    expected, wanted = program(x)
    assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert_close(places, wanted, rtol=0, atol=0)
    assert (values.stride(), places.stride()) == (expected.stride(), wanted.stride())
    assert tsfuser.stats()["launches"] == 1


def test_places_where_nothing_is_larger_as_on_cuda_in_channels_last(device, monkeypatch):
    def program(x):
        values, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        return values * 2.0, places

    monkeypatch.setattr(pooling, "has_no_place_of_minus_inf", lambda *given: True)
    x = images(device, sizes=(1, 2, 9, 9))
    x[0, 0, 4:], x[0, 1, 0, 0] = float("-inf"), float("nan")
    found, places = torch.compile(program, backend="tsfuser")(x)
    values, wanted = program(x)
    assert_close(found, values, rtol=0, atol=0, equal_nan=True)
    assert_close(places, wanted.masked_fill(values == float("-inf"), 0), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_the_gradient_goes_to_one_of_equal_elements(device, form):
    def program(x):
        return F.max_pool2d(x, 3, 2, 1) * 3.0

    x = torch.randint(-1, 2, (2, 3, 9, 8), device=device).float().to(memory_format=FORMATS[form])
    x.requires_grad_()
    compiled = torch.compile(program, backend="tsfuser")
    got, wanted = (counted_step(function, x)[1] for function in (compiled, program))
    assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_forward_saves_a_byte_per_window(device):
    def program(x):
        return F.max_pool2d(x.cos(), 3, 2, 1).sin()

    saved = []

    def pack(x):
        saved.append(x.dtype)
        return x

    x = images(device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.compile(program, backend="tsfuser")(x).sum().backward()
    assert torch.int8 in saved and torch.int64 not in saved


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("step", [1, 2])
def test_what_a_relu_lets_pass_is_asked_of_the_results(device, step, form):
    """So the relu's result, which is larger, is not saved."""

    def program(x, weight):
        return F.max_pool2d(F.conv2d(x, weight, padding=1).relu(), 3, step)

    x = images(device, sizes=(2, 3, 12, 14), form=form)
    x[0, 1, 2, 3], x[1, 2, 8, 9] = float("nan"), float("inf")
    x, weight = x.requires_grad_(), torch.randn(5, 3, 3, 3, device=device).requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        out = torch.compile(program, backend="tsfuser")(x, weight)
    assert (2, 5, 12, 14) not in sizes
    gradient = torch.randn(out.shape, device=device).to(out)
    found = torch.autograd.grad(out, (x, weight), gradient)
    expected = torch.autograd.grad(program(x, weight), (x, weight), gradient)
    for one, other in zip(found, expected):
        assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "form, step, saved", [("rows", 2, 8), ("channels last", 2, 1), ("channels last", 1, 8)]
)
def test_on_a_cpu_torch_makes_gradients_that_read_many_bytes_apart(monkeypatch, form, step, saved):
    monkeypatch.setattr(pool_offsets, "gathers_well", _gathers_well)
    kinds = []

    def pack(x):
        kinds.append(x.dtype)
        return x

    x = images("cpu", form=form).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.compile(lambda x: F.max_pool2d(x * 2.0, 3, step, 1).sin(), backend="tsfuser")(x)
    assert {8: torch.int64, 1: torch.int8}[saved] in kinds


@pytest.mark.parametrize("windows", ["pairs", "neighbours", "rounded up and padded"])
def test_sums_over_images_add_up_the_gradients_of_windows(monkeypatch, device, windows):
    """As those of a convolution's bias: each window's gradient reaches one element."""
    graphs, save = [], pool_offsets.save_offsets
    monkeypatch.setattr(partition, "save_offsets", lambda joint: graphs.append(joint) or save(joint))
    size, step, padding, _, up = WINDOWS[windows]

    def program(x, bias):
        return F.max_pool2d((x + bias).relu(), size, step, padding, ceil_mode=up) * 0.5

    given = [images(device), torch.randn(3, 1, 1, device=device)]
    _, found = train(torch.compile(program, backend="tsfuser"), [t.requires_grad_() for t in given], calls=2)
    exact = [t.detach().double().requires_grad_() for t in given]
    for mine, true in zip(found, train(program, exact, calls=1)[1], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
    sums = [n for n in graphs[0].graph.nodes if n.target is torch.ops.aten.sum.dim_IntList]
    assert sums and all(n.args[0].target is torch.ops.aten.threshold_backward.default for n in sums)


def test_the_op_that_saves_it_runs_without_a_group(device):
    """As where a call is refused."""
    for form in FORMATS:
        x = images(device, sizes=(2, 3, 9, 8), form=form)
        windows = [3, 2], [2, 2], [1, 0], [1, 1], True
        values, places = torch.ops.aten.max_pool2d_with_indices(x, *windows)
        same, offsets = torch.ops.tsfuser.max_pool(x, *windows)
        gradient = torch.randn_like(values)
        expected = torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *windows, places)
        found = torch.ops.tsfuser.max_pool_backward(gradient, offsets, x.shape, *windows)
        assert offsets.dtype == torch.int8 and 0 <= offsets.min() and offsets.max() < 6
        assert torch.equal(same, values) and torch.equal(found, expected)
        assert found.stride() == expected.stride() and offsets.stride() == values.stride()


def test_new_sizes_need_no_kernel(device):
    def program(x):
        return F.max_pool2d(x.relu(), 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1)

    compiled = torch.compile(program, backend="tsfuser", dynamic=True)
    with torch.no_grad():
        for size in (9, 12, 15, 33):
            x = images(device, sizes=(2, 5, size, size + 1))
            assert_close(compiled(x), program(x))
            if size == 12:
                known = tsfuser.stats()["kernels_compiled"]
    assert tsfuser.stats()["kernels_compiled"] == known


def one(x):
    return F.max_pool1d(x.relu(), 3, 2, 1), F.avg_pool1d(x.relu(), 2, 2)


def two(x):
    return F.max_pool2d(x.relu(), 2), F.avg_pool2d(x.relu(), [3, 2], [2, 1], [1, 0])


def three(x):
    return F.max_pool3d(x.relu(), 2, 1), F.avg_pool3d(x.relu(), 3, 2, 1)


@pytest.mark.parametrize("program, sizes", [(one, (2, 3, 9)), (two, (3, 9, 8)), (three, (2, 5, 6, 7))])
def test_scripted(device, program, sizes):
    x = torch.randn(sizes, device=device)
    with torch.no_grad():
        scripted = fuse(program, x)
        before = tsfuser.stats()["launches"]
        with tsfuser.fuser():
            results = scripted(x)
        for got, wanted in zip(results, program(x)):
            assert_matches(got, wanted, ops=30)
    assert tsfuser.stats()["launches"] > before


def test_scripted_training(device):
    def program(x):
        return F.max_pool2d(x * 2.0, 3, 2, 1).tanh() + F.avg_pool2d(x.sin(), 2)

    x = images(device, sizes=(2, 3, 8, 8)).requires_grad_()
    with tsfuser.fuser():
        got = train(fresh(program), [x])
    for a, b in zip(flat(got), flat(train(program, [x]))):
        assert_matches(a, b, ops=200)
    assert tsfuser.stats()["launches"] > 0


def flat(found):
    return torch.utils._pytree.tree_leaves(found)


@pytest.mark.parametrize(
    "pool, message",
    [
        (lambda x: F.max_pool2d(x.sin(), 9), "Output size is too small"),
        (lambda x: F.avg_pool2d(x.sin(), 2, 2, 2), "pad should be at most half"),
        (lambda x: F.avg_pool2d(x.sin(), 2, divisor_override=0), "divisor must be not zero"),
    ],
)
def test_what_eager_rejects_raises(device, pool, message):
    x = images(device, sizes=(1, 2, 5, 5))
    with pytest.raises(RuntimeError, match=message):
        torch.compile(pool, backend="tsfuser")(x)


@pytest.mark.parametrize("kernel", [2, 3])
def test_a_pool_that_the_backward_computes_again(device, kernel):
    """Its gradient reads the numbers of the largest elements in memory."""

    def block(x):
        return F.max_pool2d(F.gelu(x), kernel, 2)

    def program(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) * 2.0

    x = images(device, sizes=(2, 3, 8, 9), form="channels last").requires_grad_()
    got, wanted = (counted_step(f, x) for f in (torch.compile(program, backend="tsfuser"), program))
    assert_matches(got[1], wanted[1], ops=60)
    assert got[2] >= 2


@pytest.mark.parametrize("windows", [(3, 2, 1, 2), (7, 2)], ids=["padded and dilated", "many elements"])
def test_windows_that_groups_do_not_have_are_left_to_torch(device, windows):
    def program(x):
        return F.max_pool2d(x * 2.0, *windows) + 1.0

    x = images(device, sizes=(2, 3, 12, 13), form="channels last").requires_grad_()
    got, wanted = (counted_step(f, x) for f in (torch.compile(program, backend="tsfuser"), program))
    assert_close(got[1], wanted[1])


def test_no_images(device):
    def program(x):
        return F.max_pool2d(x.sin(), 2).cos()

    x = images(device, sizes=(0, 3, 8, 8)).requires_grad_()
    out = torch.compile(program, backend="tsfuser")(x)
    out.sum().backward()
    assert out.shape == (0, 3, 4, 4) and x.grad.shape == x.shape
