"""`tsfuser.explain` and `tsfuser.check` of functions that torch.compile compiled.

The reports are about graphs, not kernels, so the fibers are left to `--long`."""

import pytest
import torch
from torch import nn

import tsfuser
from tsfuser.debug.calls import collected
from tsfuser.frontends.dynamo import program as dynamo_program

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        y = torch.relu(self.linear(x)) * 2
        return self.norm(y + x)


def line_of(text):
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_forward_and_backward_groups_kernels_and_reasons_with_the_users_lines(device):
    found = tsfuser.explain(compiled(Block().to(device)), torch.randn(4, 6, device=device))
    forward, backward = found.graphs
    assert (found.name, forward.title, backward.title) == ("Block", "graph 1, forward", "graph 1, backward")
    (group,) = forward.groups
    assert {"aten::relu", "aten::mul", "aten::add"} <= {node.kind for node in group.nodes}
    assert group.kernels and all(kernel.seconds > 0 for kernel in group.kernels)
    places = {node.place.line for node in group.nodes}
    assert places == {line_of("y = torch.relu("), line_of("return self.norm(y")}
    (product,) = [node for node in forward.left_out if node.kind == "aten::addmm"]
    assert product.place.line == line_of("y = torch.relu(") and product.reason.startswith("a matrix product")
    assert all(kernel for kernel in backward.groups[0].kernels)
    assert not [node for node in found.left_out if "no reason was noted" in node.reason]
    at = {item: k for k, item in enumerate(forward.items)}
    assert (at[product], at[group]) in forward.edges
    assert "graph 1, backward" in str(found) and "Graph 1, backward" in found.to_html()


def test_breaks_and_what_python_runs_are_told_with_their_lines():
    def function(x):
        y = torch.relu(x) + 1
        torch._dynamo.graph_break()
        z = torch.sin(y) * 2
        z = torch.cond(z.sum() > 0, lambda z: z.sin() + 1, lambda z: z.cos() * 2, (z,))
        return torch.softmax(z * 2, -1)

    found = tsfuser.explain(compiled(function), torch.randn(4, 4))
    assert [graph.title for graph in found.graphs] == ["graph 1, inference", "graph 2, inference"]
    (broken,) = found.breaks
    assert broken.place.text == "torch._dynamo.graph_break()" and "graph_break" in broken.reason
    assert "1 graph break" in str(found) and broken.reason in found.to_html().replace("&#x27;", "'")
    second = found.graphs[1]
    (cond,) = second.left_out
    assert cond.kind == "cond" and cond.reason.startswith("control flow that data decide")
    assert cond.place.text.startswith("z = torch.cond(")
    at = {id(item): k for k, item in enumerate(second.items)}
    before, after = second.groups[0], second.groups[-1]
    assert (at[id(before)], at[id(cond)]) in second.edges
    assert (at[id(cond)], at[id(after)]) in second.edges


@pytest.mark.passes_fail
def test_a_graph_that_the_backend_gives_up_on_is_told_with_the_reason(monkeypatch):
    def broken(*given):
        raise RuntimeError("out of order")

    monkeypatch.setattr(dynamo_program, "fuse", broken)
    with pytest.warns(tsfuser.TsfuserWarning, match="gave up on a graph.*out of order"):
        found = tsfuser.explain(compiled(lambda x: x.exp() + 1), torch.randn(4))
    assert [(n.kind, n.reason) for n in found.left_out] == [
        ("aten::exp", "compile_graph: RuntimeError: out of order"),
        ("aten::add", "compile_graph: RuntimeError: out of order"),
    ]


@pytest.mark.parametrize("look", [tsfuser.explain, tsfuser.check])
def test_nothing_of_the_callers_changes(look):
    block = Block()
    model, x = compiled(block), torch.randn(4, 6, requires_grad=True)
    model(x).sum().backward()
    x.grad = None
    state = {name: value.clone() for name, value in block.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in block.parameters()]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    generator = torch.random.get_rng_state()
    for n in (4, 4, 7, 9):
        look(model, torch.randn(n, 6, generator=torch.Generator().manual_seed(0), requires_grad=True))
    assert torch.equal(generator, torch.random.get_rng_state()) and x.grad is None
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(block.parameters(), gradients))
    looked = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert looked > graphs  # of the copies
    with torch.compiler.set_stance("fail_on_recompile"):
        model(x)


def test_sizes_that_were_looked_at_do_not_make_the_functions_own_graphs_dynamic():
    function = lambda x: x.exp() + 1
    model = compiled(function)
    for n in (3, 4, 5):
        tsfuser.explain(model, torch.randn(n))
    for n in (6, 7, 8):
        model(torch.randn(n))
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    assert len(entries) == 2  # one for 6, one for all sizes


