"""What only a CUDA machine can show: streams, CUDA graphs, several devices, 64-bit indexing, the profiler's
kernels."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tsfuser
from kit.support import assert_matches, captured, counted, fuse, groups, no_fallback, train
from tsfuser.debug.observe import observing


@pytest.fixture(autouse=True)
def fused_only():
    with no_fallback():
        yield
    torch.cuda.synchronize()


def program(x, y):
    return (x + y).sigmoid() * x


def inputs(device="cuda", shape=(16, 64)):
    return torch.randn(shape, device=device), torch.randn(shape[-1:], device=device)


def test_a_kernel_is_named_after_its_ops():
    x, y = inputs()
    scripted = fuse(program, x, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        scripted(x, y)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("add" in name and "sigmoid" in name and "mul" in name for name in names), names


def test_the_current_stream_is_used():
    """A slow producer on a side stream: the group must wait for it there, and the main stream must not."""
    x, y = inputs(shape=(1 << 20,))
    y = torch.randn(1 << 20, device="cuda")
    scripted = fuse(program, x, y)
    stream = torch.cuda.Stream()
    for _ in range(5):
        z = torch.randn_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = z + 1.0
            out = scripted(late, y)
        stream.synchronize()
        assert_matches(out, program(z + 1.0, y), ops=4)


def test_streams_in_threads():
    import threading

    x, y = inputs(shape=(1 << 16,))
    y = torch.randn(1 << 16, device="cuda")
    scripted, expected, errors = fuse(program, x, y), program(x, y), []
    torch.cuda.synchronize()

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    out = scripted(x, y)
                torch.cuda.current_stream().synchronize()
                assert_matches(out, expected, ops=3)
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=work) for _ in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert errors == []


def test_a_run_on_a_thread_without_a_context_is_observed():
    """Such a thread is asked for the first time whether its stream is captured."""
    import threading

    x, y = inputs()
    scripted, runs = fuse(program, x, y), []
    torch.cuda.synchronize()
    with observing(runs.append):
        thread = threading.Thread(target=scripted, args=(x, y))
        thread.start()
        thread.join()
    assert [run.reason for run in runs] == [""]


def test_cuda_graph_capture_and_replay():
    x, y = inputs()
    scripted = fuse(program, x, y)
    graph, out = captured(lambda: scripted(x, y))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert_matches(out, program(x, y), ops=3)


def test_a_new_shape_under_capture():
    """The class is known, so nothing but the launch happens inside the capture."""
    scripted = fuse(program, *inputs())
    x, y = inputs(shape=(48, 128))
    scripted(*inputs(shape=(40, 128)))
    graph, out = captured(lambda: scripted(x, y))
    graph.replay()
    torch.cuda.synchronize()
    assert_matches(out, program(x, y), ops=3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one():
    for device in ("cuda:1", "cuda:0"):
        x, y = inputs(device)
        scripted = fuse(program, x, y)
        out = scripted(x, y)
        assert out.device == torch.device(device) and torch.cuda.current_device() == 0
        assert_matches(out, program(x, y), ops=3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_function_on_two_devices():
    scripted = fuse(program, *inputs("cuda:0"))
    x, y = inputs("cuda:1")
    with tsfuser.fuser():
        for _ in range(3):
            assert_matches(scripted(x, y), program(x, y), ops=3)


@pytest.mark.parametrize(
    "dtype, elements",
    [(torch.bool, (1 << 31) + 5), (torch.float16, (1 << 31) + 3), (torch.float16, (1 << 32) + 8)],
)
def test_more_than_two_to_the_31_elements(dtype, elements):
    """Compared in pieces; the last ones have indices that 32 bits do not hold."""
    if torch.cuda.mem_get_info()[0] < 6 * elements * dtype.itemsize:
        pytest.skip("too little memory")

    def of_bool(x):
        return ~(x & x)

    def of_half(x):
        return (x + x) * x

    function = of_bool if dtype == torch.bool else of_half
    x = torch.empty(elements, dtype=dtype, device="cuda")
    x.random_(0, 2) if dtype == torch.bool else x.uniform_(-1, 1)
    scripted = fuse(function, x)
    out = scripted(x)
    for start in (0, (1 << 31) - 1000, elements - 1000):
        assert_matches(out[start : start + 1000], function(x[start : start + 1000]), ops=2)
    assert torch.equal(out[-(1 << 24) :].isfinite(), x[-(1 << 24) :].isfinite())


def test_large_strides_in_a_small_tensor():
    """64-bit offsets from few elements: a view with huge strides."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("too little memory")
    base = torch.zeros((1 << 31) + 4096, dtype=torch.bfloat16, device="cuda")
    x = base.as_strided((3, 1024), (1 << 30, 1))
    x.copy_(torch.randn(3, 1024))
    y = torch.randn(3, 1024, device="cuda", dtype=torch.bfloat16)
    scripted = fuse(program, x, y)
    assert_matches(scripted(x, y), program(x, y), program(x.double(), y.double()), ops=3)


def test_backward_runs_on_the_stream_of_the_forward():
    def loss(x, y):
        return torch.nn.functional.gelu(x + y) * y

    x, y = (
        torch.randn(16, 64, device="cuda", requires_grad=True),
        torch.randn(64, device="cuda", requires_grad=True),
    )
    scripted = torch.jit.script(loss)
    with tsfuser.fuser(), torch.cuda.stream(torch.cuda.Stream()):
        out, gradients = train(scripted, [x, y])
        torch.cuda.current_stream().synchronize()
    assert len(groups(scripted)) == 2
    _, eager = train(loss, [x, y], calls=1)
    for mine, plain in zip(gradients, eager):
        assert_matches(mine, plain, ops=24, strides=False)


def test_out_of_memory_leaves_the_group_usable():
    """The error is torch's own, as in eager, and a later call of a fitting size works."""
    x, y = inputs()
    scripted = fuse(program, x, y)
    free = torch.cuda.mem_get_info()[0]
    one = torch.zeros(1, device="cuda")
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    try:
        with pytest.raises(RuntimeError):
            scripted(one.expand(4, free // 4), one)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)
    torch.cuda.empty_cache()
    assert_matches(scripted(x, y), program(x, y), ops=3)


def test_many_launches_do_not_leak():
    x, y = inputs()
    scripted = fuse(program, x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with counted() as rise:
        for _ in range(1000):
            scripted(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and rise["exact_hits"] == 1000


def test_the_machine_is_that_of_torch():
    """Kernels are planned for the device as its driver describes it."""
    from tsfuser.target.cuda import CudaTarget

    machine, known = CudaTarget.machine("cuda:0"), torch.cuda.get_device_properties(0)
    assert machine.name == known.name
    assert machine.capability == 10 * known.major + known.minor
    assert machine.multiprocessors == known.multi_processor_count
    assert machine.threads_per_multiprocessor == known.max_threads_per_multi_processor
    assert machine.l2 == known.L2_cache_size
    assert (
        machine.shared_per_block
        <= machine.shared_per_multiprocessor
        == known.shared_memory_per_multiprocessor
    )
    assert machine.bandwidth is None or 1e11 < machine.bandwidth < 2e13
