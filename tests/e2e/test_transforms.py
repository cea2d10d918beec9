"""Forward-mode AD and functorch's transforms, of what was profiled and trained without them: tangents,
gradients and batches are eager's, and such calls make no new graphs, however many come."""

import contextlib
import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import tsfuser
from kit.support import assert_matches, fresh, train
from tsfuser import _C
from tsfuser.frontends.torchscript.passes import watching

pytestmark = [pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning"), pytest.mark.graphs]


# ---- programs of two tensors of one shape


def pointwise(x, y):
    return torch.tanh(x * y + 1.0).sigmoid() * x


def norm(x, y):
    z = torch.nn.functional.layer_norm(x * y, [4], None, None, 1e-5)
    return torch.softmax(z, 1) * (z - z.mean(1, keepdim=True)) + y.sum()


def product(x, y):
    z = torch.mm(x, y.t().relu()) * 0.5
    return torch.mm(z.view(9).view(3, 3).sigmoid(), x) + y


def in_place(x, y):
    z = x * y
    z.add_(y)
    z *= 2.0
    return torch.mm(z, x.t()).tanh_() + 1.0


PROGRAMS = (pointwise, norm, product, in_place)


# ---- ways to call them


def in_a_level(way):
    """Within a level of forward-mode AD, of which torch has but one: a jvp would be a second."""

    @functools.wraps(way)
    def inside(*given):
        with forward_ad.dual_level():
            return way(*given)

    return inside


@in_a_level
def dual(f, x, y, t):
    return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), y))


@in_a_level
def dual_of_the_second(f, x, y, t):
    return forward_ad.unpack_dual(f(x, forward_ad.make_dual(y, t)))


@in_a_level
def view_of_a_dual(f, x, y, t):
    whole = forward_ad.make_dual(x.t().contiguous(), t.t().contiguous())
    return forward_ad.unpack_dual(f(whole.t(), y))


@in_a_level
def dual_without_gradients(f, x, y, t):
    with torch.no_grad():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), y))


@in_a_level
def dual_and_gradient(f, x, y, t):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), y))
    return out.tangent, *torch.autograd.grad(out.primal.sum(), (x, y))


@in_a_level
def tangent_of_a_gradient(f, x, y, t):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(forward_ad.make_dual(x, t), y).tanh().sum(), x, create_graph=True)
    return forward_ad.unpack_dual(gradient).tangent


@in_a_level
def gradient_of_a_dual(f, x, y, t):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = f(x, y)
    dual = forward_ad.make_dual(torch.ones_like(out), torch.full_like(out, 0.5))
    gradients = torch.autograd.grad(out, (x, y), dual)
    return tuple(part for g in gradients for part in forward_ad.unpack_dual(g))


def jvp(f, x, y, t):
    return torch.func.jvp(f, (x, y), (t, t))


def jvp_around(f, x, y, t):
    return torch.func.jvp(lambda a: f(x, y).sum() * a, (x,), (t,))


def jvp_with_a_gradient(f, x, y, t):
    x = x.clone().requires_grad_()
    out, tangent = torch.func.jvp(lambda a: f(a, y), (x,), (t,))
    return tangent, torch.autograd.grad((out + tangent).sum(), x)[0]


def vmap(f, x, y, t):
    return torch.func.vmap(f)(torch.stack([x, t]), torch.stack([y, x]))


def vmap_of_the_first(f, x, y, t):
    return torch.func.vmap(f, in_dims=(0, None))(torch.stack([x, t]), y)


def gradient(f, x, y, t):
    return torch.func.grad(lambda a, b: f(a, b).sum(), (0, 1))(x, y)


def gradients_of_a_batch(f, x, y, t):
    return torch.func.vmap(torch.func.grad(lambda a, b: f(a, b).sum()))(
        torch.stack([x, t]), torch.stack([y, x])
    )


def vjp(f, x, y, t):
    out, back = torch.func.vjp(f, x, y)
    return out, *back(torch.ones_like(out))


def jacobian(f, x, y, t):
    return torch.func.jacfwd(lambda a: f(a, y))(x), torch.func.jacrev(lambda a: f(a, y))(x)


def hessian(f, x, y, t):
    return torch.func.hessian(lambda a: f(a, y).sum())(x)


WAYS = (
    dual,
    dual_of_the_second,
    view_of_a_dual,
    dual_without_gradients,
    dual_and_gradient,
    tangent_of_a_gradient,
    gradient_of_a_dual,
    jvp,
    jvp_around,
    jvp_with_a_gradient,
    vmap,
    vmap_of_the_first,
    gradient,
    gradients_of_a_batch,
    vjp,
    jacobian,
    hessian,
)


@contextlib.contextmanager
def no_new_graphs(wanted):
    """Whether torch optimises none: a chain of fallbacks would make it do so with each call."""
    with watching() as seen:
        yield
    assert not (wanted and seen), "each call makes more graphs"


