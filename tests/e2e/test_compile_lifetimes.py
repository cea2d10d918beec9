"""How long compiled programs keep tensors: until their last reader, so that they take no more memory."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from kit.compiled_models import MODELS
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


_watched: list = []  # storages
_alive: list = []  # how many of them are alive, at each call of the two ops


def _count():
    _alive.append(sum(not ref.expired() for ref in _watched))


@torch.library.custom_op("tsfuser_tests::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    _count()
    _watched.append(StorageWeakRef(x.untyped_storage()))
    return x.clone()


@torch.library.custom_op("tsfuser_tests::look_back", mutates_args=())
def look_back(x: torch.Tensor) -> torch.Tensor:
    _count()
    return x.clone()


@torch.library.custom_op("tsfuser_tests::count_up_", mutates_args=("x",))
def count_up_(x: torch.Tensor) -> None:
    x.add_(1)


look.register_fake(torch.empty_like)
look_back.register_fake(torch.empty_like)
look.register_autograd(lambda context, gradient: look_back(gradient))


@pytest.fixture
def nothing_watched():
    _watched.clear()
    _alive.clear()


def test_saved_tensors_live_until_their_last_reader(nothing_watched):
    w = torch.randn(4, 4)

    def function(x):
        for _ in range(4):
            x = look((x @ w).tanh())
        return x

    x = torch.randn(3, 4, requires_grad=True)
    compiled(function, options={"recompute": False})(x).sum().backward()
    # forward: the results of tanh, which are saved; backward: those whose gradient is still to come
    assert _alive == [0, 1, 2, 3] + [4, 3, 2, 1]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_arguments_live_until_their_last_reader(nothing_watched, in_pieces):
    def function(x):
        y = (x.exp() + 1) * 2
        if in_pieces:
            torch.ops.tsfuser_tests.count_up_(y)
        return look(y)

    program = compile_graph(make_fx(function, tracing_mode="fake")(torch.randn(3)), Settings())
    args = [torch.randn(3)]
    _watched.append(StorageWeakRef(args[0].untyped_storage()))
    program(args)
    assert args == [] and _alive == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["encoder", "residual", "unet"])
def test_the_peak_of_a_training_step_is_no_higher_than_inductors(name):
    make_model, make_input = MODELS[name]
    x = make_input(256 if name == "encoder" else 64).cuda()
    peaks = []
    for backend in ("tsfuser", "inductor"):
        torch._dynamo.reset()
        function = torch.compile(make_model().cuda(), backend=backend)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            function(x.clone().requires_grad_()).square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] <= 1.02 * peaks[1]
