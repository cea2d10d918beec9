"""Compiled optimizers: a step of any of torch's is one graph, whose groups share kernels."""

import inspect

import pytest
import torch
from torch import nn

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch

pytestmark = pytest.mark.usefixtures("forgotten", "fused_or_error")

#: TorchDynamo parts `p.add_(q, alpha=r)` into ops.
APART = torch.__version__.startswith("2.11.")
SHAPES = [(5, 7), (33,), (2, 3, 4), (64, 3), (7,)]
#: torch compiles no step of these: a line search that calls the program, and sparse gradients. Adafactor
#: reads numbers from tensors, where TorchDynamo ends a graph, and leaves the loop around it to Python.
NOT_COMPILED = ("LBFGS", "SparseAdam", "Adafactor")
#: How many kernels a step has at most, if not one: the rates for the next step are computed for themselves,
#: and Muon's products of matrices stand between groups.
KERNELS = {"ASGD": 3, "NAdam": 2, "Muon": 100}
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
#: Besides the defaults: more states, and other terms.
MORE = {
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.7, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.6},
    "RAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}


def cases():
    for name in dir(torch.optim):
        kind = getattr(torch.optim, name)
        is_one = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_one or kind is torch.optim.Optimizer or name in NOT_COMPILED:
            continue
        taken = inspect.signature(kind.__init__).parameters
        for form, choice in FORMS.items():
            if set(choice) <= set(taken):
                yield name, form, {}
                if name in MORE:
                    yield name, form, MORE[name]
        if "foreach" not in taken:
            yield name, "", {}


def parameters(name, device, count=len(SHAPES)):
    shapes = [(n, 6) for n in range(3, 8)] if name == "Muon" else SHAPES
    shapes = shapes[:count]
    return [nn.Parameter(torch.randn(s, device=device)) for s in shapes]


def steps_of(name, choices, ours):
    """Optimizers of the parameters, and of copies in the same dtype and in float64."""
    all_of = [
        ours,
        *([nn.Parameter(p.detach().to(d, copy=True)) for p in ours] for d in (None, torch.double)),
    ]
    return all_of, [getattr(torch.optim, name)(some, **choices).step for some in all_of]


def run(all_of, steps, count):
    """The launches of each of our steps."""
    launches = []
    for _ in range(count):
        for p, *others in zip(*all_of):
            p.grad = torch.randn_like(p)
            for q in others:
                q.grad = p.grad.to(q.dtype, copy=True)
        before = tsfuser.stats()["launches"]
        steps[0]()
        launches.append(tsfuser.stats()["launches"] - before)
        for step in steps[1:]:
            step()
    return launches


@pytest.mark.parametrize("name, form, more", list(cases()))
@pytest.mark.graphs
def test_a_step_of_each_optimizer_is_one_graph_of_few_kernels(name, form, more, place, target):
    """TorchDynamo leaves the fused forms to torch's own kernels."""
    if (name, form, target) == ("Adagrad", "fused", "cuda"):
        pytest.skip("torch has this form for CPU tensors only")
    ours = parameters(name, place, 5 if target == "cuda" else 3)  # CPU kernels are launched one by one
    all_of, steps = steps_of(name, {**FORMS.get(form, {}), **more}, ours)
    with watch.watching() as (_, outcomes):
        steps[0] = torch.compile(steps[0], backend="tsfuser")
        launches = run(all_of, steps, 3)
    bits = torch.bfloat16 if name == "Muon" else None  # in which it multiplies
    for p, q, r in zip(*all_of):
        assert_matches(p.detach(), q.detach(), r.detach(), 100, precision=bits)
    found = tsfuser.stats()
    assert found["fallbacks"] == found["left_to_python"] == found["graphs_unfused"] == {}
    assert bool(outcomes) == (form != "fused")
    is_one_op = name == "SGD" and not more and target != "cuda" and not APART  # which torch does as fast
    most = (
        0 if form == "fused" or is_one_op else KERNELS.get(name, 1) * (1 if target == "cuda" else len(ours))
    )
    assert (0 < launches[-1] <= most) if most else launches[-1] == 0, f"{launches} launches, at most {most}"


@pytest.mark.parametrize("name", ["Adam", "SGD", "ASGD", "RMSprop"])
def test_ops_between_groups_do_not_part_a_batch(name, place, target):
    """The counts of steps, in a loop over parameters; and one op per parameter is a batch, too."""
    ours = parameters(name, place)
    more = MORE[name] if name == "RMSprop" else {}
    all_of, steps = steps_of(name, {**FORMS["for-loop"], **more}, ours)
    steps[0] = torch.compile(steps[0], backend="tsfuser")
    launches = run(all_of, steps, 3)
    for p, q, r in zip(*all_of):
        assert_matches(p.detach(), q.detach(), r.detach(), 100)
    if target != "cpu":
        assert 0 < launches[-1] <= KERNELS.get(name, 1)


FACTORS = {"number": -0.3, "tensor": torch.tensor(-0.3), "tensor of ones": torch.ones(40, 30)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_that_are_added_in_place_have_the_bits_of_eager_mode(dtype, place):
    """TorchDynamo writes `prims.fma` for them, that of torch 2.11 products and sums. A GPU rounds the product
    of 16-bit factors in between, and so do eager's kernels for processors without such an instruction."""

    def function(x, y, z):
        a, b = x.clone(), x.clone()
        a.addcmul_(y, z, value=-0.3)
        b.addcdiv_(y, z, value=-0.3)
        return a, b

    args = [torch.randn(40, 30, device=place, dtype=dtype) for _ in range(3)]
    ours, plain = torch.compile(function, backend="tsfuser")(*args), function(*args)
    for a, b in zip(ours, plain):
        if place == "cuda" or APART or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            assert_matches(a, b, ops=2)
        else:
            assert torch.equal(a, b)
    assert tsfuser.stats()["left_to_python"] == {}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtypes", ["float32", "int32", "complex64", "float32 float64", "bfloat16 float32"])
def test_a_fused_multiply_add_of_any_operands(dtypes, factor):
    """As torch 2.13 has it: also with a factor that is no number, with integers, and with several dtypes."""
    prims = pytest.importorskip("torch._inductor.inductor_prims")
    kinds = [getattr(torch, name) for name in dtypes.split()]
    x, z = (torch.randn(40, 30).mul(4).to(kinds[k % len(kinds)]) for k in (0, 1))
    if factor == "tensor of ones":
        x = x[:1]

    def function(x, z):
        return prims.fma(x, FACTORS[factor], z) + 1

    wide = torch.complex128 if x.is_complex() else torch.double
    exact = x.to(wide) * FACTORS[factor] + z.to(wide) + 1  # it rounds no product to the dtype of the factors
    assert_matches(
        torch.compile(function, backend="tsfuser")(x, z), x * FACTORS[factor] + z + 1, exact, ops=4
    )
    assert tsfuser.stats()["left_to_python"] == {}
