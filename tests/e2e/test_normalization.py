"""Softmax and normalisations fused by TorchScript, forward and backward, against eager and against eager in
double. Batch norm's values are in test_batch_norm.py, since they come with running statistics; group norm has
test_group_norm.py; how near all are to double, and derivatives by differences, are in test_accuracy.py."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.batch_norms import FORWARD as BATCH_NORM
from kit.batch_norms import Normed, parameters
from kit.opsweep import plain
from kit.reductions import COLUMNS, DTYPES, ROWS, Fused, check, rows_of, tensor
from kit.support import assert_matches, counted, fresh, groups, kinds, no_fallback, script, train
from tsfuser.ops import normalization

pytestmark = pytest.mark.usefixtures("single_nodes")


def test_rows_of_any_length(device):
    function = Fused(ROWS)
    for columns in (2, 17, 33, 1000, 4097):
        check(function, *rows_of(columns, 5, device))


@pytest.mark.parametrize("rows", [0, 2, 131])
def test_any_number_of_rows(device, rows):
    check(Fused(ROWS), *rows_of(33, rows, device))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_of_any_dtype(target, device, dtype):
    if target == "cpu-fibers" and dtype != torch.bfloat16:
        pytest.skip("in the long sweep")
    function = Fused(ROWS)
    check(function, *rows_of(1000, 5, device, dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_rows_of_any_length_and_dtype(device, rows, dtype):
    function = Fused(ROWS)
    for columns in COLUMNS:
        check(function, *rows_of(columns, rows, device, dtype))


ALONG = """
def f(x, d: int):
    s = torch.softmax(x, d)
    return s, torch.log_softmax(x * 2, d), s * x, torch.var(x, [d], False, True) * x
"""


def layouts(device):
    """Tensors as memory may hold them, with the dim along which to reduce."""
    square = tensor(40, 30, device=device)
    image = tensor(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    return {
        "middle": (tensor(4, 5, 6, device=device), 1),
        "outer": (tensor(33, 70, device=device), 0),
        "channels_last": (image, 1),
        "channels_last_inner": (image, -1),
        "transposed": (square.t(), 1),
        "strided": (square[:, ::2], 1),
        "unaligned": (square[:, 1:], 1),
        "expanded": (square[:, :1].expand(40, 30), 1),
        "expanded_rows": (square[:1].expand(40, 30), 1),
        "single": (tensor(4, 1, 6, device=device), 1),
    }


@pytest.mark.parametrize("name", layouts("cpu"))
def test_softmax_along_any_dim(target, device, name):
    if target == "cpu-fibers" and name in ("channels_last_inner", "unaligned", "expanded_rows", "single"):
        pytest.skip("on the other targets")
    check(Fused(ALONG), *layouts(device)[name])


FUSED_RMS = """
def f(x, w):
    y, r = torch.ops.aten._fused_rms_norm(x, [x.size(-1)], w, 1e-5)
    z, q = torch.ops.aten._fused_rms_norm(x * 2.0, [x.size(-1)], None, None)
    return y, r, z + x, q
