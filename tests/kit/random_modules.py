"""Random networks of modules, with transposes, reshapes, slices and checkpoints between them, which
torch.compile runs.

In: a seed. Out: a `Network`, which a sweep takes as it takes a Program: what it is, how it runs, and what it
should give in two steps, forward and backward: results, gradients, buffers, and strides of all of these.
Example:

    v0 = self.v0_0(x.transpose(1, 2))       # nn.BatchNorm1d(8)
    v1 = checkpoint(lambda t: F.gelu(self.v1_0(t)).flatten(1), v0, use_reentrant=False)
"""

import functools
import random
import re
import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kit.random_compare import last_roundings
from kit.random_outcome import incoming
from kit.random_steps import step
from kit.roundings import Shaken
from kit.support import EPSILON

MOST_ELEMENTS = 6000
LARGEST = 1e4  # of results: more is a matter of rounding
STEPS = 2


@dataclass(frozen=True)
class Network:
    """`steps`: name, text, in which `{0}` and `{1}` are the `operands`, and the operands. A text names
    modules by what makes them, between `@`. `x`: the sizes of the input, of indices below `table` if that is
    not 0."""

    seed: int
    x: tuple
    table: int
    steps: tuple
    results: tuple
    training: bool = True
    features: tuple = ("modules",)
    doors: tuple = ("compile",)
    gradients: bool = True
    calls: tuple = ({},)

    def source(self):
        makes, lines = [], []
        for name, text, operands in self.steps:
            made = iter(f"{name}_{k}" for k in range(text.count("@")))

            def named(found, made=made):
                attribute = next(made)
                makes.append(f"        self.{attribute} = {found[1]}")
                return f"self.{attribute}"

            lines.append(f"        {name} = {re.sub('@(nn[.].*?)@', named, text).format(*operands)}")
        init = ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()", *makes]
        forward = ["", "    def forward(self, x):", *lines, f"        return {', '.join(self.results)},"]
        return "\n".join([*init, *forward, ""])

    def script(self):
        """It as a script, which needs torch and tsfuser alone."""
        x = f"torch.randint(0, {self.table}, {self.x})" if self.table else f"torch.randn({self.x})"
        leaf = "" if self.table else ".requires_grad_()"
        return (
            "import torch, tsfuser\nimport torch.nn.functional as F\nfrom torch import nn\n"
            f"from torch.utils.checkpoint import checkpoint\n\n{self.source()}\n"
            f"torch.manual_seed({self.seed})\nnet = Network().train({self.training})\n"
            f"torch.manual_seed({self.seed + 1})\nx = {x}{leaf}\n"
            "for run in (net, torch.compile(net, backend='tsfuser')):\n    results = run(x)\n"
            "    print([(t.stride(), t.sum().item()) for t in results])\n"
            "    sum(t.square().sum() for t in results).backward()\n"
        )

    def module(self, device="cpu"):
        torch.manual_seed(self.seed)
        return _class_of(self.source())().to(device).train(self.training)

    def input(self, device="cpu"):
        torch.manual_seed(self.seed + 1)
        if self.table:
            return torch.randint(0, self.table, self.x).to(device)
        return torch.randn(self.x).to(device)

    def outcome(self, function, call, device):
        """Name -> tensor, of two steps; `function` makes of a module what is run."""
        return self._outcome(self.module(device), self.input(device), function)

    def traced_strides(self, device):
        """Strides of the results as torch's fake kernels have them. Of a batch norm on the CPU they are
        others than those of its kernel, and what is compiled has to keep the traced ones."""
        module, x = self.module(device), self.input(device)
        with FakeTensorMode(allow_non_fake_inputs=True):
            results = module(x)
        return {f"result {i} of step {k}": strides(t) for i, t in enumerate(results) for k in range(STEPS)}

    def expected(self, device, trials):
        """As `random_compare.expectation`: eager's, the exact ones, how far off they may be."""
        eager, exact = self.outcome(_itself, 0, device), self._noisy(None, 0)
        others = [eager, *(self._noisy(EPSILON[torch.float32], seed) for seed in range(1, trials + 1))]
        found = {}
        for name, tensor in eager.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of eager is not finite")
            off = max(_largest(other[name].cpu().double() - exact[name].double()) for other in others)
            allowed = (
                4 * off + last_roundings(tensor.dtype, exact[name]) if tensor.is_floating_point() else None
            )
            found[name] = tensor, exact[name], allowed
        return found

    def _noisy(self, epsilon, seed):
        x = self.input()
        shaken = Shaken(seed)
        with shaken, shaken.by(epsilon):
            x = x.double() if x.is_floating_point() else x
            return self._outcome(self.module().double(), x, _itself)

    def _outcome(self, module, x, function):
        """Without buffers of modules in checkpoints: eager updates these in the forward and again when it
        computes the checkpoint again, torch.compile once."""
        again = tuple(f"buffer {name}_" for name, text, _ in self.steps if text.startswith("checkpoint"))
        return {name: t for name, t in _outcome(module, x, function).items() if not name.startswith(again)}

    def smaller(self):
        """Networks that are one step smaller."""
        if len(self.results) > 1:
            for name in self.results:
                yield _pruned(replace(self, results=(name,)))
        for name, _, operands in reversed(self.steps):
            moved = {name: operands[0]}
            rest = tuple((n, t, tuple(moved.get(o, o) for o in ops)) for n, t, ops in self.steps if n != name)
            results = tuple(dict.fromkeys(moved.get(r, r) for r in self.results))
            if rest and "x" not in results:
                yield _pruned(replace(self, steps=rest, results=results))


