"""Programs that see many ranks, dtypes and layouts: the chain of guards and fallbacks that a call passes
stays short."""

import pytest
import torch

import tsfuser
from kit.support import CALLS, assert_matches, counted, fresh, fuse, no_fallback, script, train
from tsfuser.frontends.torchscript import passes
from tsfuser.frontends.torchscript.guard import PATTERNS
from tsfuser.graph.wrapper import GUARD

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]

LAYOUTS = (lambda x: x, lambda x: x.transpose(0, -1), lambda x: x[..., ::2], lambda x: x[:1])
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def patterns(device, dtypes=DTYPES):
    """Tensors between any two of which a guard tells: of `dtypes`, of 2 to 4 dims, in four layouts. It lets
    the first two pass together (`apart`: without the second)."""
    generator = torch.Generator().manual_seed(3)
    for dtype in dtypes:
        for rank in (2, 3, 4):
            for lay in LAYOUTS:
                x = torch.randn([3, 4, 5, 6][:rank], generator=generator) * 4
                yield lay((x > 0 if dtype == torch.bool else x.to(dtype)).to(device))


def apart(device):
    return [x for i, x in enumerate(patterns(device)) if i % len(LAYOUTS) != 1]


def guards(graph):
    return len(graph.findAllNodes(GUARD, True))


def program(x):
    return (x * 1.0 + 2).relu() * x


def wide(x):
    return x.double() if x.is_floating_point() else x


def calls_of(scripted, inputs, calls=CALLS):
    """The graphs with guards that are made while `scripted` is called `calls` times on each of the inputs."""
    with tsfuser.fuser(), passes.watching() as seen:
        for x in inputs:
            for _ in range(calls):
                scripted(x)
    return [guards(outcome.graph) for outcome in seen if guards(outcome.graph)]


def test_a_chain_ends(device):
    """60 patterns: the first has a graph of its own, some more have fallbacks, and no others."""
    inputs = list(patterns(device))
    scripted = fresh(program)
    assert len(inputs) == 60
    assert calls_of(scripted, apart(device)) == [1] * (1 + PATTERNS)
    assert calls_of(scripted, inputs) == []
    for x in inputs:
        assert_matches(scripted(x), program(x), program(wide(x)), ops=4)


def test_no_pattern_is_planned_again(device):
    inputs = list(patterns(device))
    scripted = fresh(program)
    for _ in range(2):  # those that came before the guard opened are planned in the first group then
        calls_of(scripted, inputs)
    with counted() as rise:
        for x in inputs:
            scripted(x)
    assert rise["exact_hits"] == rise["launches"] == len(inputs)
    assert rise["plans_built"] == rise["kernels_compiled"] == 0 and rise["fallbacks"] == {}


def test_few_patterns_keep_their_fallbacks(device):
    inputs = apart(device)[: 1 + PATTERNS]
    scripted = fresh(program)
    assert calls_of(scripted, inputs * 2) == [1] * (1 + PATTERNS)
    with counted() as rise:
        assert_matches(scripted(inputs[-1]), program(inputs[-1]), program(wide(inputs[-1])), ops=4)
    assert rise["launches"] == 1


def test_dims_in_another_order_have_no_fallback(device):
    """The layout of the result is eager's."""
    inputs, scripted = [torch.randn(3, 4, 5, device=device).permute(0, 1, 2)], fresh(program)
    inputs += [torch.randn(5, 3, 4, device=device).permute(1, 2, 0), torch.randn(5, 4, 3, device=device).mT]
    inputs += [torch.randn(4, 3, 5, device=device).transpose(0, 1)]
    assert calls_of(scripted, inputs) == [1]
    with no_fallback():
        for x in inputs:
            got, want = scripted(x), program(x)
            assert_matches(got, want, program(wide(x)), ops=4)
            assert got.stride() == want.stride()


def test_many_sizes_of_one_pattern_open_nothing(device):
    """They fail the guard all the same: its group has never met them."""
    inputs = [torch.randn(2 + n, 3, 4, device=device) for n in range(3 * PATTERNS)]
    scripted = fresh(program)
    assert calls_of(scripted, [torch.randn(3, 4, device=device), *inputs]) == [1, 1]