"""


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="not in this torch")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_rms_norm(target, device, dtype):
    if target == "cpu-fibers" and dtype != torch.float16:
        pytest.skip("on the other targets")
    x, w, _ = rows_of(33, 5, device, dtype)
    check(Fused(FUSED_RMS), x, w)
    if target == "cpu":
        check(Fused(FUSED_RMS), tensor(4, 5, 6, dtype=dtype).transpose(0, 1), tensor(6, dtype=dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]], ids=str)
def test_derivative_of_fused_rms_norm(mask, dtype):
    """In a group made by hand: eager has it on CUDA only."""
    x, w, _ = (t.requires_grad_() for t in rows_of(9, 5, "cpu", torch.float64))
    dy = tensor(5, 9, dtype=torch.float64, seed=7)
    wanted = torch.autograd.grad(torch.rms_norm(x, [9], w, 1e-5), (x, w), dy)
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5).detach()
    given = [
        dy.to(dtype),
        x.detach().to(dtype),
        rstd.to(torch.promote_types(dtype, torch.float32)),
        w.detach().to(dtype),
    ]
    with no_fallback():
        results = RMS_BACKWARD(*given, mask)
    assert [r is not None for r in results] == mask
    for actual, exact, asked in zip(results, wanted, mask):
        if asked:
            assert actual.dtype == dtype
            assert_matches(actual, exact.to(dtype), exact, ops=64)


def one_group(text):
    """A function that is nothing but the group of that graph."""
    graph, inner = torch._C.Graph(), torch._C.parse_ir(text)
    values = [graph.addInput() for _ in inner.inputs()]
    for value, its in zip(values, inner.inputs()):
        value.setType(its.type())
    node = graph.create("prim::CudaFusionGroup", values, len(list(inner.outputs())))
    node.g_("Subgraph", inner)
    graph.appendNode(node)
    for output, its in zip(node.outputs(), inner.outputs()):
        output.setType(its.type())
    results = graph.create("prim::ListConstruct", list(node.outputs()), 1)
    graph.appendNode(results)
    results.output().setType(torch._C.ListType(torch._C.TensorType.get()))
    graph.registerOutput(results.output())
    return torch._C._create_function_from_graph("f", graph)


RMS_BACKWARD = one_group("""
graph(%dy : Tensor, %x : Tensor, %rstd : Tensor, %w : Tensor, %mask : bool[]):
  %n : int = prim::Constant[value=9]()
  %shape : int[] = prim::ListConstruct(%n)
  %a : Tensor, %b : Tensor = aten::_fused_rms_norm_backward(%dy, %x, %shape, %rstd, %w, %mask)
  return (%a, %b)
