"""`tsfuser.warm`: kernels of a program before its first call, which finds them, and its state as it was."""

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import counted, no_fallback, run_python, script

pytestmark = [pytest.mark.usefixtures("forgotten"), pytest.mark.graphs]

SOURCE = """
def f(x, w, scale: float = 2.0):
    return torch.softmax(x * w + scale, -1)
"""


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(torch.relu(self.norm(self.linear(x))), 0.5, self.training) * 2.0


def compiles_nothing(run):
    with no_fallback(), counted() as rise:
        found = run()
    assert rise["kernels_compiled"] == rise["disk_hits"] == 0 and rise["launches"] > 0
    return found


def test_calls_of_a_scripted_function_compile_nothing(device):
    f, plain = script(SOURCE), script(SOURCE)
    x, w = torch.randn(8, 33, device=device), torch.randn(33, device=device)
    tsfuser.warm(f, (x, w), {"x": x.t().contiguous().t(), "w": w, "scale": 0.5})
    with tsfuser.fuser():
        for given in ((x, w), (x.t().contiguous().t(), w, 0.5), (torch.randn(5, 33, device=device), w)):
            found = compiles_nothing(lambda: [f(*given) for _ in range(4)][-1])
            torch.testing.assert_close(found, plain(*given))


@pytest.mark.parametrize("way", ["scripted", "compiled"])
@pytest.mark.parametrize("training", [False, True])
def test_modules_and_random_generators_stay_as_they_are(device, way, training):
    torch.jit._recursive.concrete_type_store.type_store.clear()  # a class of its own, with its own graphs
    module = Normed().to(device).train(training)
    module.linear.weight.grad = torch.ones_like(module.linear.weight)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    run = torch.jit.script(module) if way == "scripted" else torch.compile(module, backend="tsfuser")
    x = torch.randn(16, 6, device=device)
    state = torch.random.get_rng_state()
    tsfuser.warm(run, (x,), training=training)
    assert torch.equal(state, torch.random.get_rng_state())
    for name, t in module.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert torch.equal(module.linear.weight.grad, torch.ones_like(module.linear.weight))
    assert module.linear.bias.grad is None and x.grad is None

    def step():
        with tsfuser.fuser(), torch.set_grad_enabled(training):
            result = run(x)
            if training:
                result.backward(torch.ones_like(result))

    compiles_nothing(lambda: [step() for _ in range(4)])


def test_another_process_with_the_same_cache_compiles_nothing(tmp_path):
    program = """
import os, torch, tsfuser
@torch.jit.script
def f(x):
    return torch.sigmoid(x * 3.0 + 1.0)
x = torch.randn(4, 9)
if "WARM" in os.environ:
    tsfuser.warm(f, (x,))
else:
    with tsfuser.fuser():
        for _ in range(4):
            f(x)
    assert tsfuser.stats()["launches"], tsfuser.stats()
print("compiled", tsfuser.stats()["kernels_compiled"])
"""
    cache = str(tmp_path / "cache")
    for environment, compiled in (({"WARM": "1"}, 1), ({}, 0)):
        status, said, errors = run_python(tmp_path, program, TSFUSER_CACHE_DIR=cache, **environment)
        assert status == 0 and f"compiled {compiled}" in said, said + errors


@pytest.mark.parametrize("examples", [(), (torch.ones(3),), ([torch.ones(3)],), (3,)])
def test_what_is_no_example_is_said(examples):
    with pytest.raises(TypeError, match=r"tsfuser\.warm\(function, \(x,\)\)"):
        tsfuser.warm(script(SOURCE), *examples)


def test_what_the_program_raises_is_raised():
    with pytest.raises(RuntimeError, match="size"):
        tsfuser.warm(script(SOURCE), (torch.ones(2, 3), torch.ones(4)))
    with pytest.raises(TypeError, match="argument"):
        tsfuser.warm(script(SOURCE), {"y": torch.ones(3)})
    with pytest.raises(TypeError, match="torch.jit.script or of torch.compile"):
        tsfuser.warm(3, (torch.ones(3),))
