"""Tensors of a second GPU: alone, beside the first one in a program, in two processes that train together.

The current device stays the first one: groups are planned, compiled and launched for the device of their
tensors, on that device's stream.
"""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

import tsfuser
from kit.compiled_models import MODELS
from kit.parallel import Block, train_together
from kit.support import assert_matches, counted, fresh, fuse, groups, no_fallback, train

DEVICES = ("cuda:0", "cuda:1")
TERMS = 400


@pytest.fixture(autouse=True)
def fused_only(forgotten):
    with no_fallback():
        yield
    for device in DEVICES:
        torch.cuda.synchronize(device)
    assert torch.cuda.current_device() == 0


def program(x, y):
    return (x + y).sigmoid() * x


def rows(x, weight):
    """Each row is long enough for several blocks, or much shared memory."""
    return torch.softmax(x * 2.0, -1) * weight


def inputs(device, shape=(16, 64)):
    return torch.randn(shape, device=device), torch.randn(shape[-1:], device=device)


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


def launched_on(function, *arguments):
    """The devices on which our kernels ran, as the profiler has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*arguments)
        for device in DEVICES:
            torch.cuda.synchronize(device)
    on_device = torch.autograd.DeviceType.CUDA
    return [
        event.device_index
        for event in profile.events()
        if event.device_type == on_device and "fused_" in event.name
    ]


@pytest.mark.parametrize(
    "function, shape", [(program, (16, 64)), (rows, (3, 50_000))], ids=["pointwise", "rows"]
)
@pytest.mark.parametrize("door", ["scripted", "compiled"])
def test_one_function_on_both_devices_has_plans_of_each(door, function, shape):
    fused = fresh(function) if door == "scripted" else compiled(function)
    with tsfuser.fuser(), torch.no_grad(), counted() as rise:
        for _ in range(6):
            for device in DEVICES:
                x, y = inputs(device, shape)
                assert_matches(fused(x, y), function(x, y), function(x.double(), y.double()), ops=32)
    assert rise["fallbacks"] == {} and rise["launches"] >= 8
    with tsfuser.fuser(), torch.no_grad():
        for device in DEVICES:
            on = launched_on(fused, *inputs(device, shape))
            assert on and set(on) == {int(device[-1])}


def both(x, y):
    """`x` and `y` are on two devices."""
    u = torch.tanh(x * 2.0) + 1.0
    v = torch.exp(-y) * 3.0 + 1.0
    return u * v.to(x.device).sigmoid() + 1.0, v - 1.0


@pytest.mark.parametrize("door", ["scripted", "compiled"])
def test_tensors_of_both_devices_in_one_program(door):
    x, y = torch.randn(6, 8, device="cuda:0"), torch.randn(6, 8, device="cuda:1")
    with torch.no_grad(), counted() as rise:
        fused = fuse(both, x, y) if door == "scripted" else compiled(both)
        for _ in range(3):
            with tsfuser.fuser():
                found = fused(x, y)
            for ours, plain, exact in zip(found, both(x, y), both(x.double(), y.double())):
                assert_matches(ours, plain, exact, ops=32)
        with tsfuser.fuser():
            assert set(launched_on(fused, x, y)) == {0, 1}
    assert rise["fallbacks"] == {}
    if door == "scripted":
        for group in groups(fused):
            tensors = [v for v in group.g("Subgraph").inputs() if v.type().kind() == "TensorType"]
            assert len({str(tensor.type().device()) for tensor in tensors}) == 1


def test_a_scripted_function_trains_on_both_devices():
    def loss(x, y):
        return F.gelu(x + y) * y

    scripted = fresh(loss)
    for device in (*DEVICES, *DEVICES):
        leaves = [value.requires_grad_() for value in inputs(device)]
        with tsfuser.fuser():
            out, gradients = train(scripted, leaves)
        plain, wanted = train(loss, leaves, calls=1)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact, true = train(loss, wide, calls=1)
        for found in zip([out, *gradients], [plain, *wanted], [exact, *true]):
            assert_matches(*found, ops=64, strides=False)


class Two(nn.Module):
    """A model with a block on each device."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block().to("cuda:0"), Block().to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x).to("cuda:1")) * 2


def step(module, function, x):
    """The result, the gradients of the parameters, and the buffers, after a step."""
    module.zero_grad()
    out = function(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers())]