""")


# ---- forward and backward


def layer_norm(x, w, b):
    return F.layer_norm(x * 2.0, [x.size(-1)], w, b, 1e-5) * 3.0


def layer_norm_over_two(x, w, b):
    return F.layer_norm(x * 2.0, [x.size(-2), x.size(-1)]) * w + b


def layer_norm_without_bias(x, w):
    return F.layer_norm(x * 2.0, [x.size(-1)], w) * 3.0


def layer_norm_without_parameters(x):
    return F.layer_norm(x * 2.0, [x.size(-1)]) * 3.0


def softmax(x):
    return torch.softmax(x * 2.0, -1) * 3.0


def softmax_outer(x):
    return torch.softmax(x * 2.0, 0) * 3.0


def log_softmax(x):
    return torch.log_softmax(x * 2.0, -1) * 3.0


def rms_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def primitives(x, w, b):
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5) * w + b


def variance(x, w, b):
    v = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(v + 1e-5) * w + b


def block(x, w, b):
    return F.layer_norm(F.gelu(x + b, approximate="tanh") + x, [x.size(-1)], w, b)


def costly_of_costly(x):
    """Two costly values, one made of the other, which are read again behind the statistics."""
    bent = F.gelu(x)
    return F.layer_norm(bent.exp(), [x.size(-1)]) + bent


TRAINED = [layer_norm, layer_norm_over_two, layer_norm_without_bias, layer_norm_without_parameters, softmax,
           softmax_outer, log_softmax, rms_norm,
           primitives, variance, block, costly_of_costly]  # fmt: skip
BACKWARDS = {"layer_norm": "aten::native_layer_norm_backward", "softmax": "aten::_softmax_backward_data",
             "log_softmax": "aten::_log_softmax_backward_data",
             "block": "aten::native_layer_norm_backward"}  # fmt: skip
BACKWARDS |= dict.fromkeys(
    ("layer_norm_without_bias", "layer_norm_without_parameters"), "aten::native_layer_norm_backward"
)


def trained(function, columns, device, dtype):
    count = function.__code__.co_argcount
    made = [tensor(4, 7, columns, device=device, dtype=dtype)] + [
        tensor(columns, device=device, dtype=dtype, seed=k) for k in range(1, count)
    ]
    return [x.requires_grad_() for x in made]


def check_training(function, scripted, inputs, ops=32, precision=None):
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs)
    eager, eager_gradients = train(function, inputs, 1)
    exact, exact_gradients = train(function, [x.detach().double().requires_grad_() for x in inputs], 1)
    assert_matches(out, eager, exact, ops=ops, precision=precision)
    for a, e, r in zip(gradients, eager_gradients, exact_gradients):
        assert_matches(a, e, r, ops=ops, precision=precision)


@pytest.mark.parametrize("function", TRAINED, ids=lambda f: f.__name__)
def test_forward_and_backward(target, device, function):
    if target == "cpu-fibers" and function in (
        layer_norm_without_bias,
        layer_norm_without_parameters,
        primitives,
        softmax_outer,
    ):
        pytest.skip("on the other targets")
    scripted = fresh(function)
    check_training(function, scripted, trained(function, 260, device, torch.float32))
    wanted = BACKWARDS.get(function.__name__)
    assert groups(scripted) and (wanted is None or any(wanted in kinds(g) for g in groups(scripted)))


@pytest.mark.parametrize(
    "function", [layer_norm, softmax_outer, log_softmax, variance], ids=lambda f: f.__name__
)
def test_forward_and_backward_in_double(function):
    check_training(function, fresh(function), trained(function, 12, "cpu", torch.float64))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [layer_norm, softmax, log_softmax], ids=lambda f: f.__name__)
def test_forward_and_backward_in_16_bits(function, dtype):
    check_training(function, fresh(function), trained(function, 33, "cpu", dtype))


# ---- batch norm


def trained_batch_norm(function, x, parameters, *rest, calls=1):
    """Result, running statistics and the gradients of x, weight and bias."""
    for _ in range(calls):
        leaves = [
            None if p is None else p.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for p in (x, *parameters[:2])
        ]
        statistics = [p.clone() for p in parameters[2:]]
        y = function(*leaves, *statistics, *rest)
        y.backward(tensor(*y.shape, seed=9).to(y.device, y.dtype))
    return [y.detach(), *statistics, *(p.grad for p in leaves if p is not None)]


def check_batch_norm(source, x, parameters, *rest, ops=64):
    function = Normed(source)
    with tsfuser.fuser(), no_fallback():
        actual = trained_batch_norm(function.scripted, x, parameters, *rest, calls=4)
    eager = trained_batch_norm(function.plain, x, parameters, *rest)
    exact = trained_batch_norm(function.plain, x.double(), [p.double() for p in parameters], *rest)
    for a, e, r in zip(actual, eager, exact):
        assert_matches(a, e, r, ops=ops, precision=x.dtype)
    norms = {"aten::_batch_norm_impl_index", "aten::_batch_norm_impl_index_backward"}
    assert ({"tsfuser::batch_norm"} if by_joint_graphs() else norms) <= function.kinds


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_batch_norm(device, training):
    check_batch_norm(BATCH_NORM, tensor(4, 3, 5, 6, device=device), parameters(3, device), training, 0.1)


def test_gradients_of_batch_norm_in_channels_last(device):
    x = tensor(4, 3, 5, 6, device=device).contiguous(memory_format=torch.channels_last)
    check_batch_norm(BATCH_NORM, x, parameters(3, device), True, 0.1)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_of_batch_norm_in_other_dtypes(dtype):
    x = tensor(4, 3, 7, dtype=dtype)
    check_batch_norm(BATCH_NORM, x, parameters(3, dtype=dtype), True, 0.1)
    if dtype == torch.bfloat16:
        check_batch_norm(BATCH_NORM, x, parameters(3), True, 0.1)
        check_batch_norm(BATCH_NORM, x, parameters(3), False, 0.1)


MASKED = """
def f(dy, x, w, mean, rstd, m, v, training: bool, mask: List[bool]):
    a, b, c = torch.ops.aten.native_batch_norm_backward(dy * 2.0, x, w, m, v, mean, rstd, training, 1e-5,
                                                        mask)
    found = [a][:0]
    if mask[0]:
        found.append(a)
    if mask[1]:
        found.append(b)
    if mask[2]:
        found.append(c)
    return found
