"""`torch.compile(..., backend="tsfuser", mode="reduce-overhead")` on a CUDA device: graphs are recorded and
replayed, so that later calls launch nothing themselves."""

import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import tsfuser
from kit.compiled_models import MODELS
from kit.support import assert_matches, no_fallback

TERMS = 400
CALLS = 6  # the first warms up, the second is recorded, for each of two generations of a step


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    counters.clear()
    tsfuser.reset()
    torch.manual_seed(0)
    with no_fallback():
        yield
    torch._dynamo.reset()
    torch.cuda.synchronize()


def overhead(function, **choices):
    return torch.compile(function, backend="tsfuser", mode="reduce-overhead", **choices)


def calls():
    return tsfuser.stats()["graph_calls"]


def trained(model, function, x):
    """The result and the gradients of the parameters, after a step."""
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad(set_to_none=True)
    out = function(x)
    out.square().mean().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", ["mlp", "encoder", "residual", "gpt"])
def test_models_train_as_in_eager_by_replays(name):
    make_model, make_input = MODELS[name]
    eager = make_model().cuda()
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function = overhead(model)
    for _ in range(CALLS):
        before, x = calls(), make_input(6).cuda()
        wide = x.double() if x.is_floating_point() else x
        found = (trained(model, function, x), trained(eager, eager, x), trained(exact, exact, wide))
        for ours, plain, reference in zip(*found):
            assert_matches(ours, plain, reference, TERMS)
    assert calls() == before  # the last step was replayed
    assert counters["inductor"]["cudagraph_skips"] == 0
    for ours, plain in zip(model.buffers(), eager.buffers()):
        assert_matches(ours, plain, ops=TERMS)


def test_inference_is_replayed_and_reads_parameters_where_they_are():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)).cuda()
    function = overhead(model)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            before, x = calls(), torch.randn(8, 16, device="cuda")
            assert_matches(function(x), model(x), ops=TERMS)
            model[0].weight.mul_(1.5)
    assert calls() == before and counters["inductor"]["cudagraph_skips"] == 0


def test_replays_draw_new_masks_that_forward_and_backward_share():
    function = overhead(lambda x: F.dropout(x * 2, 0.5) + 0)
    masks = []
    for _ in range(CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert torch.equal(y != 0, x.grad != 0)
        masks.append(y.detach().clone())
    assert not torch.equal(masks[-1], masks[-2])


def test_sizes_that_vary_are_not_recorded():
    function = overhead(lambda x: torch.softmax(x * 2, -1) + 1, dynamic=True)
    for n in (4, 7, 9):
        x = torch.randn(n, 8, device="cuda")
        assert_matches(function(x), torch.softmax(x * 2, -1) + 1, ops=16)
    assert counters["inductor"]["cudagraph_skips"] > 0


def test_inputs_that_change_in_place_are_not_recorded():
    function = overhead(lambda x: x.mul_(2).add_(1))
    x = torch.ones(8, device="cuda")
    for _ in range(3):
        function(x)
    assert x.tolist() == [15.0] * 8 and counters["inductor"]["cudagraph_skips"] > 0
