"""Dropout in training by torch.compile: the backward draws the mask again, from a seed of two integers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tsfuser
from tsfuser import options

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]

SEEDED = "tsfuser::seeded_dropout"


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def saved_by(function, *args):
    """The result, and the tensors that autograd has saved for its backward, but the arguments."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = function(*args)
    given = {a.data_ptr() for a in args}
    return result, [t for t in saved if t.data_ptr() not in given]


def test_nothing_is_saved_but_the_seeds(device):
    x = torch.ones(64, 32, device=device, requires_grad=True)
    y, saved = saved_by(compiled(lambda x: F.dropout(F.dropout(x * 2, 0.25), 0.5) + 1), x)
    y.sum().backward()
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.int64, (2, 2))]
    kept = y.detach() - 1
    assert torch.equal(x.grad, kept) and kept.unique().tolist() == pytest.approx([0.0, 2 / 0.75 * 2])


@pytest.mark.graphs
def test_equal_layers_share_their_kernels(device):
    """Whatever the number of layers, and with other masks in each."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return F.dropout(F.gelu(self.linear(x)), 0.25) + x

    built = []
    for layers in (4, 8):
        torch._dynamo.reset()
        tsfuser.reset()
        model = nn.Sequential(*[Layer() for _ in range(layers)]).to(device)
        compiled(model)(torch.randn(5, 16, device=device)).sum().backward()
        built.append(tsfuser.stats()["plans_built"])
    assert built[0] == built[1]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999, 1.0])
def test_the_gradient_has_the_mask_and_the_scale_of_the_result(dtype, p, device):
    x = torch.ones(33, 65, device=device, dtype=dtype, requires_grad=True)
    y = compiled(lambda x: F.dropout(x + 0, p) * 1)(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, x.grad)
    scale = torch.ones(2, dtype=dtype).mul(1 / (1 - p) if p < 1 else 0)  # as eager rounds it
    assert set(y.unique().tolist()) <= {0.0, scale[0].item()}
    rate = (y != 0).double().mean().item()
    assert abs(rate - (1 - p)) <= 5 * (p * (1 - p) / x.numel()) ** 0.5


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 8, 5, 7), (2, 3, 4, 5, 2)])
@pytest.mark.parametrize("form", ["dense", "channels_last", "transposed"])
def test_groups_and_ops_draw_the_same_numbers(shape, form, device):
    """Whatever falls back: here the op alone is left out of groups."""

    def function(x, g):
        y = F.dropout(x * 2, 0.3)
        z = F.dropout(torch.sin(y), 0.6)
        return (z * g).sum(), z

    x = torch.randn(shape, device=device)
    if form == "transposed" and x.dim() > 1:
        x = x.transpose(0, 1)
    if form == "channels_last" and x.dim() > 3:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    g, results = torch.randn_like(x), []
    for skip in ([], [SEEDED]):
        torch.manual_seed(3)
        own = x.detach().requires_grad_()
        loss, z = compiled(function, options={"skip": skip})(own, g)
        loss.backward()
        results.append((z.detach(), own.grad))
        assert torch.equal(z == 0, own.grad == 0)
    for fused, plain in zip(*results):
        assert fused.stride() == plain.stride() and torch.equal(fused == 0, plain == 0)
        torch.testing.assert_close(fused, plain)


def test_a_gradient_in_another_layout_meets_the_same_mask(device):
    def function(x):
        return F.dropout(x * 1.0, 0.5).permute(0, 2, 3, 1)

    x = torch.ones(2, 8, 5, 3, device=device).to(memory_format=torch.channels_last).requires_grad_()
    y = compiled(function)(x)
    y.backward(torch.ones(2, 5, 3, 8, device=device).transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(y.permute(0, 3, 1, 2), x.grad)


def test_sizes_vary_and_calls_differ(device):
    function = compiled(lambda x: F.dropout(x * 1, 0.5) + 0, dynamic=True)
    masks = []
    for rows in (3, 64, 64, 200):
        x = torch.ones(rows, 50, device=device, requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert torch.equal(y, x.grad)
        masks.append(y.detach())
    assert not torch.equal(masks[1], masks[2])
    assert tsfuser.stats()["fallbacks"] == {}


def test_the_seed_decides_and_the_generator_advances(device):
    function = compiled(lambda x: F.dropout(x * 1, 0.5) + 0)
    x = torch.ones(64, 8, device=device, requires_grad=True)
    runs = []
    for _ in range(3):
        torch.manual_seed(11)
        y = function(x)
        y.sum().backward()
        runs.append((y.detach(), x.grad.clone(), torch.rand(2, device=device)))
        x.grad = None
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
    torch.manual_seed(11)
    assert not torch.equal(torch.rand(2, device=device), runs[0][2])


def test_neighbours_rows_and_dropouts_are_independent(device):
    """Each mask beside each other, and each beside itself moved by one: no correlation above five standard
    deviations of one of independent numbers."""
    x = torch.ones(400, 250, device=device, requires_grad=True)
    masks = [
        m.detach().double() - 0.5
        for m in compiled(lambda x: [F.dropout(x * 0.5, 0.5) + 0 for _ in range(3)])(x)
    ]
    pairs = [(a, b) for k, a in enumerate(masks) for b in masks[:k]]
    pairs += [(m[:, 1:], m[:, :-1]) for m in masks] + [(m[1:], m[:-1]) for m in masks]
    for a, b in pairs:
        assert abs((4 * a * b).mean().item()) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_checkpoints_draw_the_mask_again(outside, reentrant, device):
    def body(x):
        return F.dropout(torch.sin(x) + x, 0.5) * 2

    if outside:
        inner = compiled(body)

        def function(x):
            return checkpoint(inner, x, use_reentrant=reentrant)
    else:
        function = compiled(lambda x: checkpoint(body, x, use_reentrant=reentrant))
    x = torch.rand(64, 8, device=device).add(1).requires_grad_()
    y = function(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)


def test_what_else_reads_the_mask_keeps_it(device):
    def function(x):
        y, mask = torch.native_dropout(x * 1, 0.5, True)
        return y + 0, mask.to(x.dtype) * 2

    x = torch.ones(64, 8, device=device, requires_grad=True)
    y, mask = compiled(function)(x)
    y.sum().backward()
    assert torch.equal(y, mask) and torch.equal(y, x.grad)


def test_eager_numbers_and_no_recomputation_leave_the_mask_stored(device):
    x = torch.ones(64, 8, device=device, requires_grad=True)
    function = lambda x: F.dropout(x * 1, 0.5) + 0
    y, saved = saved_by(compiled(function, options={"recompute": False}), x)
    y.sum().backward()
    assert torch.equal(y, x.grad) and torch.bool in {t.dtype for t in saved}
    with options.override(enable=frozenset({"eager_random"})):
        y, saved = saved_by(compiled(lambda x: F.dropout(x * 1, 0.5) + 1 - 1), x)
    assert torch.bool in {t.dtype for t in saved}


def test_the_op_says_what_is_wrong():
    x, seed = torch.ones(4, 4), torch.randint(0, 2**63 - 1, [2])
    with pytest.raises(RuntimeError, match="two int64"):
        torch.ops.tsfuser.seeded_dropout(x, seed.float(), 0, 0.5, [0, 1])
    with pytest.raises(RuntimeError, match="an order of 1 dims for a tensor of 2"):
        torch.ops.tsfuser.seeded_dropout(x, seed, 0, 0.5, [0])
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        torch.ops.tsfuser.seeded_dropout(x, seed, 0, 1.5, [0, 1])


def test_what_noise_asks_for_its_dtype_is_in_the_group_of_the_product(device):
    """Stochastic depth: noise of a number a row, in new memory like the tensor's."""

    def function(x, y):
        z = F.dropout(x.t(), 0.0).clone()
        noise = z.new_empty((z.size(0), 1)).bernoulli_(0.5)
        return z * noise + y

    run = torch.compile(function, backend="tsfuser", fullgraph=True)
    x, y = torch.randn(6, 8, device=device), torch.randn(8, 6, device=device)
    torch.manual_seed(3)
    found = run(x, y)
    torch.manual_seed(3)
    assert torch.equal(found, function(x, y))
    assert "clone" not in str(tsfuser.explain(run, x, y)).partition("  not fused\n")[2]