"""


def test_gradients_of_batch_norm_that_are_masked_off(device):
    fused, plain = script(MASKED), script(MASKED)
    dy, x = tensor(4, 3, 5, device=device), tensor(4, 3, 5, device=device, seed=1)
    w, mean, m, v = parameters(3, device)
    masks = [[True] * 3] * 3 + [
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [True, True, False],
    ]
    for training in (True, False):
        # eager's CUDA kernels take one or the other, by the mask
        saved = (mean, v) if training else (m, torch.rsqrt(v + 1e-5))
        inputs = (dy, x, w, *saved, m, v)
        for mask in masks:
            eager = plain(*inputs, training, mask)
            with tsfuser.fuser(), no_fallback():
                actual = fused(*inputs, training, mask)
            assert len(actual) == len(eager) == sum(mask)
            for a, e in zip(actual, eager):
                assert_matches(a, e, ops=64)
    assert groups(fused)


def test_a_norm_takes_an_undefined_gradient():
    """A batch norm of an empty tensor gives its operand none, which stands for 0."""

    def f(x):
        normed = F.rms_norm(x, [x.size(-2), x.size(-1)], eps=0.25)
        return F.batch_norm(normed, None, None, training=True, eps=0.25)

    scripted = torch.jit.script(f)
    with tsfuser.fuser():
        for _ in range(4):
            x = torch.ones(2, 1, 0, requires_grad=True)
            scripted(x).sum().backward()
            assert x.grad is None or x.grad.shape == x.shape


#: Operands whose rows lie across memory, and the sizes of a row.
ACROSS = {
    "channels of an image": (lambda x: x.permute(0, 2, 3, 1), (2, 24, 6, 5), 1),
    "rows of a transposed matrix": (lambda x: x.t(), (40, 33), 1),
    "two dims of a row": (lambda x: x.permute(2, 1, 0), (7, 9, 20), 2),
    "one channel": (lambda x: x.permute(0, 2, 3, 1), (2, 1, 6, 5), 1),
    "one pixel": (lambda x: x.permute(0, 2, 3, 1), (2, 24, 1, 1), 1),
    "every other channel": (lambda x: x.permute(0, 2, 3, 1)[..., ::2], (2, 24, 6, 5), 1),
    "expanded": (lambda x: x.permute(0, 2, 3, 1).expand(4, 6, 5, 24), (1, 24, 6, 5), 1),
    "nothing": (lambda x: x.permute(0, 2, 3, 1), (0, 24, 6, 5), 1),
}


@pytest.mark.each_value(("large", "name"), ("large", "cast", "dtype"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cast", ["", ".float()"])
@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("large", [1, 1 << 20])
def test_layer_norm_of_rows_across_memory(device, name, cast, dtype, large, monkeypatch):
    """Large ones are copied into rows first."""
    monkeypatch.setattr(normalization, "_LARGE", large)
    view, sizes, dims = ACROSS[name]
    x = view(tensor(*sizes, device=device, dtype=dtype))
    row = list(x.shape[-dims:])
    parameters = (tensor(*row, device=device, dtype=torch.float32 if cast else dtype) for _ in range(2))

    def text(cast):
        norm = f"torch.nn.functional.layer_norm((x * 2.0){cast}, {row}, w, b)"
        return f"def f(x: Tensor, w: Tensor, b: Tensor):\n    return {norm} * 3.0\n"

    def ran(function, *given):
        given = [t.detach().requires_grad_() for t in given]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]

    given, scripted = (x, *parameters), script(text(cast))
    with tsfuser.fuser(), no_fallback():
        found = [ran(scripted, *given) for _ in range(4)][-1]
    exact = ran(plain(text("")), *(t.double() for t in given))
    for k, (ours, theirs) in enumerate(zip(found, ran(plain(text(cast)), *given), strict=True)):
        precision = torch.float32 if cast and dtype == torch.float64 else None
        assert_matches(ours, theirs, exact[k], ops=400, strides=k == 0, precision=precision)


def torchs_rms_norm(x, w):
    return torch.tanh(torch.rms_norm(x * 2.0, [x.size(-1)], w, 1e-5))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "of_operand, of_weight",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_rms_norm_with_a_weight_of_another_dtype(device, of_operand, of_weight):
    """As under autocast: the result has the dtype of the operand."""
    x = tensor(4, 7, 33, device=device, dtype=of_operand).requires_grad_()
    w = tensor(33, device=device, dtype=of_weight, seed=1).requires_grad_()
    check_training(torchs_rms_norm, fresh(torchs_rms_norm), [x, w], precision=of_operand)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_with_a_weight_in_double_is_left_to_torch(device):
    """Which computes in double."""
    x, w = torch.rand(5, 9, device=device), torch.rand(9, device=device, dtype=torch.float64)
    scripted = fresh(torchs_rms_norm)
    with tsfuser.fuser(), counted() as rise:
        for _ in range(4):
            assert_matches(scripted(x, w), torchs_rms_norm(x, w))
    assert rise["fallbacks"] == {}
    assert "rms_norm of float32 with a weight in float64" in str(tsfuser.explain(scripted, x, w))
