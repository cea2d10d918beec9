"""Results of groups that are written over operands which nobody else holds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error"), pytest.mark.graphs]


def program(function, *examples, donated=None, **tracing):
    """The boxed function of a graph whose inputs, or those `donated`, belong to it."""
    given = range(len(examples)) if donated is None else donated
    module = make_fx(function, **tracing)(*(e.clone() for e in examples))
    return compile_graph(module, Settings(), donated=given)


def called(run, *values):
    """The results, and the address of each value, of which `run` gets the last reference: a copy."""
    args = [v.clone() for v in values]
    addresses = [a.data_ptr() for a in args]
    return run(args), addresses


def result_and_column_sum(x):
    y = F.gelu(x) * 2
    return y, y.sum(0)


def layer_norm_backward(g, x):
    """With the gradients of weight and bias."""
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)
    shape, weight = [x.shape[-1]], torch.ones_like(x[0])
    return torch.ops.aten.native_layer_norm_backward(
        g, x, shape, mean, rstd, weight, weight, [True, True, True]
    )


def biased_by_parts(x, *biases):
    """A softmax whose strides, one for each part of a dim, nothing but the reuse asks for."""
    y = x.view(2, 2, 2, 3, 4, 4, 4, 4)
    for bias in biases:
        y = y + bias
    return torch.softmax(y.view(x.shape), -1)


#: function, shapes of its arguments, the argument in whose memory the first result lies
TAKEN = {
    "pointwise": (lambda x: torch.tanh(x) * 2 + 1, [(37, 50)], 0),
    "second operand": (lambda x, y: torch.exp(x) + y, [(50,), (37, 50)], 1),
    "row of numbers": (lambda x, y: x.sigmoid() * y, [(37, 50), (37, 1)], 0),
    "column sum beside": (result_and_column_sum, [(300, 40)], 0),
    "softmax": (lambda x: torch.softmax(x * 3, -1) + 1, [(37, 50)], 0),
    "long rows": (lambda x: torch.softmax(x, -1) * 2, [(3, 9000)], 0),
    "layer norm": (lambda x: F.layer_norm(x, (64,)) * 2, [(9, 64)], 0),
    "layer norm's backward": (layer_norm_backward, [(300, 64), (300, 64)], 0),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True).relu(), [(8, 6, 5, 5)], 0),
    "other shape": (lambda x: x.view(10, 5, 37).relu() * 2, [(50, 37)], 0),
    "many rows": (lambda x, y: F.gelu(x) * y, [(4000, 33), (33,)], 0),
    "dims that are cut": (biased_by_parts, [(24, 16, 16), (3, 1, 1, 1, 1), (2, 2, 1, 4, 1, 4, 1)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_result_lies_where_an_operand_did(name, device, target):
    """From the first call on, or where a plan has several kernels, from the second."""
    function, shapes, taken = TAKEN[name]
    values = [torch.randn(s, device=device) for s in shapes]
    run = program(function, *values)
    for _ in range(3):
        found, addresses = called(run, *values)
        expected, exact = function(*values), function(*(v.double() for v in values))
        for a, b, c in zip(found, *(x if isinstance(x, tuple) else (x,) for x in (expected, exact))):
            assert_matches(a, b, c, values[0].numel())
    if (name, target) != ("layer norm's backward", "cpu"):  # which reads x and g once more for the columns
        assert found[0].data_ptr() == addresses[taken]
    assert tsfuser.stats()["fallbacks"] == {}


def test_each_operand_is_given_to_one_result(device):
    def function(x, y):
        return x.exp() + y, x.sin() * y, x * y * 2

    values = [torch.randn(64, 32, device=device) for _ in range(2)]
    found, addresses = called(program(function, *values), *values)
    for a, b in zip(found, function(*values)):
        assert_matches(a, b, ops=4)
    assert len({t.data_ptr() for t in found}) == 3
    assert set(addresses) < {t.data_ptr() for t in found}


def test_new_sizes_are_given_memory_as_well(device):
    def function(x, y):
        return (x * y).tanh() * 2

    run = program(function, torch.randn(6, 8, device=device), torch.randn(8, device=device))
    for rows, columns in ((6, 8), (7, 8), (1, 8), (5, 3), (1, 1)):
        values = torch.randn(rows, columns, device=device), torch.randn(columns, device=device)
        [found], addresses = called(run, *values)
        assert_matches(found, function(*values), ops=4)
        assert found.data_ptr() in addresses


def test_what_is_read_again_after_a_result_is_stored_keeps_its_memory(device):
    """A sweep over a row stores the first result, and the next one reads the operand once more, but for rows
    that are fetched into shared memory before."""

    def function(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred, torch.exp(x) / (centred * centred).mean(-1, keepdim=True)

    for shape in ((40, 64), (5, 5000), (3, 40000)):
        x = torch.randn(shape, device=device)
        run = program(function, x)
        for _ in range(3):
            found, [address] = called(run, x)
            for a, b, c in zip(found, function(x), function(x.double())):
                assert_matches(a, b, c, x.numel())
            assert shape == (3, 40000) or found[0].data_ptr() != address


def test_what_a_later_kernel_reads_keeps_its_memory(device):
    def function(x):
        y = x.tanh() * 2
        return y, (x * 3).t().contiguous().view(-1, 7) + 1, x.sum() * 2

    x = torch.randn(35, 42, device=device)
    run = program(function, x)
    for _ in range(3):
        found, _ = called(run, x)
        for a, b, c in zip(found, function(x), function(x.double())):
            assert_matches(a, b, c, x.numel())


@pytest.mark.parametrize("donated, taken", [([0, 1, 2], 1), ([0, 2], None)])
def test_what_only_an_earlier_kernel_reads_is_written_over(donated, taken, device):
    """From end to end: each element of the result is computed from another one of y, and from the sums that
    kernels before have made of the operands. Where one kernel does it all, all keep their memory. So do the
    integers, which are as large as the result."""

    def function(numbers, x, y):
        return y.t().contiguous() * (x.view(y.shape) * y).sum() * numbers.sum()

    numbers = torch.randint(-3, 4, (60000,), dtype=torch.int32, device=device)
    values = [numbers, *(torch.randn(s, device=device) for s in ((60000,), (200, 300)))]
    run = program(function, *values, donated=donated)
    for _ in range(3):
        [found], addresses = called(run, *values)
        assert_matches(
            found, function(*values), function(numbers, *(v.double() for v in values[1:])), 1 << 17
        )
    several = tsfuser.stats()["launches"] > 3
    assert [found.data_ptr() == a for a in addresses] == [several and k == taken for k in range(3)]


def test_an_operand_that_is_returned_keeps_its_memory(device):
    """Dropout gives it back in evaluation, if nothing has decomposed the op."""

    def function(x):
        return F.dropout(x, 0.5, training=False), x.sin() * 2

    x = torch.randn(37, 50, device=device)
    run = program(function, x, pre_dispatch=True)
    for _ in range(2):
        found, [address] = called(run, x)
        assert found[0].data_ptr() == address and torch.equal(found[0], x)
        assert_matches(found[1], function(x)[1], ops=2)


def test_what_all_rows_read_is_not_written_by_the_first(device):
    """The smaller result is stored by the kernel of the larger one, where it computes the first row."""

    def function(x, y):
        return y * x + 1, x.tanh() * 2

    values = torch.randn(50, device=device), torch.randn(300, 50, device=device)
    run = program(function, *values)
    for _ in range(3):
        found, addresses = called(run, *values)
        for a, b in zip(found, function(*values)):
            assert_matches(a, b, ops=4)
        assert found[1].data_ptr() != addresses[0]
    assert tsfuser.stats()["launches"] == 3


NOT_TAKEN = {
    "narrower": (lambda x: x.bfloat16() * 2, (6, 8)),
    "an integer": (lambda x: (x * 4).int() + 1, (6, 8)),
    "turned": (lambda x: x.t().contiguous() * 2, (6, 8)),
    "expanded": (lambda x: x.expand(4, 6, 8) * 2, (6, 8)),
    "smaller": (lambda x: x[1:] * 2, (6, 8)),
    "shifted": (lambda x: F.pad(x[1:], (0, 0, 0, 1)) * 2, (6, 8)),
    "flipped": (lambda x: x.flip(0) * 2, (6, 8)),
    "read at two places": (lambda x: x + x.flip(1) * 2, (6, 8)),
    "reduced": (lambda x: x.sum(0) * 2, (6, 8)),
    "sum added to all": (lambda x: x - x.sum(), (6, 8)),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_is_not_read_where_it_is_stored(name, device):
    function, shape = NOT_TAKEN[name]
    x = torch.randn(shape, device=device)
    run = program(function, x)
    for _ in range(3):
        [found], [address] = called(run, x)
        assert_matches(found, function(x), function(x.double()).to(found.dtype), 64)
        if name != "sum added to all":  # whose sum is another kernel's, or another sweep's
            assert found.data_ptr() != address


def holding(kind, device):
    """(an operand, what else keeps it from being taken)"""
    x = torch.randn(6, 8, device=device)
    if kind == "held":
        return x, x
    if kind == "saved":
        y = (x * torch.ones((), device=device, requires_grad=True)).exp()
        return y.detach(), y.grad_fn
    if kind == "a view is held":
        return x, x[0]
    if kind == "its storage is held":
        return x, x.untyped_storage()
    if kind == "held as an array" and device == "cpu":
        return x, x.numpy()
    if kind == "somebody else's memory" and device == "cpu":
        return torch.from_numpy(np.ones((6, 8), np.float32)), None
    if kind == "shared with processes" and device == "cpu":
        return x.share_memory_(), None
    if kind == "a part":
        return torch.randn(7, 8, device=device)[:6], None
    if kind == "further on":
        return torch.randn(7, 8, device=device)[1:], None
    if kind == "with gaps":
        return torch.randn(6, 9, device=device)[:, :8], None
    if kind == "not aligned":
        return torch.randn(49, device=device)[1:].view(6, 8), None
    if kind == "one for all":
        return torch.randn(8, device=device).expand(6, 8), None
    if kind == "a leaf":
        return x.requires_grad_(), None
    pytest.skip("of CPU tensors only")


@pytest.mark.parametrize(
    "kind",
    [
        *("held", "saved", "a view is held", "its storage is held", "held as an array"),
        *("somebody else's memory", "shared with processes", "a part", "further on", "with gaps"),
        *("not aligned", "one for all", "a leaf"),
    ],
)
def test_what_somebody_may_see_keeps_its_memory(kind, device):
    def function(x):
        return torch.tanh(x) * 2

    run = program(function, torch.randn(6, 8, device=device))
    for _ in range(2):
        x, holder = holding(kind, device)
        address, before = x.data_ptr(), x.detach().clone()
        args = [x]
        del x
        [found] = run(args)
        assert_matches(found, function(before), ops=2)
        assert found.data_ptr() != address, holder
        if isinstance(holder, torch.Tensor):
            assert torch.equal(holder, before if holder.dim() == 2 else before[0])


def test_the_same_tensor_twice(device):
    def function(x, y):
        return torch.tanh(x) * 2, torch.exp(y) + 1

    x = torch.randn(6, 8, device=device)
    run, before = program(function, x, x + 1), x.clone()
    args = [x, x]
    del x
    for a, b in zip(run(args), function(before, before)):
        assert_matches(a, b, ops=2)


def test_what_was_not_donated_keeps_its_memory(device):
    values = [torch.randn(6, 8, device=device) for _ in range(2)]
    run = program(lambda x, y: torch.tanh(x) * y, *values, donated=[1])
    [found], addresses = called(run, *values)
    assert found.data_ptr() == addresses[1]
    run = program(lambda x, y: torch.tanh(x) * y, *values, donated=[])
    [found], addresses = called(run, *values)
    assert found.data_ptr() not in addresses


def test_an_index_out_of_range_is_an_error_of_intact_operands(device):
    """The ops are run once more, to raise what they raise: a result must not have been written over x."""

    def function(x, table, index):
        return torch.tanh(x) + torch.index_select(table, 0, index)

    values = [torch.randn(6, 8), torch.randn(5, 8), torch.tensor([0, 1, 4, 3, 2, 1])]
    values = [v.to(device) for v in values]
    run = program(function, *values)
    for _ in range(2):
        [found], addresses = called(run, *values)
        assert_matches(found, function(*values), ops=4)
        assert found.data_ptr() not in addresses
    assert tsfuser.stats()["launches"] == 2
    if device == "cpu":  # a GPU stops with an assertion of the device
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            called(run, *values[:2], values[2] + 3)