@functools.lru_cache(maxsize=512)
def _class_of(source):
    """torch.compile traces a class once for all its modules."""
    space = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint}
    exec(source, space)
    return space["Network"]


def strides(x):
    """Those of dims of more than one element."""
    return [s for n, s in zip(x.shape, x.stride()) if n > 1]


def _itself(module):
    return module


def _largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def _outcome(module, x, function):
    run, found = function(module), {}
    for k in range(STEPS):
        leaf = x.clone().requires_grad_(x.is_floating_point())
        module.zero_grad()
        results = run(leaf)
        ends = [t for t in results if t.requires_grad]
        if ends:
            # AOTAutograd gives an incoming gradient the layout of the result
            torch.autograd.backward(ends, [torch.empty_like(t).copy_(incoming(t)) for t in ends])
        found |= {f"result {i} of step {k}": t.detach() for i, t in enumerate(results)}
        grads = {"x": leaf.grad} | {name: p.grad for name, p in module.named_parameters()}
        found |= {f"gradient of {name} in step {k}": g for name, g in grads.items() if g is not None}
    return found | {f"buffer {name}": b for name, b in module.named_buffers()}


def generate_network(seed):
    """The network of a seed; None where it gives none."""
    rng = random.Random(f"modules {seed}")
    rank, table = rng.choice((2, 3, 3, 3, 4, 4)), 0
    sizes = tuple(rng.choice((1, 2, 3, 4, 5, 6, 8, 8, 12)) for _ in range(rank))
    if rank == 2 and rng.random() < 0.6:
        table = rng.randint(3, 20)
    network = Network(seed, sizes, table, (), (), rng.random() < 0.85)
    shapes = {"x": sizes}
    if table:
        network, shapes = _with(
            network, "v0", f"@nn.Embedding({table}, {rng.choice((4, 6, 8))})@({{0}})", "x"
        )
    for _ in range(rng.randint(3, 9)):
        floats = [name for name in shapes if name != "x" or not table]
        operand = floats[-1] if rng.random() < 0.8 else rng.choice(floats)
        text, other = step(rng, operand, shapes)
        made = _with(network, f"v{len(network.steps)}", text, operand, *other) if text else None
        if made is not None:
            network, shapes = made
    return replace(network, results=_results(rng, network)) if len(network.steps) > 1 else None


def _with(network, name, text, *operands):
    """The network with one more step, and the shapes of its values; None if eager does not take the step."""
    longer = replace(network, steps=(*network.steps, (name, text, operands)))
    names = [name for name, _, _ in longer.steps]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = replace(longer, results=tuple(names)).module()(longer.input())
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    last = values[-1]
    if not 1 < last.numel() <= MOST_ELEMENTS or last.dim() > 5 or float(last.abs().max()) > LARGEST:
        return None
    return longer, {"x": network.x} | {n: tuple(v.shape) for n, v in zip(names, values)}


def _results(rng, network):
    """What no step reads, and at times what one reads."""
    read = {o for _, _, operands in network.steps for o in operands}
    return tuple(name for name, _, _ in network.steps if name not in read or rng.random() < 0.1)


def _pruned(network):
    needed, steps = set(network.results), []
    for name, text, operands in reversed(network.steps):
        if name in needed:
            needed.update(operands)
            steps.append((name, text, operands))
    return replace(network, steps=tuple(reversed(steps)))
