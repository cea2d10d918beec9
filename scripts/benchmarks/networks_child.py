"""One network with all peers, in TorchScript or torch.compile, in a process of its own.

In: a line of JSON on stdin: which `network` (networks.py), `training`, `large`, `peers`, `graphs` (each peer
as a CUDA graph); then any line, when it is this process's turn to measure. Out: a line of JSON for each thing
that was found. Between the two it tells that it is ready. Example:

    {"peer": "tsfuser", "warm-up s": 3.1}
    {"ready": true}
    {"peer": "tsfuser", "its": 410.2}
"""

import copy
import functools
import json
import statistics
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.child import tell, telling_errors
from benchmarks.networks import NETWORKS
from benchmarks.peers import PEERS
from benchmarks.timing import CUDA, DEVICE, kernels, seconds

STEPS = 6  # TorchScript fuses in the third
ROUNDS = 5


class Subject:
    """The network and its inputs on the device."""

    def __init__(self, order):
        torch.manual_seed(0)
        self.network, large, self.training = NETWORKS[order["network"]], order["large"], order["training"]
        self.graphs = order["graphs"]
        self.inputs = [x.to(DEVICE) for x in self.network.example(large, self.network.sizes[large])]
        self.module = self.network.make(large).to(DEVICE).train(self.training)
        if self.network.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.inputs = [x.contiguous(memory_format=torch.channels_last) for x in self.inputs]
        self.gradients = {}  # by dtype
        self.random = self.training and any(_draws(part) for part in self.module.modules())

    def prepared(self, peer, module):
        """The module as the peer runs it."""
        if peer == "compile":
            return torch.compile(module, mode="reduce-overhead" if self.graphs else None)
        run = module if peer == "eager" else self.scripted(module)
        return self.graphed(run, module) if self.graphs else run

    def graphed(self, run, module):
        """`run` as CUDA graphs, of the forward and of the backward."""
        module = _Autocasting(run, module)
        with torch.set_grad_enabled(self.training):
            return torch.cuda.make_graphed_callables(module, tuple(self.inputs), num_warmup_iters=STEPS)

    def scripted(self, module):
        """The module in TorchScript."""
        # else it shares what was compiled for the last one of its class
        torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
        if not self.network.traced:
            return torch.jit.script(module)
        # A trace has the casts; parts that switch autocast off would lose that if it were on for the trace.
        with autocast(cache_enabled=False):  # a cast that was kept would be a constant of the trace
            traced = torch.jit.trace(module, tuple(self.inputs), check_trace=False)

        def run(*inputs):
            with autocast(enabled=False):
                return traced(*inputs)

        return run

    def exact(self):
        """Result and gradients of a step in eager: in float64, or in float32 where others autocast."""
        return [x.double() for x in self.step("eager", torch.float32 if CUDA else torch.float64)()]

    def step(self, peer, dtype=None):
        """A function that does a step and returns the result and the gradients; with `dtype` in this one,
        without autocast."""
        module, inputs = copy.deepcopy(self.module).to(dtype), self.inputs
        if dtype is not None:
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        run = module if dtype is not None else self.prepared(peer, module)
        parameters = list(module.parameters())

        def forward():
            with autocast(enabled=CUDA and dtype is None):
                return run(*inputs)

        def inference():
            with torch.no_grad():
                return [forward()]

        def training():
            for parameter in parameters:
                parameter.grad = None
            out = forward()
            out.backward(self.gradient(out))
            return [out.detach(), *(p.grad for p in parameters if p.grad is not None)]

        return training if self.training else inference

    def gradient(self, out):
        """A random gradient of the result, the same in each dtype; drawn once, so that no step casts it."""
        if out.dtype not in self.gradients:
            generator = torch.Generator(DEVICE).manual_seed(1)
            drawn = torch.randn(out.shape, generator=generator, device=DEVICE)
            self.gradients[out.dtype] = drawn.to(out.dtype)
        return self.gradients[out.dtype]


