"""Graphs inside of torch's own files: a process that reads them traces nothing. Results are compared with
eager."""

import io
import os

import pytest
import torch

import tsfuser
from kit import stored_graphs as programs
from kit.support import assert_matches, run_python
from tsfuser import options

pytestmark = [pytest.mark.usefixtures("forgotten", "store", "fused_or_error"), pytest.mark.graphs]

ROWS = """
import sys, torch, tsfuser
from torch._dynamo.utils import counters
from kit import stored_graphs as programs

torch.manual_seed(3)
block, still = programs.Block(), programs.Counting().eval().requires_grad_(False)
trained, used = (torch.compile(m, backend="tsfuser") for m in (block, still))
x = torch.randn(5, 16, requires_grad=True)
y, z = trained(x), used(x.detach()[:, :6])
gradient = torch.autograd.grad(y.square().sum(), x)[0]
torch.compiler.save_cache_artifacts()
counted = counters["stats"]["unique_graphs"], tsfuser.stats()["graphs_read"], tsfuser.stats()["fallbacks"]
torch.testing.assert_close(y, block(x))
torch.testing.assert_close(z, still(x.detach()[:, :6]))
torch.testing.assert_close(gradient, torch.autograd.grad(block(x).square().sum(), x)[0])
print(*counted)
"""


