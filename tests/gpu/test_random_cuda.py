"""Random numbers under CUDA graphs, and the generators of several devices.

A captured group reads seed and offset from where torch puts them before each replay: replays give the
numbers that direct calls would give from the same state of the generator.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F

import tsfuser
from kit.support import captured, counted, fresh, fuse, groups, no_fallback, train


@pytest.fixture(autouse=True)
def fused_only():
    torch.manual_seed(1234)
    with no_fallback():
        yield
    torch.cuda.synchronize()


def dropped(x, y):
    return F.dropout(x + y, 0.5, True) * 2.0


def inputs(device="cuda", shape=(33, 65)):
    return torch.rand(shape, device=device) + 1, torch.rand(shape, device=device)


def generator(device="cuda:0"):
    return torch.cuda.default_generators[torch.device(device).index]


def replayed(graph, outs):
    """Copies of the outputs after one more replay."""
    graph.replay()
    torch.cuda.synchronize()
    return [out.clone() for out in outs]


def test_replays_give_the_numbers_of_direct_calls():
    """Two groups and an op of torch's own between them, replayed twice: as when called twice, to the bit."""
    x, y = inputs()
    scripted = fuse(dropped, x, y)

    def step():
        first = scripted(x, y)
        return first, torch.rand(100, device="cuda"), scripted(x, y)

    with counted() as rise:
        graph, outs = captured(step)
    assert rise["launches"] == 2 and rise["fallbacks"] == {}
    torch.cuda.manual_seed(7)
    found = [*replayed(graph, outs), *replayed(graph, outs)]
    offset = generator().get_offset()
    torch.cuda.manual_seed(7)
    expected = [*step(), *step()]
    assert generator().get_offset() == offset
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    kept = [found[k] != 0 for k in (0, 2, 3, 5)]
    assert all(not torch.equal(a, b) for k, a in enumerate(kept) for b in kept[:k])


def test_direct_calls_between_replays_draw_numbers_of_their_own():
    x, y = inputs()
    scripted = fuse(dropped, x, y)
    graph, out = captured(lambda: scripted(x, y))
    masks = []
    for _ in range(3):
        masks += [replayed(graph, [out])[0] != 0, scripted(x, y) != 0]
    assert all(not torch.equal(a, b) for k, a in enumerate(masks) for b in masks[:k])


