"""Which tensors of a graph belong to its groups, so that results may be written over them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.allocations import allocations
from kit.support import assert_matches
from tsfuser.frontends.dynamo import compile as door
from tsfuser.frontends.dynamo.groups.dead import mark_dead_inputs
from tsfuser.frontends.dynamo.program import compile_graph

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


def chain(x, w):
    y = F.gelu(x @ w) * 2
    y = torch.softmax(y @ w, -1) + 1
    return (y @ w).tanh() * 2


@pytest.mark.graphs
def test_what_a_graph_makes_is_written_over(device):
    """Three products, and nothing for the groups behind them; two of the products live at one time."""
    x, w = (torch.randn(256, 256, device=device) for _ in range(2))
    run = torch.compile(chain, backend="tsfuser")
    before = x.clone(), w.clone()
    for _ in range(3):
        assert_matches(run(x, w), chain(x, w), chain(x.double(), w.double()), ops=1 << 16)
    each = x.nbytes
    made, peak = allocations(lambda: run(x, w), device)
    assert 3 * each <= made < 4 * each and peak < 3 * each
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256), nn.Tanh())

    def forward(self, x):
        return self.layers(x) * 2


def step(run, model, x, **how):
    """The loss's gradients."""
    loss = run(x).square().sum()
    loss.backward(**how)
    return [p.grad for p in model.parameters()], loss


def without_marks(monkeypatch):
    from tsfuser.frontends.dynamo.groups import passes

    monkeypatch.setattr(passes, "mark_dead_inputs", lambda *given: [])


@pytest.mark.graphs
def test_a_training_step_takes_less_memory_and_gives_the_same(device, monkeypatch):
    torch.manual_seed(1)
    model, x = Net().to(device), torch.randn(1024, 256, device=device)
    found = []
    for unmarked in (False, True):
        if unmarked:
            torch._dynamo.reset()
            without_marks(monkeypatch)
        run = torch.compile(model, backend="tsfuser")
        for _ in range(3):
            model.zero_grad()
            gradients, _ = step(run, model, x)
            gradients = [g.clone() for g in gradients]

        def once(run=run):
            step(run, model, x)

        found.append((*allocations(once, device), gradients))
    (made, peak, ours), (made_before, peak_before, theirs) = found
    wide = 1024 * 2048 * 4
    assert made <= made_before - wide and peak <= peak_before - wide // 2
    for a, b in zip(ours, theirs):
        assert_matches(a, b, ops=1 << 10)


def repeated(run, model, x):
    """Three backwards of one loss add up to three gradients."""
    model.zero_grad()
    expected = [g.clone() for g in step(model, model, x)[0]]
    model.zero_grad()
    loss = run(x).square().sum()
    for times in (1, 2, 3):
        loss.backward(retain_graph=times < 3)
        for p, g in zip(model.parameters(), expected):
            assert_matches(p.grad, times * g, ops=1 << 16)


@pytest.mark.graphs
@pytest.mark.parametrize("donates", [True, False])
def test_a_backward_that_runs_twice(donates, device):
    """What is saved stays as it is where the first backward is to be repeated; or torch refuses to repeat one
    that was promised to have what is saved."""
    with torch._functorch.config.patch(donated_buffer=donates):
        model, x = Net().to(device), torch.randn(64, 256, device=device)
        run = torch.compile(model, backend="tsfuser")
        for _ in range(2):
            repeated(run, model, x)
        torch._dynamo.reset()
        run = torch.compile(model, backend="tsfuser")
        for _ in range(2):
            step(run, model, x)
        if not donates:
            return repeated(run, model, x)
        with pytest.raises(RuntimeError, match="donated"):
            run(x).sum().backward(retain_graph=True)


@pytest.mark.graphs
def test_a_backward_inside_of_a_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    model, x = Net().to(device), torch.randn(64, 256, device=device, requires_grad=True)
    run = torch.compile(model, backend="tsfuser")

    def gradients(function):
        x.grad = None
        model.zero_grad()
        checkpoint(
            function, checkpoint(function, x, use_reentrant=False), use_reentrant=False
        ).sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    expected = gradients(model)
    for _ in range(3):
        for a, b in zip(gradients(run), expected):
            assert_matches(a, b, ops=1 << 16)


@pytest.mark.graphs
def test_check_compares_with_ops_of_intact_operands():
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    report = tsfuser.check(torch.compile(chain, backend="tsfuser"), x, w)
    assert report.compared and not report.unfused


@pytest.mark.graphs
@pytest.mark.parametrize("mode, gives", [(None, True), ("reduce-overhead", False)])
def test_saved_tensors_belong_to_the_backward_but_for_cuda_graphs(mode, gives, monkeypatch):
    """Whose trees know the addresses of the tensors that a forward has saved."""
    known = []

    def recorded(module, settings, origin, donated, *others):
        known.append((origin.role, bool(donated)))
        return compile_graph(module, settings, origin, donated, *others)

    monkeypatch.setattr(door, "compile_graph", recorded)
    model, x = Net(), torch.randn(64, 256)
    step(torch.compile(model, backend="tsfuser", mode=mode), model, x)
    assert known == [("forward", False), ("backward", gives)]


BIG = "Float(64, 32, strides=[32, 1], requires_grad=0, device=cpu)"


