"""What users of torch.compile do beside calling it, with `backend="tsfuser"`: equal to eager."""

import copy

import pytest
import torch
from torch import nn

import tsfuser
from kit.parallel import Block, train_together
from kit.support import assert_matches
from tsfuser.frontends.dynamo.tracing.foreach import foreach_ops

BACKEND = "tsfuser"

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")


def compiled(function, **choices):
    return torch.compile(function, backend=BACKEND, **choices)


def assert_trains_alike(ours, eager, x, steps=2):
    """`ours` and `eager` are callables of modules of their own, with equal parameters."""
    for _ in range(steps):
        for function, _ in (ours, eager):
            function(x).square().mean().backward()
        for a, b in zip(ours[1].parameters(), eager[1].parameters()):
            assert_matches(a.grad, b.grad, ops=64)
        for a, b in zip(ours[1].buffers(), eager[1].buffers()):
            assert_matches(a, b, ops=16)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_an_optimizer_has_one_kernel_for_all_parameters_of_a_class(name):
    """Each step launches it once a parameter: all that happens to one is in one group."""
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {"lr": 0.01})
    exact = nn.Sequential(*[nn.Linear(5 + k, 6 + k) for k in range(4)]).double()
    models = [copy.deepcopy(exact).float(), copy.deepcopy(exact).float(), exact]
    optimizers = [getattr(torch.optim, name)(m.parameters(), foreach=True, **options) for m in models]
    steps = [compiled(optimizers[0].step), optimizers[1].step, optimizers[2].step]
    for _ in range(3):
        x = torch.randn(4, 5)
        for model in models:
            model.zero_grad()
            model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        before = tsfuser.stats()["launches"]
        for step in steps:
            step()
        assert tsfuser.stats()["launches"] - before == 8
        for ours, plain, true in zip(*(m.parameters() for m in models)):
            assert_matches(ours.detach(), plain.detach(), true.detach(), ops=200)
    found = tsfuser.stats()
    assert found["fallbacks"] == {}
    assert (
        found["kernels_compiled"] + found["disk_hits"] <= 4
    )  # of one rank each; SGD's first step is another


def test_ops_on_lists_are_ops_on_tensors_where_one_takes_the_same_arguments():
    from tsfuser.frontends.dynamo.tracing.foreach import foreach_ops, one_by_one

    a, b = ([torch.rand(3) + 0.5, torch.rand(2, 2) + 0.5] for _ in range(2))
    pairs = dict(foreach_ops())
    aten = torch.ops.aten
    for op, args, kwargs in (
        (aten._foreach_add.List, (a, b), {"alpha": 2}),
        (aten._foreach_add.Scalar, (a, 2), {}),
        (aten._foreach_mul.ScalarList, (a, [2, 3.5]), {}),
        (aten._foreach_addcdiv.Scalar, (a, b, a), {"value": 0.5}),
        (aten._foreach_lerp.Scalar, (a, b, 0.25), {}),
        (aten._foreach_pow.ScalarAndTensor, (2.0, a), {}),
        (aten._foreach_sqrt.default, (a,), {}),
    ):
        for ours, plain in zip(one_by_one(op, pairs[op])(*args, **kwargs), op(*args, **kwargs)):
            assert_matches(ours, plain, ops=4)
    assert not any(op._schema.is_mutable for op in pairs)


def test_buffers_change_in_place_and_gradients_accumulate():
    eager = Block()
    model = copy.deepcopy(eager)
    assert_trains_alike((compiled(model), model), (eager, eager), torch.randn(6, 8), steps=3)
    assert model.seen == 3 and tsfuser.stats()["fallbacks"] == {}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_matches(compiled(model.eval())(torch.ones(6, 8)), eager.eval()(torch.ones(6, 8)), ops=64)


def _save_products(*_):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.mm.default])


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpoints(selective):
    from torch.utils.checkpoint import checkpoint

    choices = {"context_fn": _save_products} if selective else {}
    eager = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())
    model = copy.deepcopy(eager)

    def checkpointed(module):
        return lambda x: checkpoint(module, x, use_reentrant=False, **choices) * 2

    ours = (compiled(checkpointed(model)), model)
    assert_trains_alike(ours, (checkpointed(eager), eager), torch.randn(6, 8))
    assert tsfuser.stats()["fallbacks"] == {}


def test_compiled_autograd():
    eager = Block()
    model = copy.deepcopy(eager)
    x = torch.randn(6, 8)
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend=BACKEND)
        def train(x):
            model(x).square().mean().backward()

        for _ in range(2):
            train(x)
            eager(x).square().mean().backward()
    for ours, plain in zip(model.parameters(), eager.parameters()):
        assert_matches(ours.grad, plain.grad, ops=64)


def test_functions_that_are_not_to_be_compiled():
    calls = []

    @torch.compiler.disable
    def plain(x):
        calls.append(type(x))
        return x.sin()

    def function(x):
        return torch.relu(plain(x.exp() * 2) + 1) * 3

    x = torch.randn(5)
    for _ in range(2):
        assert_matches(compiled(function)(x), function(x), ops=16)
    assert set(calls) == {torch.Tensor} and tsfuser.stats()["launches"] == 4


def test_exported_programs():
    model = Block().eval()
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(model, (torch.randn(6, 8),), dynamic_shapes={"x": {0: length}})
    function = compiled(exported.module(), dynamic=True)
    with torch.no_grad():
        for n in (6, 9, 3):
            x = torch.randn(n, 8)
            assert_matches(function(x), model(x), ops=64)
    assert tsfuser.stats()["launches"] > 0 and tsfuser.stats()["fallbacks"] == {}


def test_tensor_subclasses():
    """AOTAutograd hands over what they consist of."""
    from torch.testing._internal.two_tensor import TwoTensor

    def function(x, y):
        return torch.tanh(x * 2) + y

    a, b, y = torch.randn(4, 5), torch.randn(4, 5), torch.randn(5)
    x = TwoTensor(a.clone().requires_grad_(), b.clone().requires_grad_())
    found = compiled(function)(x, y)
    assert isinstance(found, TwoTensor)
    assert_matches(found.a.detach(), function(a, y), ops=4)
    assert_matches(found.b.detach(), function(b, y), ops=4)


def test_subclasses_that_dispatch_in_python_run_as_they_say():
    class Logged(torch.Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    def function(x):
        return (x * 2).exp() + 1

    x = torch.randn(6)
    assert_matches(compiled(function)(x.as_subclass(Logged)).as_subclass(torch.Tensor), function(x), ops=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_of_the_cpu_and_of_a_gpu_in_one_graph():
    def function(x, y, number):
        u, v = torch.tanh(x * 2) + 1, torch.exp(y) * 3
        return u * number + v.to(x.device).sum(), v - 1

    x, y, number = torch.randn(6, 8, device="cuda"), torch.randn(5), torch.tensor(2.5)
    for ours, plain in zip(compiled(function)(x, y, number), function(x, y, number)):
        assert ours.device == plain.device
        assert_matches(ours, plain, ops=16)
    assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] >= 2


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_that_train_together(kind, tmp_path):
    """tests/gpu/test_two_devices.py has them on two GPUs."""
    found = train_together(kind, "cpu", tmp_path, seconds=240)
    assert [each.error for each in found] == ["", ""]
    for each in found:
        assert each.launches > 0 and each.graphs >= 4 and each.fallbacks == {}, found


def test_looking_for_ops_on_lists_makes_no_second_objects_of_ops():
    """Tables, torch's and ours, know an overload by its object."""
    before = torch.ops.aten.add.Tensor
    assert list(foreach_ops()) and torch.ops.aten.add.Tensor is before
