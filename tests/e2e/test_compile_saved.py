"""What compiled models save for their backward, in bytes, beside inductor's partition of the same model."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

from kit.compiled_models import MODELS
from kit.support import assert_matches
from tsfuser.frontends.dynamo.joint_graph.partition import partition
from tsfuser.frontends.dynamo.tracing.decompositions import decompositions
from tsfuser.ops import without_row

pytestmark = pytest.mark.graphs


OURS = partial(partition, recompute=True, layout=None)


def saved_bytes(model, x, partition_fn, table, autocast=True):
    """Of the memory that autograd saves, what is neither a parameter, an argument nor a result."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda module, inputs: module, partition_fn=partition_fn, decompositions=table
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
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
        pytest.param("gpt", 64, marks=pytest.mark.long),
        ("unet", 64),
        ("convnext", 64),
        ("residual", 64),
        ("llama", 8),
        pytest.param("vae", 64, marks=pytest.mark.long),
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


WIDTH = 64


class Residual(torch.nn.Module):
    """A norm of a sum of a float32 tensor and a 16-bit product."""

    def __init__(self, start, is_normed):
        super().__init__()
        self.start, self.is_normed = start, is_normed
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        y = self.start(x)
        return self.last(self.norm2(y + self.first(self.norm1(y) if self.is_normed else x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loss_head_saves_logits_that_are_in_memory_and_two_numbers_a_row(dtype):
    """And not the logarithm of their softmax, which the backward computes again."""

    class Head(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return F.cross_entropy(logits.view(-1, 99), torch.arange(32)), logits

    model, x = Head(8, 99).to(dtype), torch.randn(4, 8, 8, dtype=dtype)

    def saved(**how):
        return saved_bytes(model, x, partial(partition, layout=None, **how), decompositions(), autocast=False)

    assert saved(recompute=True) <= 32 * (2 * 4 + 8) + 4  # and the classes, and how many there were
    assert saved(recompute=False) > 32 * 99 * dtype.itemsize


@pytest.mark.parametrize(
    "start, is_normed, saved",  # saved: bytes per element. Each linear layer has saved its 16-bit operand
    [
        (lambda x: x, True, 2 + 2 + 2),  # the product
        (lambda x: x.cumsum(0), True, 2 + 2 + 2 + 4),  # the product, and the operand of the first norm
        (lambda x: x.cumsum(0), False, 2 + 2 + 4),  # the sum, as nobody else reads the tensor in float32
    ],
)
def test_the_operand_of_a_norm_is_computed_again_if_less_is_saved_then(start, is_normed, saved):
    rows = 512
    model, x = Residual(start, is_normed), torch.randn(rows, WIDTH)
    statistics, weights = rows * 4 * (4 if is_normed else 2), 2 * WIDTH * WIDTH * 2
    found = saved_bytes(model, x, OURS, decompositions())
    assert found <= rows * WIDTH * saved + statistics + weights


ACTIVATIONS = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gradient_reads_the_result_that_the_next_product_has_saved(activation):
    """And no more than that is saved: 16 bits for each of 12 elements, of two layers."""

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12, bias=False) for _ in range(3))

        def forward(self, x):
            for layer in self.layers[:2]:
                x = ACTIVATIONS[activation](layer(x))
            return self.layers[2](x)

    weights = 3 * 12 * 12 * 2
    assert saved_bytes(Layers(), torch.randn(64, 12), OURS, decompositions()) <= 64 * 12 * 2 * 3 + weights


FORMS = {
    **ACTIVATIONS,
    "no slope": lambda x: F.leaky_relu(x, 0),
    "falling": lambda x: F.leaky_relu(x, -0.5),  # its result does not tell the operand's sign
    "rounded ends": lambda x: F.hardtanh(x, -0.7, 0.7),  # 0.7 is less in bfloat16
    "twice": lambda x: F.hardtanh(F.leaky_relu(x, 0.3), -2, 3),
}


@pytest.mark.each_value
@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_from_results_are_those_from_operands(form, dtype, device):
    """Exactly, at the ends and around them, at zeros and infinities. Torch's own kernels of hardtanh differ
    in what they make of NaN."""
    ends = torch.tensor([0, 1, 6, 0.7, 2, 3, 0.1, 1e-42, float("inf")], dtype=dtype, device=device)
    if form in ("leaky_relu", "no slope", "falling"):
        ends = torch.cat([ends, torch.full_like(ends[:1], float("nan"))])
    x = torch.cat([ends, ends * (1 + 2**-7), ends * (1 - 2**-8), torch.randn_like(ends)])

    def function(x, w):
        return ((FORMS[form](x * 1) @ w) * 2).sum()  # the gradient of `w` reads the rounded result

    def gradient(function):
        leaf = torch.cat([x, -x])[:, None].requires_grad_()
        w = torch.ones(1, 1, dtype=dtype, device=device, requires_grad=True)
        return torch.autograd.grad(function(leaf, w), (leaf, w))[0]

    run = torch.compile(function, backend="tsfuser", fullgraph=True)
    expected = gradient(function)
    for _ in range(3):
        torch.testing.assert_close(gradient(run), expected, rtol=0, atol=0, equal_nan=True)


POOLS = {
    "max": lambda x: F.max_pool2d(x, 4),
    "max of any sizes": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "average": lambda x: F.avg_pool2d(x, 4, 3, 1),
    "average of any sizes": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "max of volumes": lambda x: F.max_pool3d(x[:, :, None], (1, 3, 2)),
    "max of volumes of any sizes": lambda x: F.adaptive_max_pool3d(x[:, :, None], (1, 2, 3)),
    "average of volumes": lambda x: F.avg_pool3d(x[:, :, None], (1, 3, 2)),
    "average of volumes of any sizes": lambda x: F.adaptive_avg_pool3d(x[:, :, None], (1, 2, 3)),
}


class WithoutValues(TorchDispatchMode):
    """Gradients that should read only the sizes of an operand get one of NaNs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() in without_row.SIZES_ONLY:
            self.found.append(op)
            args = (args[0], torch.full_like(args[1], float("nan")), *args[2:])
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", POOLS)
def test_gradients_of_pools_read_no_values(pool, form, device):
    x = torch.randn(2, 3, 8, 9, device=device).to(memory_format=form).requires_grad_()
    y = POOLS[pool](x)
    [expected] = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    with WithoutValues() as seen:
        [found] = torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(seen.found) == 1 and torch.equal(found, expected) and found.stride() == expected.stride()


class Pooled(torch.nn.Module):
    def __init__(self, pool, between):
        super().__init__()
        self.pool, self.between = POOLS[pool], between
        self.conv = torch.nn.Conv2d(8, 32, 1, bias=False)

    def forward(self, x):
        return self.pool(self.between(self.conv(x)))


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_pool_reads_is_not_saved(pool):
    x = torch.randn(16, 8, 8, 9)
    model = Pooled(pool, torch.nn.Identity())
    assert saved_bytes(model, x, OURS, decompositions()) < 16 * 32 * 8 * 9 * 2


@pytest.mark.parametrize("norm, made", [(True, 0), (False, 1)])
def test_a_saved_tensor_tells_the_sizes_if_there_is_one(norm, made):
    """Its reader, the gradient of a batch norm, runs after that of the pool."""
    between = torch.nn.Sequential(torch.nn.BatchNorm2d(32), torch.nn.ReLU()) if norm else torch.nn.Identity()
    model, found = Pooled("average", between), []

    def cut(*given, **how):
        forward, backward = OURS(*given, **how)
        found.extend(n for n in backward.graph.nodes if n.target is torch.ops.aten.empty.memory_format)
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda module, inputs: module, partition_fn=cut)
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(2, 8, 8, 9))
    assert len(found) == made


@pytest.mark.usefixtures("forgotten")
def test_a_saved_tensor_of_another_dtype_does_not_tell_the_sizes(device):
    """The gradient of tanh reads one of these sizes, after that of the pool, which refuses it."""

    def function(x):
        return POOLS["average"](torch.tanh(x).bfloat16().sin()).float()

    torch._dynamo.reset()
    x = torch.randn(2, 3, 8, 9, device=device, requires_grad=True)
    run = torch.compile(function, backend="tsfuser")
    found, expected = (torch.autograd.grad(call(x).sum(), x)[0] for call in (run, function))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize(
    "pool, dynamic", [*((pool, False) for pool in POOLS), ("max", True), ("average of any sizes", True)]
)
def test_gradients_behind_pools(pool, dynamic, device):
    def function(x):
        return POOLS[pool](torch.sin(x) * 2)

    torch._dynamo.reset()
    run = torch.compile(function, backend="tsfuser", dynamic=dynamic)
    for n in (2, 3) if dynamic else (2,):
        x = torch.randn(n, 3, 8, 4 + n, device=device).to(memory_format=torch.channels_last).requires_grad_()
        results = []
        rows = x.detach().contiguous()  # in channels last torch's kernel for CUDA forgets the padding
        for call, at in ((run, x), (function, rows), (function, rows.double()), (function, x)):
            at = at.detach().requires_grad_()
            results.append(torch.autograd.grad(call(at).square().sum(), at)[0])
        assert_matches(*results[:3], ops=64, strides=False)
        assert results[0].stride() == results[3].stride()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("pool", ["average", "norm"])
def test_what_stands_for_sizes_is_not_saved(pool, device):
    """Where the sizes are no numbers of the graph, it is computed of some; the backward computes it again."""

    def function(x):
        y = x.abs()
        y = F.avg_pool2d(y, 2).relu() if pool == "average" else F.lp_pool2d(y, 2.0, 2)
        return y, F.pixel_shuffle(x, 2) * 2

    torch._dynamo.reset()
    run = torch.compile(function, backend="tsfuser", dynamic=True)
    for n in (2, 3):
        x = torch.randn(n, 4, 6, 3 + n, device=device, requires_grad=True)
        found, expected = (
            torch.autograd.grad(sum(t.square().sum() for t in f(x)), x)[0] for f in (run, function)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("forgotten", "fused_or_error")
@pytest.mark.parametrize("in_logarithms", [True, False])
def test_of_a_teachers_logits_two_numbers_a_row_are_saved(in_logarithms, device):
    """They get no gradient, but the gradient of the loss reads their softmax."""

    def function(x, teacher):
        soft = (torch.log_softmax if in_logarithms else torch.softmax)(teacher.float(), -1)
        student = torch.log_softmax(x.float(), -1)
        return F.kl_div(student, soft, reduction="batchmean", log_target=in_logarithms)

    x, teacher = (torch.randn(8, 64).bfloat16().to(device) for _ in range(2))
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = torch.compile(function, backend="tsfuser")(x, teacher)
    [found] = torch.autograd.grad(loss, x)
    [eager] = torch.autograd.grad(function(x, teacher), x)
    wide = x.detach().double().requires_grad_()
    soft = torch.softmax(teacher.double(), -1)
    [exact] = torch.autograd.grad(F.kl_div(wide.log_softmax(-1), soft, reduction="batchmean"), wide)
    assert_matches(found, eager, exact, ops=60)
    known = {x.data_ptr(), teacher.data_ptr()}
    assert sum(t.numel() for t in saved if t.data_ptr() not in known) <= 4 * len(x)
