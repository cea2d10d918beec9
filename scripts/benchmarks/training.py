"""Steps of training: forward and backward of a block, with one shape and with twenty.

In: names of blocks and peers. Out: a `Result` each. Device times are asked for later, by `profile`, because a
profiler that has run once slows the host down. Example:

    measured = Static("gelu", peers, settings)
    measured.profile(copy_bandwidth())
    print(measured.result.table())
"""

import random
import time
from dataclasses import dataclass

import torch

import tsfuser

from . import accuracy
from .blocks import BLOCKS, SHAPE
from .peers import PEERS
from .report import OUT_OF_TIME, Result
from .timing import CUDA, DEVICE, kernels, seconds, steps_per_second

SHAPES = 20
WARM_UP = 6  # TorchScript fuses in the third step, CUDA graphs are recorded in the second


@dataclass(frozen=True)
class Settings:
    """How much is measured. `deadline`: no measurement starts after it, by time.monotonic()."""

    shape: tuple = SHAPE
    steps: int = 100
    repeats: int = 5
    deadline: float = float("inf")

    @classmethod
    def here(cls, quick, budget=None):
        """Those of the figures on a CUDA device; smaller ones on the CPU; tiny ones to see that all runs."""
        deadline = time.monotonic() + budget if budget else float("inf")
        if quick:
            return cls((2, 8, 64), 2, 1, deadline)
        return cls(deadline=deadline) if CUDA else cls((8, 128, 1024), 10, 3, deadline)


def step_of(run, tensors, gradient):
    """One step: forward, backward, gradients set to None."""
    leaves = [x for x in tensors if x.requires_grad]

    def step():
        run(*tensors).backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    return step


def attempt(cell, settings, measure):
    """`cell` gets what `measure()` returns, or the error."""
    if time.monotonic() > settings.deadline:
        cell["error"] = OUT_OF_TIME
        return
    try:
        cell.update(measure())
    except Exception as error:  # noqa: BLE001: a peer may fail in any way
        cell["error"] = f"{type(error).__name__}: {error}"


def wrong_by(block, shape):
    """How far tsfuser's output and gradients, without dropout, are off: `accuracy.beyond`."""
    torch.manual_seed(0)
    shape = (2, *shape[1:])
    tensors, gradient = block.tensors(shape, DEVICE), torch.randn(shape, device=DEVICE)

    def run(name):
        return PEERS[name].prepare(block.function, block.without_dropout())

    exact = accuracy.trained(run("eager"), tensors, gradient, torch.float64)
    eager = accuracy.trained(run("eager"), tensors, gradient)
    with PEERS["tsfuser"].context():
        fused = accuracy.trained(run("tsfuser"), tensors, gradient, steps=4)
    return accuracy.beyond(fused, eager, exact, block.dtype)


class Static:
    """A block with one shape; `result` has steps a second, and after `profile` the device's times."""

    def __init__(self, name, peers, settings):
        self.block, self.settings, self.steps = BLOCKS[name], settings, {}
        self.moved = self.block.bytes(settings.shape)
        what = f"{list(settings.shape)} {str(self.block.dtype)[6:]}"
        title = f"{self.block.title}, {what}, {self.moved / 1e6:.1f} MB must move"
        self.result = Result(name, title, "its")
        torch.manual_seed(0)
        self.tensors = self.block.tensors(settings.shape, DEVICE)
        self.gradient = torch.randn(settings.shape, device=DEVICE).to(self.block.dtype)
        for key, peer in peers.items():
            if peer.static:
                cell = self.result.cells[key] = {}
                attempt(cell, settings, lambda: self.measure(key, peer))

    def measure(self, key, peer):
        """Steps a second, and how long the first steps took, compilers included."""
        if key == "tsfuser" and (wrong := wrong_by(self.block, self.settings.shape)) > 64:
            raise ArithmeticError(f"wrong result: {wrong:.3g} roundings from float64")
        with peer.context():
            step = step_of(peer.prepare(self.block.function, self.block.numbers), self.tensors, self.gradient)
            start, _ = seconds(lambda: [step() for _ in range(WARM_UP)] and None)
            its = steps_per_second(step, self.settings.steps, self.settings.repeats)
        self.steps[key] = step
        return {"its": its, "start s": start}

    def profile(self, bandwidth):
        """Adds device time, kernels and the fraction of the byte floor to each cell."""
        for key, step in self.steps.items():
            attempt(self.result.cells[key], self.settings, lambda: self.device_times(key, step, bandwidth))

    def device_times(self, key, step, bandwidth):
        with PEERS[key].context():
            measured = kernels(step)
        if measured is None:
            return {}
        us, count = measured
        return {"gpu us": us, "kernels": count, "of floor": 1e6 * self.moved / bandwidth / us}


def dynamic(name, peers, settings):
    """A block with twenty random shapes after a warm-up with one: steps a second in the first 100 and later,
    and the kernels that tsfuser compiled for one shape and for all."""
    block, generator = BLOCKS[name], random.Random(42)
    torch.manual_seed(0)
    batches = []
    for _ in range(SHAPES):
        shape = [
            settings.shape[0] + generator.randrange(-2, 3),
            settings.shape[1] + generator.randrange(-2, 3),
        ]
        shape = (max(shape[0], 2), shape[1], settings.shape[2])
        batches.append((block.tensors(shape, DEVICE), torch.randn(shape, device=DEVICE).to(block.dtype)))
    title = f"{block.title}, {SHAPES} random shapes near {list(settings.shape)} {str(block.dtype)[6:]}"
    result = Result(f"{name}_shapes", title, "later its")

    def measure(key, peer):
        with peer.context():
            run = peer.prepare(block.function, block.numbers)
            steps = [step_of(run, *batch) for batch in batches]
            if peer.ours:
                tsfuser.reset()  # kernels that other blocks have loaded count again
            for _ in range(3):
                steps[0]()
            warm = tsfuser.stats()
            count, turn = settings.steps, iter(range(1 << 30))
            rates = [
                steps_per_second(lambda: steps[next(turn) % SHAPES](), count, 1)
                for _ in range(1 + settings.repeats)
            ]
            after = tsfuser.stats()
        cell = {f"first {count}": rates[0], "later its": sorted(rates[1:])[(len(rates) - 1) // 2]}
        if peer.ours:
            one, later = (s["kernels_compiled"] + s["disk_hits"] for s in (warm, after))
            cell |= {"kernels, 1": one, "new later": later - one}
        return cell

    for key, peer in peers.items():
        if peer.shapes:
            cell = result.cells[key] = {}
            attempt(cell, settings, lambda: measure(key, peer))
    return result
