"""What a block of training does not show: bandwidth of pointwise chains, host time of a call, large graphs.

In: peers and settings. Out: `Result`s. Example: `host(peers, settings)` -> us of a call of two ops on 64
elements.
"""

import statistics
import time
from unittest import mock

import torch
from torch import Tensor

import tsfuser
from tsfuser.frontends.torchscript import passes
from tsfuser.ir.call import Call, TensorArg
from tsfuser.planning import compile as pipeline
from tsfuser.planning.parse import parse
from tsfuser.target.function import Function

from . import timing
from .peers import PEERS
from .report import Result
from .timing import CUDA, DEVICE, host_us, time_us
from .training import attempt


def chain(x: Tensor, b: Tensor) -> Tensor:
    y = x + b
    y = y * 1.01
    y = y.relu()
    y = y - 0.25
    y = y * x
    y = y + 1.5
    y = torch.abs(y)
    y = y * 0.5
    y = torch.minimum(y, x)
    return y + x


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t() * 0.5


def small(x: Tensor) -> Tensor:
    return (x + 1.0).relu()


def bandwidth(name, function, shapes, copies, peers, settings, device=None, dtype=torch.float32):
    """Device time of `function` on tensors of `shapes`, and its part of the copy bandwidth; a copy of the
    first moves 1/`copies` of the bytes that must move."""
    device = device or DEVICE
    sets = [tuple(torch.randn(s, device=device, dtype=dtype) for s in shapes) for _ in range(2)]
    title = f"{name} {list(shapes[0])} {str(dtype)[6:]} on {device}"
    result, repeats = Result(f"{name}_{str(dtype)[6:]}", title, "us", lower=True), 3 * settings.repeats
    clock = time_us if CUDA and device != "cpu" else timing.clock_us
    out = torch.empty_like(sets[0][0])
    copy = clock(lambda x, *_: out.copy_(x), sets, repeats)

    def measure(peer):
        with torch.no_grad(), peer.context():
            us = clock(peer.prepare(function), sets, repeats)
        return {"us": us, "of copy": copies * copy / us}

    for key, peer in peers.items():
        if peer.static and not key.startswith("mef"):
            attempt(result.cells.setdefault(key, {}), settings, lambda: measure(peer))
    return result


def pointwise(peers, settings, quick):
    """Ten ops with a bias: one read, one write. x + y.t(): two reads, one write."""
    rows, side = (256, 64) if quick else (65536, 8192) if CUDA else (4096, 2048)
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        yield bandwidth("chain", chain, ((rows, 1024), (1024,)), 1, peers, settings, dtype=dtype)
        yield bandwidth("transposed", transposed_add, ((side, side),) * 2, 1.5, peers, settings, dtype=dtype)


def on_cpu(peers, settings, quick):
    """The chain on CPU tensors, beside eager and TorchScript; torch.compile takes long to build it here."""
    chosen = {k: p for k, p in peers.items() if k in ("eager", "script", "tsfuser")}
    result = bandwidth("chain", chain, ((256 if quick else 4096, 1024), (1024,)), 1, chosen, settings, "cpu")
    result.name = "cpu"
    yield result


def host(peers, settings, quick):
    """Host time of a call of two ops on 64 elements; of one eager op; of calls with shapes never seen."""
    count, x = 20 if quick else 1000, torch.randn(64, device=DEVICE)
    with torch.no_grad():
        one = host_us(lambda: torch.add(x, 1.0), count)
        result = Result(
            "host",
            f"host time of (x + 1).relu(), 64 elements on {DEVICE}; one eager op takes {one:.2f} us",
            "us",
            lower=True,
        )

        def measure(peer):
            with peer.context():
                call = peer.prepare(small)
                us = host_us(lambda: call(x), count)
            return {"us": us, "of eager op": us / one}

        for key, peer in peers.items():
            if peer.static and not key.startswith("mef"):
                attempt(result.cells.setdefault(key, {}), settings, lambda: measure(peer))
        if "tsfuser" in peers:
            attempt(result.cells["tsfuser"], settings, lambda: new_shapes(result.facts))
    yield result


def new_shapes(facts):
    """Calls with 200 shapes that were never seen, of a known class."""
    inputs = [torch.randn(n, 64, device=DEVICE) for n in range(4, 204)]
    times = []
    with PEERS["tsfuser"].context():
        call = PEERS["tsfuser"].prepare(small)
        for n in (300, 301, 302, 303):
            call(torch.randn(n, 64, device=DEVICE))
        before = tsfuser.stats()
        for x in inputs:
            timing.synchronize()
            start = time.perf_counter()
            call(x)
            times.append(1e6 * (time.perf_counter() - start))
        after = tsfuser.stats()
    made = sum(after[name] - before[name] for name in ("kernels_compiled", "disk_hits"))
    facts["a shape never seen"] = (
        f"{statistics.median(times):.2f} us, 99th percentile {sorted(times)[-2]:.2f} us; "
        f"kernels compiled in {len(inputs)} shapes: {made}"
    )
    return {"new shape us": statistics.median(times)}


def large_graph(nodes):
    """Text of a typed graph: a chain of pointwise ops, all different in their constants."""
    kind = "Float(512, 512, strides=[512, 1], requires_grad=0, device=cuda:0)"
    lines = [f"graph(%v0 : {kind}):", "  %one : int = prim::Constant[value=1]()"]
    for i in range(nodes):
        op = (f"mul(%v{i}, %c{i})", f"add(%v{i}, %c{i}, %one)", f"relu(%v{i})", f"tanh(%v{i})")[i % 4]
        lines.append(f"  %c{i} : float = prim::Constant[value={1 + i / nodes:.6f}]()")
        lines.append(f"  %v{i + 1} : {kind} = aten::{op}")
    return "\n".join([*lines, f"  return (%v{nodes})"])


def compile_time(nodes):
    """Seconds of the graph pass, and of planning and generating the source of all its groups for CUDA; no
    compiler runs."""
    graph = torch._C.parse_ir(large_graph(nodes))
    start = time.perf_counter()
    fused = passes.fuse(graph)
    passed = time.perf_counter() - start
    ids = [node.i("cache_id") for node in fused.findAllNodes("prim::CudaFusionGroup", True)]
    with mock.patch.object(
        pipeline, "functions", lambda kernels, device: [Function(0, None) for _ in kernels]
    ):
        start = time.perf_counter()
        for group in ids:
            call = Call((TensorArg("float32", "cuda:0", (512, 512), (512, 1)),))
            pipeline.compile_fusion(call, parse(tsfuser._C.group_graph(group), call, "cuda:0"), "cuda:0")
    return passed, time.perf_counter() - start, len(ids)


def graphs(peers, settings, quick):
    """The graph pass and code generation on graphs of 1,000 and 10,000 pointwise nodes."""
    result = Result(
        "graph", "graph pass and code generation, a chain of pointwise nodes", "seconds", lower=True
    )
    if "tsfuser" not in peers:
        return
    result.cells["tsfuser"] = {}

    def measure(nodes):
        passed, generated, count = compile_time(nodes)
        result.facts[f"{nodes} nodes"] = (
            f"{passed + generated:.2f} s: {passed:.2f} s graph pass, {generated:.2f} s code of {count} groups"
        )
        return {f"{nodes} s": passed + generated}

    for nodes in (100, 200) if quick else (1000, 10000):
        attempt(result.cells["tsfuser"], settings, lambda: measure(nodes))
    yield result