@pytest.fixture(autouse=True)
def asked_for():
    """torch 2.11 wants to be asked for `aot_compile`."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


keeps_guards = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 cannot read what it writes of default arguments"
)


#: What torch makes of TORCH_CACHING_PRECOMPILE=1 when it is imported.
SWITCHED_ON = "import torch._dynamo.config\ntorch._dynamo.config.caching_precompile = True\n"


def in_processes(tmp_path, source, *others):
    """What each of several processes writes that keep TorchDynamo's results, with `others` in its
    environment, and their warnings."""
    found = []
    for other in others:
        environment = dict(
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),
            TSFUSER_CACHE_DIR=str(tmp_path / "cache"),
            TSFUSER_STORED_GRAPHS="1",
            PYTHONPATH=os.pathsep.join(os.sys.path),
        )
        status, out, errors = run_python(tmp_path, source, **environment, **other)
        assert status == 0, errors
        found.append((out.strip(), errors))
    return found


@keeps_guards
def test_a_second_process_traces_nothing(tmp_path):
    (first, _), (second, _) = in_processes(tmp_path, ROWS, *[{"TORCH_CACHING_PRECOMPILE": "1"}] * 2)
    assert first == "2 0 {}" and second == "0 2 {}"


@keeps_guards
def test_a_process_with_another_option_compiles_anew(tmp_path):
    (first, _), (second, errors) = in_processes(
        tmp_path, SWITCHED_ON + ROWS, {}, {"PYTORCH_NVFUSER_DISABLE": "fma"}
    )
    assert first == second == "2 0 {}"
    assert "other versions or options of tsfuser or torch" in errors


def written_and_read(function, args, dynamic=False):
    """The function, compiled, written to bytes and read from them, and the first one."""
    from torch._dynamo.aot_compile import AOTCompiledFunction

    compiled = torch.compile(function, fullgraph=True, backend="tsfuser", dynamic=dynamic)
    made = compiled.aot_compile((args, {}))
    data = AOTCompiledFunction.serialize(made).serialized_data
    torch._dynamo.reset()
    tsfuser.reset()
    return torch.compiler.load_compiled_function(io.BytesIO(data)), made


def product(x, y):
    return torch.softmax(x * y + 1, -1).sort(0)[0] * 2


def two(x, y):
    return {"a": (x * y).sin(), "b": [x.t().exp(), 3]}


def written(x, y):
    y.add_(x * 2)
    return y.sigmoid()


CASES = {
    "softmax": (product, True),
    "inference": (product, False),
    "structure": (two, True),
    "in place": (written, False),
    "autocast inside": (programs.mixed, True),
}


@pytest.mark.parametrize("name", CASES)
def test_functions_of_a_file(name):
    function, grad = CASES[name]
    x, y = torch.randn(4, 4, requires_grad=grad), torch.randn(4, 4)
    eager_y = y.clone()
    wanted = function(x, eager_y)
    read, made = written_and_read(function, (x, y.clone()))
    assert tsfuser.stats()["graphs_read"] == 1
    for run in (read, made):
        given = y.clone()
        found = run(x, given)
        assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(wanted)
        assert_matches(given, eager_y, ops=10)
        pairs = [
            (ours, eager)
            for ours, eager in zip(*map(torch.utils._pytree.tree_leaves, (found, wanted)))
            if isinstance(eager, torch.Tensor)
        ]
        for ours, eager in pairs:
            assert_matches(ours.detach(), eager.detach(), ops=20)
        if grad:
            sums = (sum(tensor.square().sum() for tensor in tensors) for tensors in zip(*pairs))
            ours, eager = (
                torch.autograd.grad(total, x, retain_graph=k == 1)[0] for k, total in enumerate(sums)
            )
            assert_matches(ours, eager, ops=100, strides=False)


def test_a_graph_of_a_file_serves_other_sizes():
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    read, _ = written_and_read(product, (x, y), dynamic=None)
    for rows in (4, 7, 33):
        x, y = torch.randn(rows, 6, requires_grad=True), torch.randn(rows, 6)
        assert_matches(read(x, y).detach(), product(x, y).detach(), ops=50)
        ours, eager = (torch.autograd.grad(f(x, y).square().sum(), x)[0] for f in (read, product))
        assert_matches(ours, eager, ops=200)
    assert tsfuser.stats()["graphs_read"] == 1


def test_a_module_of_a_file():
    block, x = programs.Block().eval(), torch.randn(5, 16)
    made = torch.compile(block, fullgraph=True, backend="tsfuser").forward.aot_compile(((x,), {}))
    data = type(made).serialize(made).serialized_data
    tsfuser.reset()
    read = torch.compiler.load_compiled_function(io.BytesIO(data))
    with torch.no_grad():
        block.up.weight.mul_(2)  # the module of the process that reads is the one that counts
    assert_matches(read(block, x).detach(), block(x).detach(), ops=200)


def shares(x, y):
    return x * 2 + y


@pytest.mark.parametrize(
    "kept, reason", [(True, "two arguments share memory"), (False, "TSFUSER_STORED_GRAPHS is off")]
)
def test_what_cannot_be_written_runs_and_says_so(kept, reason):
    x = torch.randn(4, 6)
    with options.override(stored_graphs=kept):
        compiled = torch.compile(shares, fullgraph=True, backend="tsfuser").aot_compile(((x, x[:]), {}))
        assert_matches(compiled(x, x[:]), shares(x, x), ops=5)
        with pytest.raises(RuntimeError, match=f"cannot write this graph to a file: .*{reason}"):
            type(compiled).serialize(compiled)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\x80"]
)
def test_damaged_content_is_an_error_that_torch_catches(damage):
    from tsfuser.frontends.dynamo.stored import precompiled

    read, _ = written_and_read(product, (torch.randn(3, 4), torch.randn(3, 4)))
    content = read._artifacts.compiled_fn._content
    with pytest.raises(RuntimeError, match="cannot be read"):
        precompiled.load(damage(content))


def test_a_graph_that_torch_does_not_take_runs_all_the_same(monkeypatch):
    from torch._dynamo.precompile_context import PrecompileContext

    asked = []

    def refuse(artifact):
        asked.append(artifact)
        raise ValueError("no")

    monkeypatch.setattr(PrecompileContext, "record_artifact", refuse)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch._dynamo.config.patch(caching_precompile=True):
        found = torch.compile(product, backend="tsfuser")(x, y)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert asked
    assert_matches(found.detach(), product(x, y).detach(), ops=50)
    assert_matches(gradient, torch.autograd.grad(product(x, y).square().sum(), x)[0], ops=200)
