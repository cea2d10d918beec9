"""torch's own lists of modules, optimizers and higher-order ops, run through torch.compile.

In: an entry of `module_db`, `optim_db` or `hop_db`. Out: what a compiled program returns, eager's results,
and those in float64. What neither tsfuser nor "aot_eager" compiles is left out with `Rejected`. Example:

    for sample in module_samples(info, "cpu", training=True):
        compare(*train_module(info, sample, training=True))
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kit import opinfo
from kit.accuracy import compare as compare_tensors
from kit.support import ULPS

#: Their numbers are random, and not eager's.
RANDOM_IN_TRAINING = (
    "Dropout", "AlphaDropout", "FeatureAlphaDropout", "RReLU", "Transformer", "FractionalMaxPool",
    "RNN", "LSTM", "GRU",
)  # fmt: skip
#: Operations that follow each other in the longest of them, about.
STEPS = 30


class Rejected(Exception):
    """No backend that takes AOTAutograd's graphs compiles it."""


def module_db():
    opinfo.op_db()  # has what the import needs
    from torch.testing._internal.common_modules import module_db as infos

    return infos


def optim_db():
    opinfo.op_db()
    from torch.testing._internal.common_optimizers import optim_db as infos

    return infos


def hop_db():
    opinfo.op_db()
    from torch.testing._internal.hop_db import hop_db as infos

    return infos


def compiled(function, *args, backend="tsfuser"):
    """`function(*args)` compiled; raises `Rejected` if "aot_eager" raises the same."""
    try:
        return torch.compile(function, backend=backend)(*args)
    except Exception as error:
        torch._dynamo.reset()
        try:
            torch.compile(function, backend="aot_eager")(*args)
        except Exception as other:
            if type(other) is type(error):
                raise Rejected(str(other)) from error
        raise


def module_samples(info, device, training):
    """Inputs for the module's constructor and its forward."""
    opinfo._seed(0)
    return info.module_inputs_func(
        info, device=device, dtype=torch.float32, requires_grad=True, training=training
    )


def train_module(info, sample, device, training):
    """Results and gradients of parameters and inputs: compiled, eager, in float64."""
    torch.manual_seed(0)
    given = sample.constructor_input
    module = info.module_cls(*given.args, **given.kwargs).to(device, torch.float32)
    module.train(training)
    runs = []
    for dtype, run in ((torch.float32, compiled), (torch.float32, _plain), (torch.float64, _plain)):
        own = copy.deepcopy(module).to(dtype)
        args, kwargs = (_cast(x, dtype) for x in (sample.forward_input.args, sample.forward_input.kwargs))
        runs.append(_with_gradients(own, args, kwargs, run))
    return runs


def _with_gradients(module, args, kwargs, run):
    def call(*values):
        return module(*values, **kwargs)

    torch.manual_seed(0)
    results = tensors(run(call, *args))
    leaves = [p for p in [*module.parameters(), *tensors(args), *tensors(kwargs)] if p.requires_grad]
    losses = [_weighted(x) for x in results if x.requires_grad]
    if not losses or not leaves:
        return results
    found = torch.autograd.grad(sum(losses), leaves, allow_unused=True)
    return [*results, *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found))]


def _weighted(x):
    weights = torch.arange(x.numel(), dtype=torch.float64, device=x.device) * 7 % 13 - 6
    return (x * (weights / 4).reshape(x.shape).to(x.dtype)).sum()


def optimizer_steps(info, given, device, flags, run, dtype=torch.float32):
    """Parameters after three steps with gradients of their own; `run` compiles a step, or does not."""
    source = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64).to(device, dtype)

    parameters = [torch.nn.Parameter(random(*shape)) for shape in ((3, 4), (5,), (2, 1, 3), (4, 4))]
    if info.optim_cls.__name__ == "Muon":
        parameters = [p for p in parameters if p.dim() == 2]
    kwargs = {key: _cast(value, dtype) for key, value in given.kwargs.items()}
    optimizer = info.optim_cls(parameters, **kwargs, **flags)
    for _ in range(3):
        for p in parameters:
            p.grad = random(*p.shape)
        run(optimizer.step)
    return [p.detach() for p in parameters]


def _plain(function, *args):
    return function(*args)


def compare(mine, eager, exact):
    assert len(mine) == len(eager)
    for k, (a, b, c) in enumerate(zip(mine, eager, exact)):
        if not b.is_floating_point():
            assert torch.equal(a, b), f"result {k}"
            continue
        # a sum that cancels leaves as much as its terms have lost, which are about 1
        compare_tensors(_beside_one(a), _beside_one(b), _beside_one(c), ULPS * STEPS, f"result {k}")


def _beside_one(x):
    return torch.cat([x.detach().flatten(), x.new_ones(1)])


def tensors(out) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    return [x for part in out for x in tensors(part)] if isinstance(out, (list, tuple)) else []


def _cast(x, dtype):
    """A copy of `x` with its nested values, with floating-point tensors in `dtype`."""
    if isinstance(x, Tensor):
        own = x.detach().clone()
        own = own.to(dtype) if own.is_floating_point() else own
        return own.requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {key: _cast(value, dtype) for key, value in x.items()}
    return type(x)(_cast(value, dtype) for value in x) if type(x) in (list, tuple) else x