def test_gradients_of_many_patterns(device, few):
    def trained(x, y):
        return (x * 1.5 + y).sigmoid() * x

    scripted = fresh(trained)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(2):
            made = len(seen)
            for x in list(patterns(device, (torch.float32, torch.float64, torch.float16)))[
                :: 5 if few else 2
            ]:
                x = x.detach().requires_grad_()
                y = torch.randn(x.shape[-1], device=device).to(x.dtype).requires_grad_()
                out, gradients = train(scripted, (x, y))
                want, expected = train(trained, (x, y), calls=1)
                exact, precise = train(
                    trained, [v.detach().double().requires_grad_() for v in (x, y)], calls=1
                )
                assert_matches(out, want, exact, ops=8)
                for got, eager, reference in zip(gradients, expected, precise):
                    assert_matches(got, eager, reference, ops=8 * x.numel(), strides=False)
    levels = [o for o in seen if guards(o.graph)]
    # forward and backward, each level profiled in both
    assert len(levels) <= 4 * (1 + PATTERNS) and len(seen) == made


def test_an_open_guard_refuses_what_needs_gradients(device):
    scripted = fresh(program)
    inputs = list(patterns(device, DTYPES[:2]))
    calls_of(scripted, inputs)
    for x in inputs:
        x = x.detach().requires_grad_()
        with tsfuser.fuser(), counted() as rise:  # else NNC's, on CUDA, whose strides are others
            out, (gradient,) = train(scripted, (x,))
        want, (expected,) = train(program, (x,), calls=1)
        assert_matches(out, want, ops=4)
        assert_matches(gradient, expected, ops=6)
        assert rise["fallbacks"] == {}  # no group has been asked


@pytest.mark.parametrize(
    "make", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x, x]), lambda x: x.to("meta")]
)
def test_an_open_guard_refuses_what_kernels_cannot_read(device, make):
    def doubled(x):
        return (x * 2.0).abs() * 1.5

    scripted = fresh(doubled)
    calls_of(scripted, patterns(device))
    x = make(torch.randn(3, 4, device=device))
    with counted() as rise:
        for _ in range(CALLS):
            got, want = scripted(x), doubled(x)
            assert got.layout == want.layout and got.is_nested == want.is_nested and got.device == want.device
            if not x.is_meta:
                assert all(torch.equal(a, b) for a, b in zip(parts(got), parts(want)))
    assert rise["launches"] == 0 and sum(rise["fallbacks"].values()) == CALLS, rise["fallbacks"]


def parts(x):
    return [x.to_dense()] if x.is_sparse else x.unbind()


def test_what_the_open_group_cannot_do_goes_back_to_the_fallback(device):
    """Of a half, `to` gives the view itself, which must not leave a group: no plan, where a fallback has a
    group of the rest."""

    def program(x, y):
        return (x * 2).t().to(torch.float16), (x + y).relu()

    scripted = fuse(program, *torch.randn(2, 3, 4, device=device))
    inputs = [x for x in patterns(device, (torch.float32, torch.float64, torch.float16)) if x.dim() == 2]
    with tsfuser.fuser(), no_fallback():
        for x in inputs * 2:
            for _ in range(CALLS):
                for got, want in zip(scripted(x, x), program(x, x)):
                    assert_matches(got, want, ops=2)
    with counted() as rise:
        scripted(inputs[-4], inputs[-4])
    assert inputs[-4].dtype == torch.float16 and rise["launches"] == 1 and rise["fallbacks"] == {}


PROGRAMS = (
    "torch.softmax(x * 2.0, -1) + x.sum(-1, keepdim=True)",
    "(x - x.mean(0, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1.0)",
    "torch.layer_norm(x + 1.0, [x.size(-1)]).relu()",
    "torch.where(x > 0, x, x * 0.5).type_as(x) * x.sum()",
    "(x.unsqueeze(0) * 1.0 + x).transpose(0, 1).to(torch.float32)",
    "(x + 1).clamp(-1, 2).amax(-1) * 2 - 0",
    "(x.to(torch.float64) * 3.0).floor() / (x.abs() + 1)",
    "((x > 0) & (x < 2)).to(x.dtype) * x + torch.zeros_like(x)",
)


@pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning")
@pytest.mark.parametrize("text", PROGRAMS)
def test_an_open_group_gives_what_eager_gives(device, text, few):
    """Where eager raises, for integers as an example, the fused program does."""
    source = f"def f(x):\n    return {text}\n"
    inputs = list(patterns(device, (torch.float32, torch.int64, torch.bool)))[:: 5 if few else 2]
    assert len(inputs) > 1 + PATTERNS
    scripted, plain = script(source), {"torch": torch}
    exec(source, plain)
    with tsfuser.fuser():
        for x in inputs * CALLS:
            try:
                want = plain["f"](x)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    scripted(x)
                continue
            got = scripted(x)
            exact = plain["f"](wide(x)) if x.is_floating_point() else want
            assert_matches(got, want, exact, ops=8 * x.shape[-1])
