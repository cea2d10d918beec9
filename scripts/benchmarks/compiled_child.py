"""One model with one backend of torch.compile, in a process of its own.

In: a line of JSON on stdin, once torch is imported and the device has started: model, peer (`eager`,
`compile`, `tsfuser`; with `thunder` models and peers are those of thunder_cases.py), `large`, `more`
(whether later steps are measured, too, or just the first one), `seconds`. Out: a line of JSON for each thing
that was measured, so that what is there when the time is up counts. Example:

    {"first s": 3.1}
    {"its": 410.2}
"""

import contextlib
import copy
import json
import random
import statistics
import sys
import time
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import tsfuser
from benchmarks import thunder_cases
from benchmarks.accuracy import beyond
from benchmarks.child import tell, telling_errors
from benchmarks.compiled_cases import CASES, PACKAGES
from benchmarks.timing import CUDA, DEVICE, kernels, seconds

BACKENDS = {"compile": "inductor", "tsfuser": "tsfuser"}
SHAPES = 20


class Model:
    """A case on the device."""

    def __init__(self, name, large, cases):
        self.case, self.large = cases[name], large
        self.module = self.case.module(large).to(DEVICE)
        self.autocast = self.case.autocast and CUDA

    def inputs(self, n):
        return tuple(x.to(DEVICE) for x in self.case.inputs(self.large, n))

    def step(self, n, peer=None, module=None, dtype=None):
        """A function that does a step and returns results and gradients."""
        module = copy.deepcopy(self.module) if module is None else module
        inputs, autocast = self.inputs(n), self.autocast and dtype is None
        if dtype is not None:
            module = module.to(dtype)
            inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
        return self.stepping(with_peer(peer, module), module, inputs, autocast)

    def stepping(self, run, module, inputs, autocast):
        gradients = []

        def forward():
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                out = run(*inputs)
            return out if isinstance(out, tuple) else (out,)

        def inference():
            with torch.no_grad():
                return list(forward())

        def training():
            out = forward()
            if not gradients:
                generator = torch.Generator(DEVICE).manual_seed(1)
                gradients.extend(torch.randn(o.shape, generator=generator, device=DEVICE) for o in out)
            module.zero_grad(set_to_none=True)
            torch.autograd.backward(out, [g.to(o.dtype) for g, o in zip(gradients, out)])
            found = (p.grad for p in module.parameters())
            return [*(o.detach() for o in out), *(g for g in found if g is not None)]

        return training if self.case.trains else inference


def with_peer(peer, module):
    """What is called in place of the module."""
    if peer in BACKENDS:
        return torch.compile(module, backend=BACKENDS[peer])
    return thunder_cases.jitted(peer, module) if peer in thunder_cases.EXECUTORS else module


def measure(order, tell):
    """Does what `order` says; `tell` gets each finding. With tsfuser comes eager, in cells of its own."""
    deadline = time.monotonic() + order["seconds"]
    peer, of_thunder = order["peer"], order.get("thunder", False)
    if of_thunder:
        thunder_cases.load()  # imports, as those of torch, are no part of a first step
    cases = thunder_cases.CASES if of_thunder else {**CASES, **PACKAGES}
    model, ours = Model(order["model"], order["large"], cases), peer.endswith("tsfuser")
    n = model.case.first(model.large)
    steps, tells = {"eager": model.step(n)}, {"eager": tell, peer: tell}
    if ours:
        tells["eager"] = lambda found: tell({"eager": found})
    for _ in range(3):  # the device, its allocator and its libraries start
        steps["eager"]()
    if order["more"] and (ours or peer == "eager"):
        later(steps["eager"], tells["eager"], model.large)
    if peer != "eager":
        steps[peer] = model.step(n, peer)
        took, _ = seconds(steps[peer])
        tell({"first s": took})
    if not order["more"]:
        return
    if not ours and peer != "eager":
        del steps["eager"]
    if ours and (wrong := wrong_by(model, n, peer)) > 64:
        raise ArithmeticError(f"wrong result: {wrong:.3g} roundings beyond eager's")
    if peer != "eager":
        later(steps[peer], tell, model.large)
    for name, step in reversed(steps.items()):  # a profiler slows the host from then on
        if time.monotonic() < deadline:
            profile(step, tells[name])
    steps.clear()
    if peer != "eager" and not of_thunder:
        shapes(model, peer, tell, deadline)


def wrong_by(model, n, peer):
    """How far the results of a first step are off, beyond eager's: from float64, with autocast float32."""
    exact = model.step(n, dtype=torch.float32 if model.autocast else torch.float64)()
    found = [[x.double() for x in step()] for step in (model.step(n, peer), model.step(n))]
    narrow = model.autocast or any(p.dtype == torch.bfloat16 for p in model.module.parameters())
    dtype = torch.bfloat16 if narrow else torch.float32
    return beyond(*found, [x.double() for x in exact], dtype)


def later(step, tell, large):
    """Steps a second; what a step allocates beyond parameters, inputs and gradients."""
    for _ in range(3):
        step()
    count = max(2, int((1.0 if large else 0.05) / 3 / max(seconds(step)[0], 1e-5)))
    rates = [count / seconds(lambda: [step() for _ in range(count)] and None)[0] for _ in range(3)]
    tell({"its": statistics.median(rates)})
    if not CUDA:
        tell({"peak MB": "n/a"})
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    tell({"peak MB": (torch.cuda.max_memory_allocated() - before) / 1e6})


def profile(step, tell):
    """A step's kernels, and their time."""
    us, number = kernels(step, 5) if CUDA else ("n/a", "n/a")
    tell({"gpu us": us, "kernels": number})


def shapes(model, peer, tell, deadline):
    """Graphs and kernels that twenty sizes after the first need, one compiled module for all."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    tsfuser.reset()
    module = copy.deepcopy(model.module)
    run = torch.compile(module, backend=BACKENDS[peer])
    first = model.case.first(model.large)
    sizes = random.Random(42).sample(range(first + 1, first + 2 * SHAPES + 1), SHAPES)

    def graphs_and_kernels():
        return counters["stats"]["unique_graphs"], _kernels(peer)

    def at(n):
        model.stepping(run, module, model.inputs(n), model.autocast)()

    at(first)
    before = graphs_and_kernels()
    for done, n in enumerate(sizes, 1):
        if time.monotonic() > deadline:
            break
        at(n)
        graphs, made = (b - a for a, b in zip(before, graphs_and_kernels()))
        tell({"graphs": graphs, "new krnls": made, "shapes": done})


def _kernels(peer):
    """Kernels that were compiled, or loaded, so far."""
    if peer == "tsfuser":
        found = tsfuser.stats()
        return found["kernels_compiled"] + found["disk_hits"]
    from torch._inductor import metrics

    return metrics.generated_kernel_count


def main():
    warnings.simplefilter("ignore")
    import torch._dynamo

    with contextlib.suppress(ImportError):  # inductor, imported by whoever compiles first
        import torch._inductor.compile_fx
    torch.zeros(1, device=DEVICE)
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return  # the parent needs no more
    with telling_errors():
        measure(order, tell)


if __name__ == "__main__":
    main()
