"""What thunder takes apart into casts around an op of float32 is a 16-bit op again; other casts round."""

import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from kit import thunders
from kit.thunders import strict  # noqa: F401  a fixture of all tests here

if importlib.util.find_spec("thunder") is None:
    pytest.skip("lightning-thunder is not installed", allow_module_level=True)

pytestmark = pytest.mark.graphs
thunder = narrowed = None  # what `loaded` imports, so that collecting tests imports no thunder
aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def loaded():
    global thunder, narrowed
    try:
        thunder = thunders.load()
    except ImportError as error:
        pytest.skip(str(error))
    graph_of = importlib.import_module("tsfuser.frontends.thunder.retrace").graph_of
    narrow = importlib.import_module("tsfuser.frontends.thunder.narrow").narrow

    def narrowed(function, *operands):
        module = graph_of(function, operands)
        narrow(module)
        module.graph.lint()
        assert torch.equal(module(*operands), function(*operands))
        return [node.target for node in module.graph.nodes if node.op == "call_function"], module


up, down = torch.Tensor.float, torch.Tensor.bfloat16


def two_products(x, y):
    return down(up(down(up(x) * up(y))) * 0.3)


def chosen(x, y):
    return down(torch.where(up(x) > 0, up(x), up(y)))


def there_and_back(x, y):
    return down(up(x)) + y


def two_readers(x, y):
    """What rounding loses."""
    product = up(x) * up(y)
    return product - up(down(product))


def another_operand(x, y):
    wide = up(x) * 1.7
    return down(wide * wide.exp())


def other_16_bits(x, y):
    return (up(x) * up(y)).half()


def mixed(x, y):
    return down(up(x) * up(y.half()))


def integers(x, y):
    return down(up(x) * (y * 200).to(torch.int32))


@pytest.mark.parametrize(
    "function, targets",
    [
        (two_products, [aten.mul.Tensor, aten.mul.Tensor]),
        (chosen, [aten._to_copy.default, aten.gt.Scalar, aten.where.self]),
        (there_and_back, [aten.add.Tensor]),
    ],
)
def test_16_bit_ops_are_put_together_again(function, targets):
    x, y = torch.randn(2, 4, 8).bfloat16()
    assert narrowed(function, x, y)[0] == targets


def steps(x, y):
    return down(torch.nextafter(up(x), up(y)))


@pytest.mark.parametrize("function", [two_readers, another_operand, other_16_bits, mixed, integers, steps])
def test_other_casts_stay(function):
    x, y = torch.randn(2, 4, 8).bfloat16()
    targets, module = narrowed(function, x, y)
    before = [n.target for n in graph(function, x, y).graph.nodes if n.op == "call_function"]
    assert targets == before and aten._to_copy.default in targets


def graph(function, *operands):
    return importlib.import_module("tsfuser.frontends.thunder.retrace").graph_of(function, operands)


def by_thunder(function):
    return thunder.jit(function, executors=["tsfuser", "sdpa"])


@pytest.mark.parametrize("gradients", [False, True])
def test_what_leaves_a_region_is_rounded_for_its_readers_in_it(device, gradients):
    def function(x, y):
        total = x * y
        return total, total * 0.3

    x, y = torch.randn(2, 64, 32, device=device).bfloat16().requires_grad_(gradients)
    total, other = by_thunder(function)(x, y)
    assert torch.equal(other, (total.float() * 0.3).bfloat16())


def of_a_row(x):
    """The norm of a row, whose length is the only size."""
    return F.layer_norm(x, x.shape[-1:])


ONES = {
    "read_by_a_product": lambda x, y: of_a_row(x * y) @ (x * y).mT,
    "an_exponential": lambda x, y: of_a_row(F.gelu(x).exp()) * y,
    "a_softmax": lambda x, y: of_a_row(torch.softmax(x * y, 0) * 32),
    "a_tangent": lambda x, y: of_a_row(torch.tanh(x)) * y,
}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONES)
def test_a_norm_over_one_element_has_no_gradient(name, dtype, device):
    """The element is its own mean: the backward must read, or compute again, the number that the forward's
    statistics are of. The rest of a rounding, times 1 / sqrt(1e-5) = 316, would be the gradient."""

    block = ONES[name]
    x, y = torch.randn(2, 64, 1, device=device).to(dtype)
    found = trained(by_thunder(block), x, y)[1:]
    exact = trained(block, x.double(), y.double())[1:]
    for mine, wanted in zip(found, exact):
        assert (mine.double() - wanted).abs().max() < 0.05


