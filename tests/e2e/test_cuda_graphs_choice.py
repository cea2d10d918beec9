"""`mode="reduce-overhead"`: which graphs become CUDA graphs, decided on fake CUDA tensors; on CPU tensors the
mode changes nothing. tests/gpu/test_reduce_overhead.py replays them."""

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.graphs


def traced(function, *devices):
    """An FX graph of `function` on fake tensors of these devices."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(4, 4, device=device) for device in devices))


def choose(monkeypatch, module, role, graphs=None, static=0):
    """What `recorded` does with the module: `recorded` or `as it is`."""
    from torch._inductor import cudagraph_trees

    given = {}

    def recorded(call, inputs, static, **choices):
        given.update(choices, static=list(static))
        return lambda args: call(args)

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", recorded)
    before = counters["inductor"]["cudagraph_skips"]
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]

    def call(args):
        return "called"

    made = (graphs or CudaGraphs()).recorded(call, module, inputs, role)
    assert made([]) == "called"
    skipped = counters["inductor"]["cudagraph_skips"] - before
    assert not (given and skipped)
    return given or ("skipped" if skipped else "as it is")


def in_place(x):
    x.mul_(2)
    return x + 1


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    "function, devices",
    [
        (lambda x, y: (x + 1, y * 2), ["cuda", "cpu"]),
        pytest.param(
            lambda x, y: (x + 1, y * 2),
            ["cuda:0", "cuda:1"],
            marks=pytest.mark.skipif(
                torch.cuda.device_count() == 1, reason="torch makes a context, so this wants two GPUs or none"
            ),
        ),
        (in_place, ["cuda"]),
        (branches, ["cuda"]),
    ],
    ids=["a CPU tensor", "two devices", "in place", "Python's"],
)
def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch, function, devices):
    assert choose(monkeypatch, traced(function, *devices), "inference") == "skipped"


def test_sizes_that_vary_are_not_recorded(monkeypatch):
    varying, real = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2), torch.empty(5, 4)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.from_tensor(real, symbolic_context=varying).shape[0]
        values = size, torch.empty(size, 4, device="cuda")
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("s0", "x")]
        nodes.append(graph.call_function(torch.ops.aten.mul.Tensor, (nodes[1], nodes[0])))
        for node, value in zip(nodes, (*values, values[1])):
            node.meta["val"] = value
        graph.output((nodes[-1],))
    module = fx.GraphModule({}, graph)
    assert isinstance(size, torch.SymInt)
    assert choose(monkeypatch, module, "inference") == "skipped"


def test_a_graph_on_one_device_is_recorded(monkeypatch):
    found = choose(monkeypatch, traced(lambda x, y: torch.relu(x @ y) + 1, "cuda", "cuda"), "inference")
    assert (found["is_inference"], found["is_backward"], found["device_index"]) == (True, False, 0)
    assert found["static"] == [] and found["mutated_input_idxs"] == set()


def test_a_backward_is_recorded_where_its_forward_is(monkeypatch):
    module = traced(lambda saved, tangents_1: saved * tangents_1, "cuda", "cuda")
    assert choose(monkeypatch, module, "backward") == "as it is"
    graphs = CudaGraphs()
    assert choose(monkeypatch, module, "forward", graphs)["is_backward"] is False
    found = choose(monkeypatch, module, "backward", graphs)
    assert found["is_backward"] is True and found["static"] == [0]  # what the forward saved


def test_on_cpu_tensors_the_mode_changes_nothing():
    torch._dynamo.reset()
    tsfuser.reset()
    before = counters["inductor"]["cudagraph_skips"]
    function = torch.compile(lambda x: torch.tanh(x * 2) + 1, backend="tsfuser", mode="reduce-overhead")
    for n in (4, 4, 6):
        x = torch.randn(n, requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert_matches(y.detach(), (torch.tanh(x * 2) + 1).detach(), ops=4)
    assert tsfuser.stats()["launches"] > 0 and counters["inductor"]["cudagraph_skips"] == before
    torch._dynamo.reset()  # the backend's own `reset`
