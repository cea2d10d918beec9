"""One model of the dashboard in a process of its own: a training step or an inference, by each peer.

In: a line of JSON on stdin: `model`, `mode` (training, inference), `part`, `large`, `peers`; for the part
`steady` a second line when it is this process's turn to measure. Out: a line of JSON for each finding;
between the two lines of `steady`, that the process is ready. Example:

    {"peer": "tsfuser", "right": "yes"}
    {"ready": true}
    {"peer": "tsfuser", "ms": 12.4}
"""

import copy
import json
import statistics
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from benchmarks.child import tell, telling_errors
from benchmarks.dashboard_blocks import BLOCKS
from benchmarks.dashboard_models import MODELS
from benchmarks.timing import CUDA, DEVICE, kernels, seconds

BACKENDS = {"compile": "inductor", "tsfuser": "tsfuser"}
#: How far a result may be from float64's beyond twice eager's distance; so torch's dashboard judges bfloat16.
TOLERANCE = 1e-2
JUDGED = (1, 3)  # the steps whose results are compared
ROUNDS, SECONDS = 5, 0.4
NEW_SIZES = 6


class Subject:
    """The model and its inputs on the device."""

    def __init__(self, order):
        self.model, self.large = {**MODELS, **BLOCKS}[order["model"]], order["large"]
        self.training = order["mode"] == "training"
        # TorchDynamo fills whole numbers of a module in as constants, so all peers get one module's
        self.module = self.model.module(self.large).to(DEVICE).train(self.training)
        if not self.training and CUDA and not self.model.block:
            self.module = self.module.to(torch.bfloat16)

    def inputs(self, n, dtype):
        found = self.model.inputs(self.large, n)
        if not self.training and not self.model.block:  # no loss
            found = {name: x for name, x in found.items() if name not in ("labels", "targets", "return_loss")}
        return {
            name: x.to(DEVICE, dtype if x.is_floating_point() else None) if torch.is_tensor(x) else x
            for name, x in found.items()
        }

    def compiled(self, peer):
        """The module, and what the peer calls in its place."""
        module = copy.deepcopy(self.module)
        return module, torch.compile(module, backend=BACKENDS[peer]) if peer in BACKENDS else module

    def step(self, module, run, n=None, autocast=CUDA, dtype=None):
        """A function that does a step of a batch of `n` and returns results and gradients."""
        if dtype is None and not self.model.block:
            dtype = next(module.parameters()).dtype
        inputs = self.inputs(n or self.model.sizes[self.large], dtype)
        if not self.training:
            return self.inferred(run, inputs)
        return (self.driven if self.model.block else self.trained)(run, module, inputs, autocast)

    def exact(self):
        """Results and gradients in float64; of a model that cannot run in it, in float32."""
        for dtype in (torch.float64, torch.float32) if self.model.exact else (None,):
            module = copy.deepcopy(self.module).to(dtype)
            try:
                found = self.step(module, module, autocast=False, dtype=dtype)()
                return [x.double() if x.is_floating_point() else x for x in found]
            except RuntimeError as error:
                failure = error
        raise failure

    def trained(self, run, module, inputs, autocast):
        targets = inputs.pop("targets", None)
        parameters = list(module.parameters())

        def step():
            for parameter in parameters:
                parameter.grad = None
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                out = run(**inputs)
                loss = _loss(out, targets)
            loss.backward()
            return [loss.detach(), *(p.grad for p in parameters if p.grad is not None)]

        return step

    def driven(self, run, module, inputs, autocast):
        """Of a block, whose results get random gradients."""
        parameters, gradients = list(module.parameters()), []

        def step():
            for parameter in parameters:
                parameter.grad = None
            out = [x for x in _tensors(run(**inputs)) if x.requires_grad]
            if not gradients:
                generator = torch.Generator(DEVICE).manual_seed(1)
                gradients.extend(torch.randn(x.shape, generator=generator, device=DEVICE) for x in out)
            torch.autograd.backward(out, [g.to(x.dtype) for g, x in zip(gradients, out)])
            return [*(x.detach() for x in out), *(p.grad for p in parameters)]

        return step

    def inferred(self, run, inputs):
        def step():
            with torch.no_grad():
                return _tensors(run(**inputs))

        return step


def _loss(out, targets):
    """The loss that the model gives; else the cross entropy with classes, or the squares of differences."""
    if targets is None:
        return out.loss
    found = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
    return F.mse_loss(found, targets) if targets.is_floating_point() else F.cross_entropy(found, targets)


def _tensors(out):
    """The tensors of a result, in order."""
    leaves, _ = torch.utils._pytree.tree_flatten(out if not hasattr(out, "to_tuple") else out.to_tuple())
    return [x for x in leaves if torch.is_tensor(x)]


