"""Compiled graphs of which Python runs a part are read from disk as others are."""

import operator

import pytest
import torch
from torch import fx

import tsfuser
from kit.stored_graphs import again, empty_store
from kit.support import assert_matches, run_python
from tsfuser.errors import Refusal
from tsfuser.frontends.dynamo.stored import fx_record

SOURCE = """
import torch

@torch.library.custom_op("stored_pieces::add_to", mutates_args={"x"})
def add_to(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    x.add_(y, alpha=scale)

@add_to.register_fake
def _(x, y, scale):
    return None

def writes(x, y):
    z = torch.relu(x + 1).detach() * 2
    add_to(z, y.detach(), 2.0)
    return (z * 3 - x).sigmoid(), y * x

def branches(x, y):
    z = torch.relu(x + 1) * y
    z = torch.cond(y.sum() > 0, lambda a: a.sin() + 1, lambda a: a.cos() * FACTOR, (z,))
    return (z * 3 - x).tanh(),

FACTOR = 2.0
"""
PROGRAMS = {}
exec(SOURCE, PROGRAMS)


@pytest.fixture(autouse=True)
def store(tmp_path):
    with empty_store(tmp_path / "cache", stored_graphs=True, stored_plans=True) as folder:
        yield folder


def run(function, rows=4, sign=1.0, grad=False):
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(rows, 6, generator=generator) for _ in range(2))
    y = y.abs() * sign
    leaves = [x.requires_grad_(grad), y.requires_grad_(grad)]
    results = function(x, y)
    if grad:
        sum(r.square().sum() for r in results if r.requires_grad).backward()
    return [r.detach() for r in results] + [v.grad for v in leaves if v.grad is not None]


def check(function, compiled, **how):
    for ours, eagers in zip(run(compiled, **how), run(function, **how), strict=True):
        assert_matches(ours, eagers, ops=60)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["writes", "branches"])
def test_what_was_traced_once_is_read(store, name, grad):
    function = PROGRAMS[name]
    check(function, again(function), grad=grad)
    told = tsfuser.stats()
    assert told["left_to_python"] and told["graphs_read"] == 0
    assert len(list(store.glob("??/*.graph"))) == 1
    compiled = again(function)
    for sign in (1.0, -1.0):
        check(function, compiled, grad=grad, sign=sign)
    found = tsfuser.stats()
    assert found["graphs_read"] == 1 and found["left_to_python"] == told["left_to_python"]
    assert found["graphs"] == told["graphs"] and found["launches"] > 0 and not found["fallbacks"]


def test_sizes_that_vary(store):
    function = PROGRAMS["writes"]
    check(function, again(function, dynamic=True))
    compiled = again(function, dynamic=True)
    for rows in (4, 7, 1, 0, 9):
        check(function, compiled, rows=rows)
    assert tsfuser.stats()["graphs_read"] >= 1


def test_no_hit_where_a_branch_differs(monkeypatch):
    function = PROGRAMS["branches"]
    check(function, again(function), sign=-1.0)
    monkeypatch.setitem(PROGRAMS, "FACTOR", 3.0)
    check(function, again(function), sign=-1.0)
    assert tsfuser.stats()["graphs_read"] == 0


def test_two_processes(store, tmp_path):
    source = (
        SOURCE
        + """
import tsfuser
for function in (writes, branches):
    x, y = (torch.arange(24.0).view(4, 6) / 9).requires_grad_(), torch.ones(4, 6)
    z = torch.compile(function, backend="tsfuser")(x, y)[0]
    z.square().sum().backward()
    print(tsfuser.stats()["graphs_read"], z.sum().item(), x.grad.sum().item())
"""
    )
    settings = dict(TSFUSER_CACHE_DIR=str(store), TSFUSER_STORED_GRAPHS="1", TSFUSER_STORED_PLANS="1")
    outputs = [run_python(tmp_path, source, **settings)[1].split() for _ in range(2)]
    assert [outputs[0][k] for k in (0, 3)] == ["0", "0"] and [outputs[1][k] for k in (0, 3)] == ["1", "2"]
    assert outputs[0][1:3] + outputs[0][4:] == outputs[1][1:3] + outputs[1][4:]


def handmade(target=torch.ops.aten.add.Tensor, **more):
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (x, 2, 1))
    first = graph.call_function(operator.getitem, (parts, 0))
    table = graph.get_attr("table")
    joined = graph.call_function(torch.ops.aten.cat.default, ([first, first, table], 1))
    wide = graph.call_function(torch.ops.aten._to_copy.default, (joined,), {"dtype": torch.float64})
    graph.output((graph.call_function(target, (wide, 1.5), more), None, [first]))
    root = torch.nn.Module()
    root.register_buffer("table", torch.arange(3.0).view(3, 1))
    return fx.GraphModule(root, graph)


def test_graphs_come_back():
    module, x = handmade(), torch.randn(3, 4)
    again = fx_record.read(fx_record.write(module))
    (wanted, _, [part]), (found, none, [same]) = module(x), again(x)
    assert torch.equal(found, wanted) and torch.equal(part, same) and none is None
    names = [[(n.op, n.name, n.target) for n in m.graph.nodes] for m in (module, again)]
    assert names[0] == names[1]


def outside(x, y):
    return x + y


UNSURE = {
    "a function of the program": lambda: handmade(outside),
    "an object": lambda: handmade(torch.ops.aten.add.Tensor, alpha=range(3)),
    "a higher-order op": lambda: handmade(torch.ops.higher_order.while_loop),
}


@pytest.mark.parametrize("what", UNSURE)
def test_any_doubt_is_refused(what):
    with pytest.raises(Refusal, match="Python"):
        fx_record.write(UNSURE[what]())


def test_large_tensors_are_refused():
    module = handmade()
    module.table = torch.zeros(1 << 17)
    with pytest.raises(Refusal, match="Python reads table"):
        fx_record.write(module)