def test_gradients_that_are_zero_are_as_near_to_it_as_eagers(device):
    """The statistics of the forward are those of the values that the backward reads."""

    def block(x, y):
        total = x + y
        return F.layer_norm(total, (24,)) + total * 0.25

    x, y = torch.randn(2, 64, 24, device=device).half()
    found, eager = (trained(f, x, y) for f in (by_thunder(block), block))
    exact = trained(block, x.double(), y.double())
    for mine, theirs, wanted in zip(found, eager, exact):
        assert (mine.double() - wanted).norm() <= (theirs.double() - wanted).norm() * 1.1 + 1e-6


def trained(function, *inputs):
    """The result, and the gradients of its sum."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    result.sum().backward()
    return [result.detach(), *(x.grad for x in leaves)]


def test_a_16_bit_value_of_a_region_is_rounded_where_it_is_stored(device):
    def chain(x, y):
        return ((x * y + x) * 0.7 + y) * y

    x, y = torch.randn(2, 64, 32, device=device).bfloat16()
    found = trained(by_thunder(chain), x, y)
    exact = trained(chain, x.double(), y.double())
    best = (exact[0].bfloat16().double() - exact[0]).abs()
    assert ((found[0].double() - exact[0]).abs() <= best + 1e-5).all()


def as_on_cuda(dtype):
    """Eager's GELU and norm on CUDA: float32 in each op, 16 bits between them."""

    def block(x, weight, bias):
        return F.layer_norm(F.gelu(x.float()).to(dtype).float(), (96,), weight.float(), bias.float()).to(
            dtype
        )

    return block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gelu_and_a_norm_train_nearer_to_exact_than_eager(dtype, device):
    def block(x, weight, bias):
        return F.layer_norm(F.gelu(x), (96,), weight, bias)

    inputs = [x.to(device, dtype) for x in (torch.randn(64, 96) * 2, torch.randn(96), torch.randn(96))]
    found = trained(by_thunder(block), *inputs)
    eager, cuda = trained(block, *inputs), trained(as_on_cuda(dtype), *inputs)
    exact = trained(block, *(x.double() for x in inputs))
    for mine, *others, wanted in zip(found, eager, cuda, exact):
        assert mine.dtype is dtype
        away = [(one.double() - wanted).norm() for one in (mine, *others)]
        assert away[0] <= min(away[1:])
        # as if only the stored result were rounded
        assert away[0] <= 1.1 * (wanted.to(dtype).double() - wanted).norm()


def test_what_a_gradient_loses_by_rounding_is_not_lost(device):
    """A cast of the program's own, in the backward."""

    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            product = gradient * 0.3
            return product - product.bfloat16().float()

    def block(x, y):
        return Lost.apply(x) * y

    x, y = torch.randn(2, 16, 32, device=device)
    assert_lost(trained(by_thunder(block), x, y)[1], trained(block, x, y)[1])


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_product_of_16_bits_loses_is_not_lost(device, gradients):
    def loss(x, y):
        product = x.float() * y.float()
        return product - product.bfloat16().float()

    x, y = torch.randn(2, 16, 32, device=device).bfloat16().requires_grad_(gradients)
    assert_lost(by_thunder(loss)(x, y), loss(x, y))


def assert_lost(found, wanted):
    """A fused multiply-add may round the product once less."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert found.abs().max() > 1e-4


def test_infinities_and_nan_are_those_of_thunders_torch_executor(device):
    """Not eager's, whose GELU of infinity is NaN in 16 bits on some CPUs."""

    def block(x, y):
        return F.gelu(x) * y + x / 3

    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e38, -1e38, 3.0], device=device)
    x, y = special.repeat(8).bfloat16(), special.repeat_interleave(8).bfloat16()
    found = trained(by_thunder(block), x, y)[0]
    wanted = trained(thunder.jit(block, executors=["torch"]), x, y)[0]
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=0, equal_nan=True)


def test_what_a_program_loses_by_rounding_is_not_lost(device):
    def loss(x, y):
        product = x * y
        return product - product.bfloat16().float()

    x, y = torch.randn(2, 16, 32, device=device)
    found = trained(by_thunder(loss), x, y)[0]
    assert torch.equal(found, loss(x, y)) and found.any()