@pytest.fixture
def send():
    """An op that may go on reading its operand on a stream of its own: the backward knows nothing of it."""
    library = torch.library.Library("tsfuser_reuse_test", "FRAGMENT")
    library.define("send(Tensor x) -> Tensor")
    library.impl("send", lambda x: x.sum(), "CompositeExplicitAutograd")
    op = torch.ops.tsfuser_reuse_test.send
    torch.library.register_autograd(op.default, lambda ctx, g: None, lib=library)
    yield op
    library._destroy()


SEEN = {
    "nothing": lambda send, p: 0,
    "operand": lambda send, p: send(p),
    "view": lambda send, p: send(p.t()),
}


@pytest.mark.graphs
@pytest.mark.parametrize("seen", SEEN)
def test_what_an_op_of_others_has_seen_does_not_belong_to_the_backward(seen, send, device, monkeypatch):
    def function(x, w):
        product = x @ w
        return F.gelu(product).square().sum() + SEEN[seen](send, product)

    known = {}

    def recorded(module, settings, origin, donated, *others):
        taken = [node.name for node in module.graph.find_nodes(op="placeholder")]
        known[origin.role] = {taken[k] for k in donated}
        return compile_graph(module, settings, origin, donated, *others)

    monkeypatch.setattr(door, "compile_graph", recorded)
    x = torch.randn(8, 8, device=device)
    w, other = (torch.ones(8, 8, device=device, requires_grad=True) for _ in range(2))
    torch.compile(function, backend="tsfuser")(x, w).backward()
    function(x, other).backward()
    assert_matches(w.grad, other.grad, ops=64)
    assert known["backward"] == ({"mm"} if seen == "nothing" else set())


MARKED = f"""
graph(%a : {BIG}, %b : {BIG}):
  %x : {BIG} = aten::tanh(%a)
  %y : {BIG} = mine::group(%x, %b)
  %z : {BIG} = aten::exp(%y)
  return (%z)
"""


INSIDE = f"""
graph(%x : {BIG}, %b : {BIG}):
  %y : {BIG} = aten::atan2(%x, %b)
  return (%y)
"""
STORING = INSIDE.replace("return (%y)", f"%z : {BIG} = tsfuser::store(%b, %y)\n  return (%z)")


def dead(text, donated=(), batched=False):
    """What the group in the place of `mine::group` says, and the inputs of the graph over which it may
    write."""
    graph = torch._C.parse_ir(text)
    place = graph.findNode("mine::group")
    group = graph.create("prim::CudaFusionGroup", list(place.inputs()), 1)
    group.insertBefore(place)
    group.g_("Subgraph", torch._C.parse_ir(INSIDE))
    group.output().setType(place.output().type())
    place.output().replaceAllUsesWith(group.output())
    place.destroy()
    if batched:
        group.i_("batch", 0)
    given = mark_dead_inputs(graph, donated)
    return (group.i("dead") if group.hasAttribute("dead") else 0), given


def test_inputs_that_nobody_reads_later_are_dead():
    assert dead(MARKED) == (0b01, [])
    assert dead(MARKED, donated=[1]) == (0b11, [1])
    assert dead(MARKED, donated=[0]) == (0b01, [])  # %a is no input of the group
    assert dead(MARKED.replace("group(%x, %b)", "group(%x, %x)")) == (0b11, [])  # C++ counts who holds it
    assert dead(MARKED.replace("(%z)", "(%z, %x)")) == (0, [])
    assert dead(MARKED.replace("exp(%y)", "mul(%y, %x)")) == (0, [])
    assert dead(MARKED, batched=True) == (0, [])
    unread = MARKED.replace("graph(", f"graph(%unread : {BIG}, ")
    assert dead(unread, donated=[0, 2]) == (0b11, [2])  # the simplified graph needs no such input


def test_what_is_stored_over_an_input_keeps_its_memory():
    graph = torch._C.parse_ir(MARKED)
    place = graph.findNode("mine::group")
    groups = []
    for name, subgraph in (("storing", STORING), ("reading", INSIDE)):
        operands = list(place.inputs()) if name == "storing" else [groups[0].output(), place.inputsAt(1)]
        group = graph.create("prim::CudaFusionGroup", operands, 1)
        group.insertBefore(place)
        group.g_("Subgraph", torch._C.parse_ir(subgraph))
        group.output().setType(place.output().type())
        groups.append(group)
    place.output().replaceAllUsesWith(groups[1].output())
    place.destroy()
    assert mark_dead_inputs(graph) == []
    assert groups[0].i("dead") == 0b01 and not groups[1].hasAttribute("dead")


def test_a_view_that_is_read_later_keeps_its_memory():
    view = MARKED.replace("  %y :", f"  %t : {BIG} = aten::t(%x)\n  %y :")
    assert dead(view) == (0b01, [])
    assert dead(view.replace("exp(%y)", "mul(%y, %t)")) == (0, [])
    assert dead(view.replace("group(%x, %b)", "group(%t, %b)")) == (0b01, [])


def test_what_other_ops_have_seen_keeps_its_memory():
    """They may read it on another stream; and one without tensors may be a change of the stream."""
    foreign = MARKED.replace("  %y :", "  %u : Tensor = mine::send(%x)\n  %y :")
    assert dead(foreign) == (0, []) and dead(foreign, donated=[1]) == (0b10, [1])
    assert dead(MARKED.replace("aten::tanh(%a)", "mine::receive(%a)")) == (0, [])
    assert dead(MARKED.replace("  %z :", "  %u : int = mine::switch()\n  %z :"), donated=[1]) == (0, [])