def _copied(found, kept=False):
    """`kept`: on the device, as a block's results may be large; what has 8 bits is compared as float32."""
    found = [x.float() if x.is_floating_point() and x.element_size() == 1 else x for x in found]
    return [x.detach() if kept else x.detach().cpu() for x in found]


def steady(order, wait):
    """Right or not; then, once `wait` returns, time of a step by the clock and of its kernels, and memory."""
    subject, peers = Subject(order), order["peers"]
    kept = subject.model.block
    exact = _copied(subject.exact(), kept)
    plain = _copied(subject.step(*subject.compiled("eager"))(), kept)
    steps = {}
    for peer in peers:
        with telling_errors(peer=peer):
            step = subject.step(*subject.compiled(peer))
            found = {k: _copied(step(), kept) for k in range(1, JUDGED[-1] + 1)}
            right = all(_same(found[k], plain, exact) for k in JUDGED)
            tell({"peer": peer, "right": "yes" if right or peer == "eager" else "no"})
            steps[peer] = step
            del found
    del exact, plain
    if CUDA:  # others compile meanwhile
        torch.cuda.empty_cache()
    tell({"ready": True})
    wait()
    for peer, ms in _clock(steps).items():
        tell({"peer": peer, "ms": ms})
    for peer, step in steps.items() if CUDA else ():
        us, number = kernels(step, 5)
        tell({"peer": peer, "kernel us": us, "kernels": number})
    for peer in list(steps) if CUDA else ():
        tell({"peer": peer, "peak MB": _peak(subject, peer, steps)})


def _same(found, plain, exact):
    from torch._dynamo.utils import same

    return len(found) == len(exact) and same(plain, found, exact, tol=TOLERANCE)


def _clock(steps):
    """Milliseconds of a step by the clock: the median of rounds in which the peers take turns."""
    for step in steps.values():
        for _ in range(2):
            step()
    once = {peer: max(seconds(step)[0], 1e-5) for peer, step in steps.items()}
    times = {peer: [] for peer in steps}
    for _ in range(ROUNDS):
        for peer, step in steps.items():
            count = max(2, int(SECONDS / ROUNDS / once[peer])) if CUDA else 1
            times[peer].append(seconds(lambda: [step() for _ in range(count)] and None)[0] / count)
    return {peer: 1e3 * statistics.median(found) for peer, found in times.items()}


def _peak(subject, peer, steps):
    """The peak of a step in MB, parameters and gradients with it: what the other peers hold is left out."""
    step = steps[peer]
    step()
    torch.cuda.synchronize()
    kept = sum(x.numel() * x.element_size() for x in subject.module.parameters())
    others = torch.cuda.memory_allocated()
    del step
    torch.cuda.reset_peak_memory_stats()
    steps[peer]()
    torch.cuda.synchronize()
    gradients = kept if subject.training else 0  # of the step before, freed as this one begins
    return (torch.cuda.max_memory_allocated() - others + kept + gradients) / 1e6


def first(order, wait):
    """Seconds of the first step of the one peer, imports and the start of the device left out."""
    subject, [peer] = Subject(order), order["peers"]
    with telling_errors(peer=peer):
        subject.step(*subject.compiled("eager"))()  # the device's libraries start
        step = subject.step(*subject.compiled(peer))
        tell({"peer": peer, order["column"]: seconds(step)[0]})


def sizes(order, wait):
    """Seconds and graphs that six more batch sizes need, beyond a later step of each."""
    from torch._dynamo.utils import counters

    subject, [peer] = Subject(order), order["peers"]
    n, compiled = subject.model.sizes[subject.large], subject.compiled(peer)
    with telling_errors(peer=peer):
        steps = [subject.step(*compiled, n + k) for k in range(NEW_SIZES + 1)]
        steps[0]()
        graphs = counters["stats"]["unique_graphs"]
        took = [seconds(step)[0] for step in steps[1:]]
        later = [seconds(step)[0] for step in steps[1:]]
        more = counters["stats"]["unique_graphs"] - graphs
        tell({"peer": peer, "sizes s": sum(took) - sum(later), "graphs": more})


PARTS = {"steady": steady, "first": first, "filled": first, "sizes": sizes}


def main():
    warnings.simplefilter("ignore")
    import torch._dynamo

    import tsfuser  # noqa: F401  imports are no part of a first step

    if CUDA:
        import torch._inductor.compile_fx
    torch.zeros(1, device=DEVICE)
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return
    with telling_errors():
        PARTS[order["part"]](order, sys.stdin.readline)


if __name__ == "__main__":
    main()
