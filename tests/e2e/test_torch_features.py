"""Groups beside other parts of torch: grad modes, saving, the profiler, autocast, threads."""

import io
import threading

import pytest
import torch

import tsfuser
from kit.support import FORKED, assert_matches, counted, fresh, fuse, groups, no_fallback, script

pytestmark = pytest.mark.graphs


def program(x, y):
    return (x + y).sigmoid() * x


@pytest.fixture
def xy(device):
    return torch.randn(16, 64, device=device), torch.randn(64, device=device)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(xy, mode):
    scripted = fresh(program)
    with tsfuser.fuser(), mode(), no_fallback():
        for _ in range(4):
            out = scripted(*xy)
        with counted() as rise:
            out = scripted(*xy)
    assert rise["exact_hits"] == 1
    assert out.is_inference() == (mode is torch.inference_mode) and not out.requires_grad
    assert_matches(out, program(*xy), ops=3)


def test_inference_tensors_as_inputs(xy):
    scripted = fuse(program, *xy)
    with torch.inference_mode():
        x = xy[0].clone()
        assert_matches(scripted(x, xy[1]), program(x, xy[1]), ops=3)


def test_saved_and_loaded(xy):
    scripted = fuse(program, *xy)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = fuse(torch.jit.load(buffer), *xy)
    assert_matches(loaded(*xy), program(*xy), ops=3)


def test_frozen_module(xy):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(64))

        def forward(self, x):
            return torch.relu(x + self.bias) * 0.5

    model = Model().to(xy[0].device).eval()
    frozen = fuse(torch.jit.freeze(torch.jit.script(model)), xy[0])
    assert_matches(frozen(xy[0]), model(xy[0]).detach(), ops=3)


def test_traced_function(xy):
    traced = fuse(torch.jit.trace(program, xy), *xy)
    assert len(groups(traced)) == 1
    assert_matches(traced(*xy), program(*xy), ops=3)


def test_the_profiler_shows_the_group(xy):
    """As nvFuser did, and inside of that the kernel, with the shapes of the group's inputs."""
    scripted = fuse(program, *xy)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        scripted(*xy)
    [run] = [event for event in profile.events() if event.name == "run_fused_kernel"]
    [named] = [event for event in profile.events() if event.name.startswith("fused_")]
    assert named.cpu_parent is run
    assert [list(shape) for shape in named.input_shapes if shape] == [list(x.shape) for x in xy]


def test_autocast(device):
    """TorchScript's autocast, which computes more in float32 than eager's, decides the dtypes."""

    def mixed(x, w):
        return (torch.mm(x, w) + 1.0).relu() * 2.0

    x, w = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    kind = torch.device(device).type
    scripted = fresh(mixed)
    with tsfuser.fuser(), torch.autocast(kind, dtype=torch.bfloat16), no_fallback():
        for _ in range(4):
            out = scripted(x, w)
        with torch.jit.fuser("none"):
            plain = fresh(mixed)
            unfused = [plain(x, w) for _ in range(3)][-1]
        assert len(groups(scripted)) == 1  # looked at here: a function has an executor for each autocast mode
    assert_matches(out, unfused, ops=4)


def test_an_optional_tensor_that_comes_and_goes(xy):
    def program(x, y, bias: torch.Tensor | None):
        if bias is not None:
            y = y + bias
        return (x + y).relu()

    x, y = xy
    scripted = fuse(program, x, y, None)
    with tsfuser.fuser(), no_fallback():
        for bias in (None, y, None, x, y):
            for _ in range(3):
                assert_matches(scripted(x, y, bias), program(x, y, bias), ops=3)


def test_tensors_in_lists_and_tuples(xy):
    def program(xs: list[torch.Tensor], pair: tuple[torch.Tensor, float]):
        a = xs[0] * 2.0 + pair[0]
        return [a.relu(), a * pair[1]], (a.tanh(), pair[1])

    x, y = xy
    scripted = fuse(program, [x, x], (y, 0.5))
    assert len(groups(scripted)) >= 1
    (first, second), (third, number) = scripted([x, x], (y, 0.5))
    expected, (last, _) = program([x, x], (y, 0.5))
    assert number == 0.5
    for mine, eager in zip((first, second, third), (*expected, last)):
        assert_matches(mine, eager, ops=4)