class _Autocasting(torch.nn.Module):
    """`run` under autocast, which keeps no casts: those of a capture would belong to its graph. `module` has
    the parameters."""

    def __init__(self, run, module):
        super().__init__()
        self.run, self.module = run, module

    def forward(self, *inputs):
        with autocast(cache_enabled=False):
            return self.run(*inputs)


def autocast(enabled=CUDA, **settings):
    return torch.autocast(DEVICE, torch.bfloat16, enabled=enabled, **settings)


def _draws(part):
    """Whether a module draws random numbers in training."""
    return getattr(part, "p", 0) > 0 or any(
        isinstance(value, float) and value > 0 and "drop" in name for name, value in vars(part).items()
    )


def warmed(subject, peers):
    """Steps of the peers that could be prepared, compiled and run; what the others failed with is told."""
    steps = {}
    for peer in peers:
        with telling_errors(peer=peer), PEERS[peer].context():
            took, steps[peer] = seconds(functools.partial(_warm, subject, peer))
            tell({"peer": peer, "warm-up s": took})
    return steps


def _warm(subject, peer):
    step = subject.step(peer)
    for _ in range(STEPS):
        step()
    return step


def compared(subject, steps):
    """Tells how far tsfuser's result and gradients are from the exact ones, divided by how far eager's are.
    Farther than four times is an error, and tsfuser is not measured. Not where something is random."""
    if subject.random or not {"eager", "tsfuser"} <= set(steps):
        return
    exact, found = subject.exact(), {}
    for peer in ("tsfuser", "eager"):
        with PEERS[peer].context():
            found[peer] = [x.double() for x in steps[peer]()]
    # Gradients as one vector: those in front of a batch norm are zero but for roundings.
    for what, part in {"result": slice(0, 1), "gradients": slice(1, None)}.items():
        if exact[part]:
            mine, eager = (distance(found[peer][part], exact[part]) for peer in ("tsfuser", "eager"))
            tell({"fact": f"error of the {what}, of eager's", "value": f"{mine / eager:.3g}"})
            if not mine <= 4 * eager:
                steps.pop("tsfuser", None)
                tell(
                    {
                        "peer": "tsfuser",
                        "error": f"wrong {what}: {mine / eager:.3g} times as far off as eager's",
                    }
                )


def distance(found, exact):
    """The Euclidean distance of two lists of tensors, as a part of the length of the second."""
    apart, length = (
        sum(x.square().sum() for x in xs) for xs in ([a - b for a, b in zip(found, exact)], exact)
    )
    return max((apart / length).sqrt().item(), 1e-12)


def measured(steps):
    """Steps a second, in turns; then kernels, as a profiler slows the host from then on."""
    rates, counts = {peer: [] for peer in steps}, {}
    for round in range(ROUNDS + 1):  # the first one says how many steps a round has
        for peer, step in steps.items():
            with PEERS[peer].context():
                count = counts.get(peer, 2)
                took, _ = seconds(lambda: [step() for _ in range(count)] and None)
            counts[peer] = max(2, int((0.2 if CUDA else 0.02) * count / took))
            if round:
                rates[peer].append(count / took)
    for peer, found in rates.items():
        tell({"peer": peer, "its": statistics.median(found)})
    for peer, step in steps.items():
        with PEERS[peer].context():
            us, number = kernels(step, 5) if CUDA else ("n/a", "n/a")
        tell({"peer": peer, "gpu us": us, "kernels": number})


def main():
    warnings.simplefilter("ignore")
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return  # the parent needs no more
    with telling_errors():
        subject = Subject(order)
        steps = warmed(subject, order["peers"])
        compared(subject, steps)
        if CUDA:
            torch.cuda.empty_cache()  # others warm up, too
        tell({"ready": True})
        if sys.stdin.readline():
            measured(steps)


if __name__ == "__main__":
    main()