def test_a_class_first_met_under_capture():
    """Its kernel is compiled and loaded inside the capture."""
    scripted = fuse(dropped, *inputs())
    x, y = inputs(shape=(5, 3, 7))
    with tsfuser.fuser():
        scripted(x, y)  # another rank: torch profiles the fallback in this call, and the next one fuses it
    with tsfuser.fuser(), counted() as rise:
        graph, out = captured(lambda: scripted(x, y))
    assert rise["launches"] == 1 and rise["plans_built"] == 1
    first, second = (replayed(graph, [out])[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_kernels_of_one_plan_see_one_mask_in_every_replay():
    def both_sums(x, row):
        y = F.dropout(x, 0.5, True)
        return y.sum(0), (y * row).sum(1)

    x, row = torch.ones(67, 131, device="cuda"), torch.arange(1.0, 132, device="cuda")
    scripted = fuse(both_sums, x, row)
    graph, outs = captured(lambda: scripted(x, row))
    for _ in range(3):
        columns, rows = replayed(graph, outs)
        assert (columns.double() * row).sum().item() == rows.double().sum().item()  # integers: exact


def test_graphed_callables():
    """Forward and backward are captured: each call has a fresh mask, the same in both."""

    def bias_dropout_add(x, bias, residual):
        return F.dropout(x + bias, 0.4, True) + residual

    leaves = [(torch.rand(s, device="cuda") + 1).requires_grad_() for s in ((37, 65), (65,), (37, 65))]
    scripted = fresh(bias_dropout_add)
    with tsfuser.fuser():
        train(scripted, leaves)
    assert len(groups(scripted)) == 2
    samples = tuple(x.detach().clone().requires_grad_() for x in leaves)
    with counted() as rise:
        graphed = torch.cuda.make_graphed_callables(scripted, samples)
    assert rise["launches"] > 0 and rise["fallbacks"] == {}

    def masks():
        out, (gx, _, _) = train(graphed, leaves, calls=1)
        assert torch.equal(gx != 0, out != leaves[2])
        return gx != 0

    torch.cuda.manual_seed(3)
    first, second = masks(), masks()
    torch.cuda.manual_seed(3)
    assert torch.equal(masks(), first) and torch.equal(masks(), second)
    assert not torch.equal(first, second) and 0.5 < first.double().mean() < 0.7


def saved_by(function, *inputs):
    """The result, and the dtypes of the tensors that autograd has saved, but for the inputs."""
    saved, given = [], {x.data_ptr() for x in inputs}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function(*inputs)
    return out, {t.dtype for t in saved if t.data_ptr() not in given}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["row-major", "channels last", "turned"])
def test_the_backward_draws_the_mask_again(dtype, form):
    """More elements than one block has, in kernels with other vectors: the gradient comes row-major."""

    def program(x):
        return F.dropout(x * 2.0, 0.25, True) * 1.5

    x = torch.ones(16, 24, 33, 65, device="cuda", dtype=dtype)
    if form == "channels last":
        x = x.to(memory_format=torch.channels_last)
    x = (x.transpose(2, 3) if form == "turned" else x).requires_grad_()
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(5):
            x.grad = None
            out, saved = saved_by(scripted, x)
            out.backward(torch.ones_like(out, memory_format=torch.contiguous_format))
    assert saved == {torch.int64} and torch.equal(out, x.grad)
    assert abs((out != 0).double().mean().item() - 0.75) < 0.01


def test_a_captured_step_draws_one_mask_forward_and_backward():
    def program(x):
        return F.dropout(x * 2.0, 0.25, True) * 1.5

    x = torch.ones(257, 333, device="cuda", requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser():
        train(scripted, (x,))
    assert saved_by(scripted, x)[1] == {torch.int64}

    def step():
        out = scripted(x)
        return out.detach(), torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)[0]

    graph, outs = captured(step)
    masks = []
    for _ in range(3):
        out, gradient = replayed(graph, outs)
        assert torch.equal(out, gradient)
        masks.append(out)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_what_a_training_step_holds_for_the_backward():
    """No byte an element: results and inputs, and a seed."""

    def program(x):
        return F.dropout(x * 2.0, 0.25, True) * 1.5

    x = torch.ones(1 << 22, device="cuda", requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser():
        train(scripted, (x,))
    x.grad = None
    before = torch.cuda.memory_allocated()
    out = scripted(x)
    assert torch.cuda.memory_allocated() - before < out.nbytes + (1 << 20)


def test_the_offset_of_the_generator_advances_by_four_an_op():
    x, y = inputs()
    scripted = fuse(dropped, x, y)
    torch.cuda.manual_seed(99)
    for k in range(3):
        assert (generator().initial_seed(), generator().get_offset()) == (99, 4 * k)
        scripted(x, y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_device_has_a_generator_of_its_own():
    on = {device: inputs(device) for device in ("cuda:0", "cuda:1")}
    scripted = {device: fuse(dropped, *pair) for device, pair in on.items()}
    torch.manual_seed(21)
    first = scripted["cuda:1"](*on["cuda:1"])  # the current device is cuda:0
    assert [generator(d).get_offset() for d in on] == [0, 4]
    scripted["cuda:0"](*on["cuda:0"])
    assert [generator(d).get_offset() for d in on] == [4, 4]
    generator("cuda:1").set_offset(0)
    assert torch.equal(first, scripted["cuda:1"](*on["cuda:1"]))
