"""Launches of hand-made CUDA kernels: contexts, streams, graph capture, shared memory, failures, devices."""

import ctypes
import functools
import threading

import pytest
import torch

from kit.native_support import ADD, group_function

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
cupy = pytest.importorskip("cupy")

SOURCE = r"""
struct Add { const float* a; const float* b; float* c; long long n; };
extern "C" __global__ void add(Add x) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < x.n) x.c[i] = x.a[i] + x.b[i];
}
extern "C" __global__ void add_through_shared(Add x) {  // needs blockDim.x floats of dynamic shared memory
  extern __shared__ float tile[];
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < x.n) tile[threadIdx.x] = x.a[i];
  __syncthreads();
  if (i < x.n) x.c[i] = tile[threadIdx.x] + x.b[i];
}
struct Slotted { Add x; const int* slots; };
extern "C" __global__ void add_and_slot(Slotted s) {  // as blocks that meet in slots, which start as 0
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < s.x.n) s.x.c[i] = s.x.a[i] + s.x.b[i] + s.slots[0];
}
"""


@functools.cache
def function(kernel, device):
    """A CUfunction of the device, and what keeps it loaded; compiled once a device."""
    with torch.cuda.device(device):
        module = cupy.RawModule(code=SOURCE, options=(f"-DDEVICE_{device.replace(':', '_')}",))
        return module.get_function(kernel).kernel.ptr, module


def plan(native, args, kernel="add", block=128, shared=0):
    """c = a + b for two float vectors of equal size."""
    program = [("eq", 0, 3), ("const", block, 0), ("ceildiv", 0, 7), ("const", 1, 0), ("const", shared, 0)]
    slots = [(0, "input", 0), (8, "input", 1), (16, "allocation", 0), (24, "int64", 0)]
    allocations, size = [("float32", [0], [9])], 32
    if kernel == "add_and_slot":
        slots, size = [*slots, (32, "cleared", 1)], 40
        allocations.append(("int32", [0], [9]))
    handle, module = function(kernel, args[0][2])
    launch = native.Launch("cuda", handle, kernel, 8, 7, 9, 10, 9, size, slots)
    return native.Plan(6, program, [(1, 6, 1)], allocations, [launch], [("allocation", 0)], "", module)


@pytest.fixture
def add(native):
    native.set_planner(lambda group, args, varies: plan(native, args))
    yield group_function(ADD, 2)
    torch.cuda.synchronize()


def right(f, a):
    return torch.equal(f(a, a), a + a)


def test_exact_and_class_hits(native, add):
    for n in (1000, 77, 1000):
        assert right(add, torch.randn(n, device="cuda"))
    stats = native.stats()
    assert (stats["plans_built"], stats["exact_hits"], stats["class_hits"], stats["fallbacks"]) == (
        1,
        1,
        1,
        {},
    )


def test_current_stream_is_used(add):
    a = torch.randn(1 << 16, device="cuda")
    add(a * 2, a)  # what is loaded now does not take time below
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        b = a * 2
        c = add(b, b)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(c, 4 * a)


def test_threads_without_a_context(native, add):
    """A fresh thread and an autograd thread launch before they call the CUDA runtime."""
    a = torch.randn(100, device="cuda")
    assert right(add, a)
    keep = [add(a, a) for _ in range(8)]
    del keep  # the caching allocator serves the threads without a call of the runtime
    results = []
    threads = [threading.Thread(target=lambda: results.append(add(a, a))) for _ in range(4)]
    for thread in threads:
        thread.start()
        thread.join()
    assert all(torch.equal(r, a + a) for r in results) and len(results) == 4

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return add(grad, grad)

    x = torch.randn(100, device="cuda", requires_grad=True)
    Double.apply(x).backward(a)
    assert torch.equal(x.grad, a + a)
    assert native.stats()["fallbacks"] == {}