def test_a_step_of_training_that_a_function_closes_over_is_made_by_copies():
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), 0.5)

    @torch.compile(backend="tsfuser")
    def step(x):
        loss = block(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = block.linear.weight.detach().clone()
    found = tsfuser.explain(step, torch.randn(4, 6))
    assert torch.equal(block.linear.weight, before) and block.linear.weight.grad is None
    assert found.name == "step" and any(graph.title.endswith("backward") for graph in found.graphs)


class Decorated(nn.Module):
    @torch.compile(backend="tsfuser")
    def forward(self, x, *, scale):
        return torch.tanh(x * scale) + 1


def torchs_in_place():
    model = nn.Sequential(nn.Tanh(), nn.LayerNorm(6))
    model.compile(backend="tsfuser")
    return model


def in_place():
    model = Block()
    model.compile(backend="tsfuser")
    return model


@pytest.mark.parametrize(
    "make, name, given",
    [
        (lambda: compiled(Block().forward), "Block", {}),
        (lambda: compiled(nn.Sequential(nn.Tanh(), nn.LayerNorm(6))), "Sequential", {}),
        (lambda: compiled(nn.LayerNorm(6).forward), "LayerNorm", {}),
        (in_place, "Block", {}),
        (torchs_in_place, "Sequential", {}),
        (Decorated, "Decorated", {"scale": 2.0}),
        (lambda: compiled(torch.nn.functional.gelu), "gelu", {"approximate": "tanh"}),
        (lambda: compiled(lambda x: x.exp() + 1, options={"recompute": False}), "<lambda>", {}),
    ],
    ids=[
        "method",
        "torch's module",
        "torch's method",
        "in place",
        "torch's in place",
        "decorated",
        "torch's function",
        "options",
    ],
)
def test_whatever_torch_compile_takes(make, name, given):
    found = tsfuser.explain(make(), torch.randn(4, 6), **given)
    assert found.name == name and len(found.graphs) in (1, 2) and found.graphs[0].items


def test_options_are_kept():
    function = compiled(lambda x: x.exp() * 2 + 1, options={"skip": ["aten::exp"]}, dynamic=True)
    (node,) = tsfuser.explain(function, torch.randn(4)).left_out
    assert node.kind == "aten::exp" and "skip" in node.reason


@pytest.mark.parametrize("look", [tsfuser.explain, tsfuser.check])
def test_other_backends_are_errors(look):
    with pytest.raises(TypeError, match='Linear is compiled by the backend eager: .*backend="tsfuser"'):
        look(torch.compile(nn.Linear(2, 2), backend="eager"), torch.ones(2, 2))
    with pytest.raises(TypeError, match="relu is compiled by the backend inductor"):
        look(torch.compile(torch.relu), torch.ones(2))
    with pytest.raises(TypeError, match="excluded from it"):
        look(torch.compiler.disable(lambda x: x + 1), torch.ones(2))


def test_check_compares_groups_and_all_results_and_gradients_with_eager(device):
    report = tsfuser.check(compiled(Block().to(device)), torch.randn(4, 6, device=device, requires_grad=True))
    assert report, report
    # a result, and gradients of the input and four parameters
    assert len(report.compared) >= 2 and report.eager == 6
    assert "its results and gradients (6) are eager's" in str(report)


def test_check_finds_what_is_wrong_outside_of_groups(monkeypatch):
    """A translation that swaps a constant: groups do what their nodes say, which is not what the program
    says."""
    original = dynamo_program.REWRITES[0]

    def wrong(module):
        original(module)
        for node in module.graph.nodes:
            if str(node.target).startswith("aten.mul."):
                node.args = (node.args[0], 3)

    monkeypatch.setattr(dynamo_program, "REWRITES", (wrong, *dynamo_program.REWRITES[1:]))
    report = tsfuser.check(compiled(lambda x: torch.relu(x) * 2 + 1), torch.randn(8))
    assert not report and report.difference.group == -1
    assert "result 0 of the program is not eager's" in str(report)


def test_check_leaves_random_programs_to_their_groups():
    report = tsfuser.check(compiled(lambda x: torch.rand_like(x.exp() * 2) + 1), torch.ones(64))
    assert report.random and report.eager == 0


def test_check_compares_groups_with_a_dropout_whose_seed_is_an_argument():
    report = tsfuser.check(compiled(lambda x: nn.functional.dropout(x.exp() * 2, 0.5) + 1), torch.ones(64))
    assert report.compared and not report.random and report.eager == 0


def test_the_compiled_functions_that_a_program_calls_are_collected():
    with collected() as calls:
        module = torch.compile(Block(), backend="tsfuser")

        @torch.compile(backend="tsfuser")
        def scaled(x, *, by):
            return torch.tanh(x * by)

        in_place = nn.Sequential(nn.Tanh(), nn.Softmax(1))
        in_place.compile(backend="tsfuser")
        other = torch.compile(lambda x: x + 1, backend="eager")
        for n in (4, 5):
            for function in (module, in_place, other):
                function(torch.randn(n, 6))
        scaled(torch.ones(3), by=2.0)
    assert [call.name for call in calls] == ["Block", "Sequential", "scaled"]
    assert calls[0].args[0].shape == (4, 6) and calls[2].kwargs == {"by": 2.0}
    for call in calls:
        with call.mode():
            assert tsfuser.explain(call.function, *call.args, **call.kwargs).groups
    assert "collected" not in torch.compile.__qualname__


def test_a_call_that_computes_nothing_is_not_told_as_one_that_is_unfused():
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)  # parameters have no gradients
    found = str(tsfuser.explain(torch.compile(optimizer.step, backend="tsfuser")))
    assert found.startswith("step: this call computes nothing, as an optimizer's step without gradients\n")