def compare(scripted, program, way, *tensors):
    """Six calls. Training has its graphs after four."""
    expected = way(program, *tensors)
    for k in range(6):
        with no_new_graphs(k >= 4):
            got = way(scripted, *tensors)
        for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected))):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert_matches(mine, theirs, ops=200, strides=False)


def tensors(device, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator).to(device) for _ in range(count)]


@contextlib.contextmanager
def guards(on):
    before = _C.guard_mode()
    _C.set_guard_mode(on)
    try:
        yield
    finally:
        _C.set_guard_mode(before)


@pytest.mark.parametrize("guarded", (True, False), ids=("guarded", "unguarded"))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_what_was_profiled_without_gradients(device, program, guarded):
    x, y, t = tensors(device)
    scripted = fresh(program)
    with tsfuser.fuser(), guards(guarded):
        for _ in range(3):
            scripted(x, y)
        for way in WAYS:
            compare(scripted, program, way, x, y, t)
        assert_matches(scripted(x, y), program(x, y), ops=50)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_what_was_trained(device, program):
    x, y, t = tensors(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        train(scripted, [x.clone().requires_grad_(), y.clone().requires_grad_()])
        for way in WAYS:
            compare(scripted, program, way, x, y, t)


@pytest.mark.each_value
@pytest.mark.parametrize("program", (pointwise, in_place), ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_what_was_profiled_so(device, way, program):
    x, y, t = tensors(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(3):
            way(scripted, x, y, t)
        for _ in range(2):
            assert_matches(scripted(x, y), program(x, y), ops=20)
        compare(scripted, program, way, x, y, t)


def test_an_open_guard_sees_tangents(device):
    x, y, t = tensors(device)
    scripted = fresh(pointwise)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(x, y)
        for shape in ((4,), (2, 2, 2), (1, 4), (3, 1), (1,), (2, 2, 2, 2), (1, 1), (2, 1, 2)):
            scripted(torch.ones(shape, device=device), torch.ones(shape, device=device))
        for shape in ((3, 4), (2, 2, 3), (3, 2, 1, 2)):
            compare(scripted, pointwise, dual, *(v.reshape(shape) for v in (x, y, t)))


@pytest.mark.parametrize("trained", (False, True))
@pytest.mark.parametrize(
    "make",
    (torch.conj, lambda z: z.conj().imag, torch.Tensor.to_sparse, lambda z: z),
    ids=("conj", "neg", "sparse", "complex"),
)
def test_tensors_that_no_kernel_reads_make_no_graphs_call_after_call(make, trained):
    def program(x, y):
        return torch.tanh(x * y) * x

    x, y, _ = tensors("cpu")
    odd = make(torch.complex(x, y)).detach().requires_grad_(trained)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(3):
            out = scripted(x.clone().requires_grad_(trained), y)
            out.sum().backward() if trained else None
        for k in range(6):
            with no_new_graphs(k >= 4):
                got = scripted(odd, odd)
            expected = program(odd, odd)
            assert got.layout == expected.layout and got.requires_grad == expected.requires_grad
            assert torch.allclose(got.to_dense(), expected.to_dense())


# ---- graphs of torch.compile


def products_only(x, y):
    return torch.mm(x, y.t())


def views(x, y):
    return x.t() * 2.0, (x * y).view(-1), y


def written_part(x, y):
    x = x * 1.0
    x[1:].mul_(torch.tanh(y[1:]))
    return x


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("program", [*PROGRAMS, products_only, views, written_part])
def test_tangents_of_compiled_functions(device, program, warm):
    """With groups and without any; what is called first with a tangent, and what was called before."""
    x, y, t = (torch.randn(3, 4, device=device, dtype=torch.float64) for _ in range(3))
    compiled = torch.compile(program, backend="tsfuser")
    if warm:
        compiled(x, y)

    @in_a_level
    def tangents(f):
        results = f(forward_ad.make_dual(x, t), y)
        results = results if isinstance(results, tuple) else (results,)
        return [part for r in results for part in forward_ad.unpack_dual(r)]

    for mine, theirs in zip(tangents(compiled), tangents(program), strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(compiled(x, y), program(x, y))


def test_forward_mode_jacobians_of_compiled_functions(device):
    compiled = torch.compile(norm, backend="tsfuser")
    x, y = (torch.randn(3, 4, device=device, dtype=torch.float64) for _ in range(2))
    compiled(x, y)
    jacobian = functools.partial(torch.autograd.functional.jacobian, vectorize=True, strategy="forward-mode")
    for mine, theirs in zip(jacobian(compiled, (x, y)), jacobian(norm, (x, y))):
        torch.testing.assert_close(mine, theirs)