def threads(count, work):
    """Run `work(i)` in `count` threads at once and raise the first error."""
    errors, start = [], threading.Barrier(count)

    def body(i):
        try:
            start.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(timeout=300)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def test_eight_threads_call_one_function_with_mixed_shapes(target, device, request):
    """1,000 calls a thread; fewer where each call is slow (fibers)."""
    calls = 1000 if request.config.getoption("--long") or target == "cuda" else 300 if target == "cpu" else 40
    shapes = [(3, 5), (16, 64), (16, 63), (1, 7), (33, 128), (128, 33), (2, 2), (5, 1)]
    data = [(torch.randn(s, device=device), torch.randn(s[1:], device=device)) for s in shapes]
    expected = [program(*pair) for pair in data]
    scripted = fuse(program, *data[1])
    tsfuser.reset()  # all plans are built by threads that race

    def work(i):
        for k in range(calls):
            j = (i * 7 + k * (1 + i % 3)) % len(data)
            out = scripted(*data[j])
            assert_matches(out, expected[j], ops=3)

    with counted() as rise, tsfuser.fuser():
        threads(8, work)
    assert rise["fallbacks"] == {}


def test_threads_that_compile_the_same_function_at_once(device):
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fresh(program)

    def work(i):
        for _ in range(5):
            assert_matches(scripted(x, y), program(x, y), ops=3)

    with tsfuser.fuser():
        threads(4, work)
    assert len(groups(scripted)) == 1


def test_reset_while_threads_run(device):
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fuse(program, x, y)
    expected = program(x, y)

    def work(i):
        for _ in range(20):
            if i == 0:
                tsfuser.reset()
            assert_matches(scripted(x, y), expected, ops=3)

    threads(4, work)


def test_training_in_several_threads(device):
    def loss(x, y):
        return (torch.nn.functional.gelu(x + y) * 2.0).sum()

    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fresh(loss)
    leaf = x.clone().requires_grad_()
    loss(leaf, y).backward()

    def work(i):
        for _ in range(8):
            mine = x.clone().requires_grad_()
            scripted(mine, y).backward()
            assert_matches(mine.grad, leaf.grad, ops=12)

    with tsfuser.fuser():
        threads(4, work)


def test_forks_are_fused(device):
    scripted, x = script(FORKED), torch.randn(4, 8, device=device)
    with tsfuser.fuser(), counted() as rise:
        for _ in range(4):
            out = scripted(x)
    assert_matches(out, torch.relu(x + 1.0) * 2.0 + torch.tanh(x * 3.0), ops=4)
    assert rise["launches"] >= 4 and rise["fallbacks"] == {}


def test_double_backward(device):
    def f(x, w):
        return (torch.sigmoid(x * w) * torch.tanh(x)).sum()

    def second(function, x, w):
        (first,) = torch.autograd.grad(function(x, w), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, w))

    x, w = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    scripted = fresh(f)
    with tsfuser.fuser():
        for _ in range(4):
            found = second(scripted, x, w)
    for mine, theirs in zip(found, second(f, x, w)):
        assert_matches(mine, theirs, ops=50)
    assert groups(scripted)


def test_strict_fusion_names_what_is_not_fused(device):
    def f(x):
        with torch.jit.strict_fusion():
            return torch.sort(torch.relu(x + 1.0) * 2.0, 0)[0]

    scripted, x = fresh(f), torch.rand(4, 8, device=device)
    with tsfuser.fuser(), pytest.raises(RuntimeError, match="unfused operators(.|\n)*aten::sort"):
        for _ in range(4):
            scripted(x)


def test_a_group_stays_within_a_no_grad_block(device):
    """Outside of it its results would ask for gradients."""

    def program(w: torch.Tensor):
        with torch.no_grad():
            a = torch.tanh(w)
        return a * 2.0, a * 3.0

    w = torch.rand(3, 4, device=device, requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(5):
            got, want = scripted(w), program(w)
            assert not any(t.requires_grad for t in got)
            assert all(map(torch.allclose, got, want))
