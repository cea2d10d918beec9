"""Strides in graphs of torch.compile: views hold whatever layout a kernel gives its result, and what reads
strides sees those of eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kit import compiled_ops
from kit.opinfo import op_db
from kit.support import assert_matches
from tsfuser.frontends.dynamo.tracing.decompositions import decompositions

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]
_seen: list = []  # strides and offsets of the custom ops' operands


@torch.library.custom_op("tsfuser_strides::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    _seen.append((x.stride(), x.storage_offset()))
    return x.clone(memory_format=torch.contiguous_format)


look.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
look.register_autograd(lambda ctx, gradient: look(gradient))


@torch.library.custom_op("tsfuser_strides::look_at_all", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def look_at_all(items: list[torch.Tensor]) -> torch.Tensor:
    _seen.extend((x.stride(), x.storage_offset()) for x in items)
    return items[0].clone(memory_format=torch.contiguous_format)


look_at_all.register_fake(lambda items: torch.empty_like(items[0], memory_format=torch.contiguous_format))


@torch.library.custom_op("tsfuser_strides::look_and_double_", mutates_args=("x",))
def look_and_double_(x: torch.Tensor) -> None:
    _seen.append((x.stride(), x.storage_offset()))
    x.mul_(2)


def _doubled(x):
    look_and_double_(x)
    return x + 1


SEEN = {
    "every second column": lambda x: look((x * 2)[:, ::2]),
    "narrow": lambda x: look((x * 2).narrow(1, 1, 3)),
    "columns of a transpose": lambda x: look((x * 2).t()[:, ::2]),
    "a part of a sum that is split": lambda x: look((x + x.t()).chunk(2, 1)[1]),
    "a whole, and a part of it": lambda x: look(x * 2) + look((x * 2)[:, ::2].relu().t()).sum(),
    "expanded": lambda x: look((x * 2)[:, 1].expand(4, -1)),
    "a list": lambda x: look_at_all([(x * 2)[::2], (x + 1).t()[1:], x[:, ::3]]),
    "written": lambda x: _doubled((x * 3)[:, ::2]),
    "as_strided": lambda x: torch.as_strided((x * 2)[:, ::2], (2, 2), (5, 3), 1),
    "as_strided of a copy": lambda x: torch.as_strided((x * 2).t().contiguous(), (2, 2), (5, 3)) + 1,
    "bits": lambda x: (x * 2)[:, ::2].view(torch.int32) + 1,
    "its own strides": lambda x: (x * 2)[:, ::2] * float((x * 2)[:, ::2].stride(0)),
    "complex": lambda x: torch.view_as_complex((x * 2).view(x.shape[0], -1, 2)[::2]) * 2,
}


@pytest.mark.parametrize("name", SEEN)
def test_what_reads_strides_sees_those_of_eager(name, device):
    function = SEEN[name]
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for rows in (6, 8):  # the second call has sizes that vary
        x = torch.randn(rows, rows, device=device)
        _seen.clear()
        expected = function(x)
        wanted = _seen[:]
        found = compiled(x)
        _seen.clear()
        assert torch.equal(compiled(x), found)
        assert _seen == wanted
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


def test_in_the_backward_too(device):
    def function(x):
        return look((x * 2)[:, ::2]) * x[:, :3]

    x = torch.randn(6, 6, device=device, requires_grad=True)
    tangent = torch.randn(6, 3, device=device)
    runs = []
    for run in (function, torch.compile(function, backend="tsfuser", fullgraph=True)):
        for _ in range(2):
            _seen.clear()
            (gradient,) = torch.autograd.grad(run(x), x, tangent)
        runs.append((gradient, _seen[:]))
    assert runs[0][1] == runs[1][1] and runs[0][0].stride() == runs[1][0].stride()
    torch.testing.assert_close(runs[1][0], runs[0][0])


def test_results_that_are_parts_have_the_strides_of_eager(device):
    def function(x):
        y = x * 2
        return y[:, ::2], (x + 1).t()[1:, ::3], y.chunk(3, 1)[1].relu(), (x - 1).unfold(1, 3, 2)

    x = torch.randn(6, 6, device=device)
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for a, b in zip(compiled(x), function(x)):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


class _Between(nn.Module):
    """A batch norm, or another op with kernels of its own, between transposes, as in a Conformer."""

    def __init__(self, between):
        super().__init__()
        self.linear, self.between = nn.Linear(16, 8), between

    def forward(self, x):
        y = self.between(self.linear(F.gelu(x)).transpose(1, 2)).transpose(1, 2)
        return x[..., :8] + y.reshape(-1, 8).view(y.shape)


@pytest.mark.usefixtures("fused_or_error")
@pytest.mark.parametrize(
    "between",
    [
        lambda: nn.BatchNorm1d(8),
        lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.SiLU()),
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 1)),
        lambda: nn.InstanceNorm1d(8, affine=True),
        lambda: nn.Sequential(nn.AvgPool1d(3, 1), nn.ConstantPad1d(1, 0.0), nn.GELU()),
    ],
    ids=["batch norm", "convolution", "group norm", "instance norm", "pool"],
)
def test_views_behind_ops_that_choose_their_layout(between, device):
    model = _Between(between()).to(device)
    other = _Between(between()).to(device)
    other.load_state_dict(model.state_dict())
    compiled = torch.compile(other, backend="tsfuser", fullgraph=True)
    x = torch.randn(4, 33, 16, device=device)
    tangent = torch.randn(4, 33, 8, device=device)
    runs = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(tangent)
        runs.append((y, leaf.grad, *(p.grad for p in run.parameters()), *run.buffers()))
    for a, b in zip(*runs):
        assert a.stride() == b.stride()
        assert_matches(b, a, a.double(), ops=400)


def test_in_order_copies_only_what_lies_otherwise(device):
    in_order = torch.ops.tsfuser.in_order
    x = torch.randn(4, 1, 6, device=device)
    assert in_order(x, [1, 0, 2]).data_ptr() == in_order(x, [0, 2, 1]).data_ptr() == x.data_ptr()
    for given, order, strides in ((x, [2, 0, 1], (1, 1, 4)), (x[::2], [0, 1, 2], (6, 6, 1))):
        copy = in_order(given, order)
        assert copy.stride() == strides and torch.equal(copy, given)


#: Ops that torch's fake kernels or decompositions lay out in another way than its kernels do.
UNLIKE_FAKE = {
    "roll": lambda x: torch.roll(torch.relu(x), (-7, 2), (2, 1)) * 2,
    "roll without dims": lambda x: torch.roll(x, 3) + 1,
    "channel_shuffle": lambda x: F.channel_shuffle(x * 2, 2) + 1,
    "replicating pad": lambda x: F.pad(x[:, :, None] * 2, (1, 1, 1, 1, 0, 2), "replicate") + 1,
    "reflecting pad": lambda x: F.pad(x[:, :, None] * 2, (1, 1, 1, 1, 0, 0), "reflect") + 1,
    "pixel_shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2) + 1,
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2)) * 2, 2) + 1,
    "rrelu": lambda x: F.rrelu(x * 2) * 3,
    "rrelu in training": lambda x: F.rrelu(x * 2, 0.25, 0.25, training=True) * 3,
}


@pytest.mark.parametrize("name", UNLIKE_FAKE)
def test_results_have_the_strides_of_eagers_kernels(name, device):
    function = UNLIKE_FAKE[name]
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for sizes in ((2, 4, 6, 5), (3, 4, 2, 7)):
        for layout in (torch.channels_last, torch.contiguous_format):
            x = torch.randn(sizes, device=device).contiguous(memory_format=layout)
            for leaf in (x, x.clone().requires_grad_()):
                found, expected = compiled(leaf), function(leaf)
                torch.testing.assert_close(found, expected)
                assert found.stride() == expected.stride()


@pytest.mark.parametrize("shuffled", [F.pixel_shuffle, F.pixel_unshuffle])
def test_shuffled_pixels_are_traced_dense_where_kernels_leave_them_so(shuffled):
    """That is on all devices but the CPU."""
    x = torch.empty(2, 8, 6, 4, device="meta").contiguous(memory_format=torch.channels_last)
    traced = make_fx(lambda x: shuffled(x, 2), decomposition_table=decompositions())(x)
    assert traced(x).is_contiguous()


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_ops_of_torchs_list_on_other_layouts(place, part):
    """Results and gradients have the strides of eager, or those that torch's fake kernels promise."""
    infos, lines = op_db()[part::8], []
    layouts = tuple(compiled_ops.LAYOUTS)
    ran, wrong = compiled_ops.sweep(infos, torch.float32, report=lines.append, layouts=layouts, device=place)
    assert ran["fused"] and not wrong, "\n".join(lines)
