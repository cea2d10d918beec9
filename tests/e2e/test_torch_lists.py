"""torch's lists of modules, optimizers and higher-order ops through torch.compile, compared with eager.

All of them run with --long, a few in each run.
"""

import pytest
import torch

from kit import torch_lists as lists
from kit.support import no_fallback

pytestmark = [pytest.mark.usefixtures("forgotten"), pytest.mark.graphs]
MODULES = {info.name: info for info in lists.module_db()}
OPTIMIZERS = {info.optim_cls.__name__: info for info in lists.optim_db()}
HOPS = {f"{info.name}.{info.variant_test_name}": info for info in lists.hop_db()}
#: Need a closure, or sparse gradients: TorchDynamo breaks the graph there.
NOT_COMPILED = ("LBFGS", "SparseAdam")


def cases(names, quick):
    """Parameters: those that are not in `quick` run with --long."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", cases(MODULES, ("nn.GroupNorm",)))
def test_modules(name, training, place):
    info = MODULES[name]
    if info.is_lazy or training and any(word in name for word in lists.RANDOM_IN_TRAINING):
        pytest.skip("has no parameters yet" if info.is_lazy else "draws other random numbers than eager")
    done = 0
    for sample in lists.module_samples(info, place, training):
        torch._dynamo.reset()
        try:
            lists.compare(*lists.train_module(info, sample, place, training))
            done += 1
        except lists.Rejected:
            continue
    if not done:
        pytest.skip("aot_eager raises the same")


@pytest.mark.parametrize("impl", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", cases(sorted(set(OPTIMIZERS) - set(NOT_COMPILED)), ("AdamW",)))
def test_optimizers(name, impl, place):
    info = OPTIMIZERS[name]
    if impl != "for-loop" and impl not in info.supported_impls:
        pytest.skip("it has no such form")
    flags = {"foreach": impl == "foreach"} if "foreach" in info.supported_impls else {}
    if impl == "fused":
        flags = {"fused": True}
    for given in info.optim_inputs_func(device=place):
        if set(flags) & set(given.kwargs) or given.kwargs.get("differentiable"):
            continue
        torch._dynamo.reset()
        try:
            plain = lists.optimizer_steps(info, given, place, flags, lambda step: step())
        except (RuntimeError, ValueError):
            continue  # configurations that eager rejects, as a capturable one on CPU tensors
        exact = lists.optimizer_steps(info, given, place, flags, lambda step: step(), torch.float64)
        try:
            with no_fallback():
                mine = lists.optimizer_steps(info, given, place, flags, lists.compiled)
        except lists.Rejected:
            continue
        lists.compare(mine, plain, exact)


@pytest.mark.parametrize("name", cases(HOPS, ("cond.simple", "scan.simple")))
def test_higher_order_ops(name, place):
    info = HOPS[name]
    if torch.float32 not in info.supported_dtypes(place):
        pytest.skip("not for this device")
    for sample in info.sample_inputs(place, torch.float32, requires_grad=info.supports_autograd):
        torch._dynamo.reset()
        args = (sample.input, *sample.args)

        def call(*values, sample=sample):
            return info.op(*values, **sample.kwargs)

        plain = lists.tensors(call(*lists._cast(args, torch.float32)))
        exact = lists.tensors(call(*lists._cast(args, torch.float64)))
        try:
            mine = lists.tensors(lists.compiled(call, *lists._cast(args, torch.float32)))
        except lists.Rejected:
            pytest.skip("aot_eager raises the same")
        lists.compare(mine, plain, exact)
