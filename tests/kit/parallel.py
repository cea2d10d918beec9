"""Two processes that train one model together, with tsfuser and in eager mode, for tests of torch.compile.

Example:

    for found in train_together("ddp", "cpu", tmp_path):
        assert found.launches > 0 and found.fallbacks == {}
"""

import copy
import os
import time
import traceback
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.support import assert_matches

PROCESSES = 2
STEPS = 3
WIDTH = 300
TERMS = 4 * WIDTH  # the longest sums of a step
BUCKET = 1  # MB: a block's gradients have 1.4


class Block(nn.Module):
    """A layer with a residual, and a buffer that it counts calls and sums up in."""

    def __init__(self, width=8, rate=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.rate = rate
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y = F.gelu(self.up(self.norm(x) - self.mean))
        return x + F.dropout(self.down(y), self.rate, self.training)


class Blocks(nn.Module):
    """Torch does not compile frames of its own `nn.Sequential`, where hooks of others call it."""

    def __init__(self, width, count):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Found(NamedTuple):
    """What one process saw. `error`: what it raised, "" where it raised nothing."""

    rank: int
    error: str
    launches: int = 0
    graphs: int = 0
    fallbacks: dict | None = None


def train_together(kind, device, folder, seconds=60):
    """What each process found, by its rank. `kind`: "ddp" or "fsdp"; `device`: "cpu" or "cuda"; `folder`: an
    empty one, in which they meet. Processes that take longer are ended, and TimeoutError is raised."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    started = [
        context.Process(target=_report, args=(rank, kind, device, str(folder), seconds, results), daemon=True)
        for rank in range(PROCESSES)
    ]
    end, found = time.monotonic() + seconds, []
    try:
        for process in started:
            process.start()
        # the first error is told at once, though the other process waits for the one that had it
        while len(found) < PROCESSES and not any(each.error for each in found):
            if time.monotonic() > end:
                raise TimeoutError(f"{kind} on {device}: in {seconds} s just {found} of {PROCESSES} came")
            if not results.empty():
                found.append(results.get(timeout=5))
            elif any(process.exitcode for process in started):
                codes = [process.exitcode for process in started]
                raise RuntimeError(f"{kind} on {device}: processes ended with {codes}, after {found}")
            time.sleep(0.05)
        for process in started:
            process.join(max(0.0, min(end - time.monotonic(), 10)))
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join(10)
    return sorted(found)


def _report(rank, kind, device, folder, seconds, results):
    """A process."""
    try:
        results.put(_train(rank, kind, device, folder, seconds))
    except BaseException:
        results.put(Found(rank, traceback.format_exc()))
    results.close()
    results.join_thread()


def _train(rank, kind, device, folder, seconds):
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # two GPUs need no multicast
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting-{kind}",  # which wants no free port
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=seconds),
        device_id=place if device == "cuda" else None,
    )
    try:
        _compare_steps(rank, *_models(kind, place), place)
        dist.barrier()
        stats = tsfuser.stats()
        return Found(rank, "", stats["launches"], stats["graphs"], dict(stats["fallbacks"]))
    finally:
        dist.destroy_process_group()


def _models(kind, place):
    """Modules of equal parameters, and what is called: compiled, in eager mode, and in float64."""
    torch.manual_seed(0)
    eager = Blocks(WIDTH, 2).to(place)
    modules = [copy.deepcopy(eager), eager, copy.deepcopy(eager).double()]
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        # two buckets, at which torch cuts the graph
        modules = [DistributedDataParallel(module, bucket_cap_mb=BUCKET) for module in modules]
        return modules, [torch.compile(modules[0], backend="tsfuser"), *modules[1:]]
    from torch.distributed.fsdp import fully_shard

    for block in modules[0].blocks:
        block.compile(backend="tsfuser")
    for module in modules:
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    return modules, modules


def _compare_steps(rank, modules, functions, place):
    """Each process has data of its own; gradients are means over processes. Then a step of SGD."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in modules]
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, WIDTH, device=place)
        for module, function in zip(modules, functions):
            module.zero_grad()
            dtype = next(module.parameters()).dtype
            function(x.to(dtype)).square().sum().div(8).backward()
        for parameters in zip(*(module.parameters() for module in modules)):
            assert_matches(*(_whole(p.grad) for p in parameters), ops=TERMS)
        for buffers in zip(*(module.buffers() for module in modules)):
            assert_matches(*buffers, ops=16)
        for optimizer in optimizers:
            optimizer.step()


def _whole(gradient):
    """FSDP has a part of it in each process."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
