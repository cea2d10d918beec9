"""Sums that groups compute again, where an earlier group would have to keep them in memory."""

import pytest
import torch
from torch import nn

import tsfuser
from kit.allocations import allocations
from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.groups import cheap_sums, passes

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]
WIDTH, ROWS = 128, 512
EACH = 4 * WIDTH * ROWS  # bytes of a float32 activation


class Block(nn.Module):
    """Two residual connections. `how` changes what becomes of the first sum."""

    def __init__(self, how="read"):
        super().__init__()
        self.how = how
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("state", torch.randn(ROWS, WIDTH))
        self.scale, self.bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x):
        given = self.state if self.how == "written" else x
        made = self.state if self.how == "inputs" else self.first(x)
        if self.how == "scaled":
            made = (made + self.bias.to(made.dtype)) * self.scale
        y = given.sort(0)[0] + made.sort(0)[0] if self.how == "large" else given + made
        z = self.norm(y)
        if self.how == "written":
            self.state.mul_(0.5).add_(z)
        z = y + torch.tanh(self.last(z))
        return (z, y) if self.how == "returned" else z


def ran(function, *args):
    with torch.no_grad(), torch.autocast(args[0].device.type, torch.bfloat16):
        return function(*args)


def compiled(model, *args, **choices):
    """The compiled model, and how many tensors its groups return."""
    function = torch.compile(model, backend="tsfuser", **choices)
    with watch.watching() as (_, outcomes):
        ran(function, *args)
    graph = outcomes[0].programs[""][0].graph
    return function, sum(n.outputsSize() for n in graph.nodes() if n.kind() == "prim::CudaFusionGroup")


@pytest.mark.parametrize("how", ["read", "scaled"])
def test_a_sum_of_what_lives_on_anyway_is_computed_again(how, device, monkeypatch):
    model, x = Block(how).to(device), torch.randn(ROWS, WIDTH, device=device)
    ours, stored = compiled(model, x)
    result = ran(ours, x)
    _, peak = allocations(lambda: ran(ours, x), device)
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "recompute_sums", lambda graph, groups, owns_inputs: groups)
    plain, stored_before = compiled(model, x)
    assert stored == stored_before - 1
    assert torch.equal(result, ran(plain, x))
    ran(plain, x)
    assert peak <= allocations(lambda: ran(plain, x), device)[1]


def test_less_is_alive_between_the_sums(device, monkeypatch):
    """What is wide in between is allocated beside the 16-bit operand, not beside the sum."""
    model, x = Block().to(device), torch.randn(ROWS, WIDTH, device=device)
    model.last = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)).to(device)
    peaks = []
    for _ in range(2):
        function, _ = compiled(model, x)
        ran(function, x)
        peaks.append(allocations(lambda: ran(function, x), device)[1])
        torch._dynamo.reset()
        monkeypatch.setattr(passes, "recompute_sums", lambda graph, groups, owns_inputs: groups)
    assert peaks[0] <= peaks[1] - EACH // 2


@pytest.mark.parametrize("how", ["returned", "large"])
def test_sums_that_stay(how, monkeypatch):
    """A result of the graph, and a sum of operands that would take more memory than it."""
    model, x = Block(how), torch.randn(ROWS, WIDTH)
    _, stored = compiled(model, x)
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "recompute_sums", lambda graph, groups, owns_inputs: groups)
    assert stored == compiled(model, x)[1]


@pytest.mark.parametrize("form, stored", [(torch.contiguous_format, 2), (torch.channels_last, 3)])
def test_a_sum_of_what_lies_otherwise_stays(form, stored):
    """Its readers would read that operand across its layout."""

    def program(x, w):
        y = x + (x @ w).clone(memory_format=form)
        return torch.softmax(y, -1) @ w + y

    x, w = torch.randn(8, 8, 32, 32), torch.randn(32, 32)
    assert compiled(program, x, w)[1] == stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_sums_stay(dtype):
    """Once rounded and stored, they are other numbers."""
    model, x = Block("inputs").to(dtype), torch.randn(ROWS, WIDTH, dtype=dtype)
    assert compiled(model, x)[1] == (2 if dtype is torch.float32 else 3)


def test_an_operand_that_is_changed_in_place():
    model, plain = Block("written"), Block("written")
    plain.load_state_dict(model.state_dict())
    x = torch.randn(ROWS, WIDTH)
    function, _ = compiled(model, x)
    ran(plain, x)
    for _ in range(2):
        ours, eager = ran(function, x), ran(plain, x)
        assert_matches(ours, eager, ops=4 * WIDTH, precision=torch.bfloat16)
        assert_matches(model.state, plain.state, ops=4 * WIDTH, precision=torch.bfloat16)


def test_sizes_that_change():
    model = Block()
    function = torch.compile(model, backend="tsfuser", dynamic=True)
    for rows in (ROWS, ROWS + 3, 5):
        x = torch.randn(rows, WIDTH)
        assert_matches(ran(function, x), ran(model, x), ops=4 * WIDTH, precision=torch.bfloat16)
    assert tsfuser.stats()["fallbacks"] == {}


def test_sums_in_a_row_whose_readers_are_replaced(device):
    """Groups come in any order: the maker of the second sum reads the first one."""

    def program(x, a, w, v):
        y = x + a
        r = y + torch.nn.functional.layer_norm(y, (WIDTH,)) @ w
        q = torch.nn.functional.layer_norm(r, (WIDTH,)) @ v
        return (r + q).sum(0), y[:1] * 2.0

    x, a = torch.randn(2, ROWS, WIDTH, device=device)
    w, v = torch.randn(2, WIDTH, WIDTH, device=device) / WIDTH**0.5
    found = torch.compile(program, backend="tsfuser")(x, a, w, v)
    exact = program(*(t.double() for t in (x, a, w, v)))
    for ours, eager, value in zip(found, program(x, a, w, v), exact):
        assert_matches(ours, eager, value, ops=ROWS)


def test_operands_that_are_read_twice_are_looked_at_once():
    """Forty doublings in a row have 2**40 paths to the operand."""
    lines = [f"  %{k + 1} : Float(8, 8) = aten::add(%{k}, %{k}, %one)" for k in range(40)]
    graph = torch._C.parse_ir(
        "\n".join(
            ["graph(%0 : Float(8, 8)):", "  %one : int = prim::Constant[value=1]()", *lines, "  return (%40)"]
        )
    )
    assert cheap_sums._chain(graph, next(graph.outputs())) is None