@pytest.mark.parametrize("kernel", ["add", "add_and_slot"])
def test_a_thread_that_loses_its_context(native, kernel):
    """Its first call finds none, and later ones find that it is gone, though it was there: the launch, and
    before it the clearing of slots, take the primary one."""
    native.set_planner(lambda group, args, varies: plan(native, args, kernel))
    add, a = group_function(ADD, 2), torch.randn(100, device="cuda")
    assert right(add, a)
    keep = [add(a, a) for _ in range(8)]
    torch.cuda.synchronize()
    del keep  # the caching allocator serves the thread without a call of the runtime
    results, driver = [], ctypes.CDLL("libcuda.so.1")

    def work():
        for _ in range(3):
            results.append(add(a, a))
            assert driver.cuCtxSetCurrent(None) == 0

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 3 and all(torch.equal(r, a + a) for r in results)
    assert native.stats()["fallbacks"] == {}


@pytest.mark.parametrize("planned_before", [True, False])
def test_graph_capture(native, add, planned_before):
    a = torch.randn(1000, device="cuda")
    if planned_before:
        assert right(add, a)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        c = add(a, a)
        d = add(c, a)
    for _ in range(3):
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(d, a + a + a)
    assert native.stats()["fallbacks"] == {}


def test_more_than_48_kilobytes_of_shared_memory(native):
    sizes = iter(
        [96 << 10, 64 << 10]
    )  # the second plan shares the function and must not lower the first one's limit
    native.set_planner(lambda group, args, varies: plan(native, args, "add_through_shared", 256, next(sizes)))
    first = group_function(ADD, 2, cache_id=native.group_id(torch._C.parse_ir(ADD), "96 KB"))
    second = group_function(ADD, 2, cache_id=native.group_id(torch._C.parse_ir(ADD), "64 KB"))
    a = torch.randn(3000, device="cuda")
    assert right(first, a) and right(second, a) and right(first, a)
    assert native.stats()["fallbacks"] == {}


def test_failed_launch_is_remembered_and_the_context_lives(native):
    reports = []
    native.set_reporter(lambda kind, group, reason: reports.append((kind, reason)))
    native.set_planner(lambda group, args, varies: plan(native, args, block=4096))
    f, a = group_function(ADD, 2), torch.randn(5000, device="cuda")
    for _ in range(3):
        assert right(f, a)
    assert [kind for kind, _ in reports] == ["launch"] and "CUDA_ERROR_INVALID_VALUE" in reports[0][1]
    assert list(native.stats()["fallbacks"].values()) == [3]


def test_out_of_memory_runs_unfused_and_the_plan_lives_on(native, add):
    reports = []
    native.set_reporter(lambda kind, group, reason: reports.append(kind))
    a = torch.randn(1000, device="cuda")
    assert right(add, a)
    huge = torch.empty(1, device="cuda").expand(1 << 44)
    with pytest.raises(RuntimeError, match="(?i)memory"):  # the fallback has no more room either
        add(huge, huge)
    assert reports == [] and right(add, a)  # the error says it all


def test_cpu_tensor_among_cuda_tensors(native, add):
    a = torch.randn(4, device="cuda")
    with pytest.raises(RuntimeError, match="device"):  # as eager says it
        add(a, a.cpu())
    assert "a CPU tensor that is not 0-dim meets CUDA tensors" in native.stats()["fallbacks"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_devices_have_their_own_plans(native, add):
    for _ in range(3):
        for device in range(2):
            assert right(add, torch.randn(64, device=f"cuda:{device}"))
    assert torch.cuda.current_device() == 0
    assert native.stats()["plans_built"] == 2


def test_threads_with_their_own_streams(native, add):
    def work(seed, failures):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(200):
                a = torch.full((1 + (seed * 37 + i * 11) % 900,), float(seed), device="cuda")
                c = add(a, a)
                if i % 20 == 0 and not torch.equal(c, a + a):
                    failures.append((seed, i))

    failures = []
    threads = [threading.Thread(target=work, args=(seed, failures)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and native.stats()["fallbacks"] == {}