@pytest.mark.parametrize("make", [Two, lambda: Block().to("cuda:1")], ids=["on both", "on the second"])
def test_a_compiled_model_trains(make):
    eager = make()
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function, device = compiled(model), next(eager.parameters()).device
    for rows in (6, 6, 9):
        x = torch.randn(rows, 8, device=device)
        found = step(model, function, x), step(eager, eager, x), step(exact, exact, x.double())
        for ours, plain, wide in zip(*found):
            assert_matches(ours, plain, wide, ops=TERMS)
    assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] > 0


@pytest.mark.parametrize("name", ["encoder", "residual"])
def test_models_train_on_the_second_device(name):
    make_model, make_input = MODELS[name]
    eager = make_model().to("cuda:1")
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function, x = compiled(model), make_input(6).to("cuda:1")
    found = step(model, function, x), step(eager, eager, x), step(exact, exact, x.double())
    for ours, plain, wide in zip(*found):
        assert_matches(ours, plain, wide, ops=TERMS)


@pytest.mark.parametrize("door", ["scripted", "compiled"])
def test_the_stream_is_the_one_of_the_tensors_device(door):
    """A slow producer on a side stream of the second device, while the first one is current."""
    x, y = inputs("cuda:1", (1 << 20,))
    fused = fuse(program, x, y) if door == "scripted" else compiled(program)
    stream = torch.cuda.Stream("cuda:1")
    with torch.no_grad(), tsfuser.fuser():
        fused(x, y)
        for _ in range(5):
            z = torch.randn_like(x)
            torch.cuda.synchronize("cuda:1")
            with torch.cuda.stream(stream), torch.cuda.device("cuda:1"):
                torch.cuda._sleep(20_000_000)
                late = z + 1.0
                with torch.cuda.device("cuda:0"):  # streams are kept by device
                    assert torch.cuda.current_stream("cuda:1") == stream
                    out = fused(late, y)
            stream.synchronize()
            assert_matches(out, program(z + 1.0, y), ops=8)


def test_threads_of_both_devices():
    """Each begins without a context; calls of new sizes are planned on either."""
    scripted, failures = fresh(program), []

    def work(device):
        try:
            for n in range(60):
                x, y = inputs(device, (1 + n % 7, 64))
                assert_matches(scripted(x, y), program(x, y), ops=8)
        except BaseException as error:
            failures.append(error)

    with tsfuser.fuser():
        threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == [] and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_from_the_generator_of_its_device(device):
    other = DEVICES[1 - DEVICES.index(device)]
    function = compiled(lambda x: F.dropout(x * 2, 0.5) + 0)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    masks = []
    for seed in (3, 3, 4):
        torch.cuda.manual_seed_all(seed)
        before = torch.cuda.get_rng_state(other)
        y = function(x)
        x.grad = None
        y.sum().backward()
        assert torch.equal(y != 0, x.grad != 0)
        assert torch.equal(torch.cuda.get_rng_state(other), before)
        masks.append((y != 0).detach())
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_cuda_graphs_of_the_second_device():
    x, y = inputs("cuda:1")
    scripted, graph = fuse(program, x, y), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
        out = scripted(x, y)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize("cuda:1")
        assert_matches(out, program(x, y), ops=8)


def test_reduced_overhead_on_the_second_device():
    function = compiled(program, mode="reduce-overhead")
    with torch.no_grad(), torch.cuda.device("cuda:1"):
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            before = tsfuser.stats()["graph_calls"]
            x, y = inputs("cuda:1")
            assert_matches(function(x, y), program(x, y), ops=8)
    assert tsfuser.stats()["graph_calls"] == before  # the last call was replayed


def test_check_and_explain_look_at_the_second_device():
    x, y = inputs("cuda:1")
    for fused in (compiled(program), fuse(program, x, y)):
        report = tsfuser.check(fused, x, y)
        assert report, report
        (kernel,) = tsfuser.explain(fused, x, y).kernels
    launch = kernel.arguments(x=x, y=y)
    with torch.cuda.device("cuda:1"):
        kernel.raw()(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)
        torch.cuda.synchronize()
    assert_matches(launch.tensors[0], program(x, y), ops=8)


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_nccl_available()),
    reason="torch has no NCCL",
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_that_train_together(kind, tmp_path):
    """One for each device, over NCCL; DDP in two buckets. Gradients of three steps are as eager's."""
    found = train_together(kind, "cuda", tmp_path, seconds=40)
    assert not any(each.error for each in found), "\n".join(each.error for each in found)
    assert [each.rank for each in found] == [0, 1]
    for each in found:
        assert each.launches > 0 and each.graphs >= 4 and each.fallbacks == {}, found
