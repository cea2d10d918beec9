"""`flex_attention` in a graph: inductor compiles that node, and what is around it stays in groups."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import tsfuser
from tsfuser.frontends.dynamo import by_inductor

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error"), pytest.mark.graphs]

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def operands(device, length=128, heads=2, width=32, **more):
    return [torch.randn(1, heads, length, width, device=device, **more) for _ in range(3)]


def nearer(score, batch, head, query, key):
    return score - (query - key).abs() * 0.05


def function(q, k, v):
    return flex_attention(q * 0.5 + 0.1, k.sin() + 1, v.cos() * 2, score_mod=nearer).cos() * 2


def reasons():
    return list(tsfuser.stats()["left_to_python"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("on", ON)
def test_inductor_compiles_it_between_groups(on):
    given = operands(on)
    run = torch.compile(function, backend="tsfuser", fullgraph=True)
    with torch.no_grad():
        assert_close(run(*given), function(*given), rtol=1e-3, atol=1e-3)
        launches = tsfuser.stats()["launches"]
        # the strides that inductor's code takes for granted are those of the first call's groups
        given[1] = given[1].transpose(1, 2).contiguous().transpose(1, 2)
        assert_close(run(*given), function(*given), rtol=1e-3, atol=1e-3)
    assert launches >= 2 and set(reasons()) == {by_inductor.REASON}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("on", ON)
def test_sizes_that_vary_masks_and_tensors_of_the_program(on):
    slopes = torch.rand(2, device=on)

    def sloped(score, batch, head, query, key):
        return score + slopes[head] * (key - query)

    def causal(batch, head, query, key):
        return query >= key

    def masked(q, k, v, mask):
        return flex_attention(q * 0.5, k + 1, v * 2, score_mod=sloped, block_mask=mask).sin() + 1

    run = torch.compile(masked, backend="tsfuser", dynamic=True)
    with torch.no_grad():
        for length in (128, 256, 384):
            given = operands(on, length)
            mask = create_block_mask(causal, None, None, length, length, device=on)
            assert_close(run(*given, mask), masked(*given, mask), rtol=1e-3, atol=1e-3)
    assert by_inductor.REASON in reasons()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no such backward on the CPU")
def test_it_trains():
    def step(called, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        out = called(*leaves)
        out.float().square().sum().backward()
        return [x.float() for x in (out.detach(), *(leaf.grad for leaf in leaves))]

    given = operands("cuda", dtype=torch.bfloat16, width=64)
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    ours, eager, exact = (
        step(compiled, torch.bfloat16),
        step(function, torch.bfloat16),
        step(function, torch.float32),
    )
    for got, rounded, true in zip(ours, eager, exact):
        assert (got - true).abs().max() <= 1.5 * (rounded - true).abs().max()
    assert by_inductor.REASON in reasons()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_strides_that_inductor_reports_are_not_taken_for_those_of_the_graph(monkeypatch):
    """AOTAutograd has a list for the strides of what the forward saves."""
    compiled, reported = by_inductor.compiled, []

    def watched(piece):
        context = torch._guards.TracingContext.get()
        context.output_strides = []
        found = compiled(piece)
        reported.append((found is not None, context.output_strides))
        context.output_strides = None
        return found

    monkeypatch.setattr(by_inductor, "compiled", watched)
    with torch.no_grad():
        torch.compile(function, backend="tsfuser", fullgraph=True)(*operands("cpu", 64))
    assert reported == [(True, [])]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_runs_it_where_inductor_does_not_compile_it(monkeypatch):
    import torch._inductor.compile_fx as compile_fx

    def fails(*arguments, **named):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails)
    given = operands("cpu", 16)
    with torch.no_grad():
        run = torch.compile(function, backend="tsfuser", fullgraph=True)
        assert_close(run(*given), function(*given))
    assert by_inductor.REASON not in reasons() and len(reasons()) == 1
