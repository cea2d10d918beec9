"""torch.compile where the typed joint graph says what is saved (`PYTORCH_NVFUSER_ENABLE=typed_joint`)."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.compiled_models import MODELS
from kit.joint_measures import PROGRAMS, attention, classify, compiled, encoder, head, image, operands
from kit.support import assert_matches, counted
from tsfuser import options
from tsfuser.frontends.dynamo.joint_graph import partition
from tsfuser.frontends.dynamo.typed_joint import divide, translate
from tsfuser.graph.passes import Pass
from tsfuser.graph.wrapper import insert

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


@contextlib.contextmanager
def typed():
    """Yields why torch has divided graphs nevertheless."""
    found, whole = [], divide.divide

    def watched(*given):
        try:
            return whole(*given)
        except Exception as error:
            found.append(str(error))
            raise

    divide.divide = watched
    try:
        with options.override(enable={"typed_joint": ""}):
            yield found
    finally:
        divide.divide = whole


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_no_more_is_saved_and_launched(device, program):
    """And results and gradients are the same: on a host bit by bit, as ops and their order are."""
    given = operands(program, device)
    todays, *before = compiled(program, given)
    with typed() as left:
        ours, *after = compiled(program, given)
    assert left == []
    assert ours.saved <= todays.saved
    assert sum(ours.ours + ours.torchs) <= sum(todays.ours + todays.torchs)
    for one, other in zip((before[0], *before[1]), (after[0], *after[1])):
        if device == "cpu":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other)


def assert_trains(program, given, dynamic=False, ops=400):
    with typed() as left:
        _, result, gradients = compiled(program, given, calls=2, dynamic=dynamic)
    assert left == []
    leaves = [t for t in given if t.requires_grad]
    expected = [_eager(program, given), _eager(program, [_wide(t) for t in given])]
    assert len(gradients) == len(leaves)
    for ours, eager, exact in zip((result, *gradients), *expected):
        assert_matches(ours, eager, exact, ops, strides=False)


def _wide(tensor):
    return (
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
    )


def _eager(program, given):
    result = program(*given)
    leaves = [t for t in given if t.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p not in (encoder, head, attention)], ids=lambda f: f.__name__
)
def test_results_and_gradients_are_eagers(device, program, dynamic):
    assert_trains(program, operands(program, device), dynamic)


def waves(x, y):
    """Its derivative computes cosines that the forward does not."""
    return torch.sin(x * y).cumsum(0) * torch.exp(x.mean(0))


def compared(x, y):
    z = torch.exp(x + y)
    return z / z.amax(-1, True) + torch.where(x > 0, z, y)


def ranges(x, y):
    positions = torch.arange(x.size(-1), device=x.device)
    return torch.tanh(x * positions.cos()) * y


def pieces(x, y):
    first, second = x.tanh().split([x.size(-1) // 2, x.size(-1) - x.size(-1) // 2], -1)
    return torch.cat([second, first], -1).exp() * y.sigmoid()


def products(x, y):
    return F.softmax(x @ y.transpose(0, 1), -1) @ y + (x + y).relu()


@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (0, 5), (33, 64)])
@pytest.mark.parametrize("program", [waves, compared, ranges, pieces, products], ids=lambda f: f.__name__)
def test_small_and_odd_sizes(device, program, shape):
    if program is compared and 0 in shape:
        shape = (3, 1)
    torch.manual_seed(sum(shape))
    assert_trains(program, [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)])


def test_one_graph_serves_all_sizes(device):
    torch._dynamo.reset()
    with typed() as left:
        run = torch.compile(pieces, backend="tsfuser", dynamic=True, fullgraph=True)
        for rows in (3, 17, 64):
            given = [torch.randn(rows, rows + 2, device=device, requires_grad=True) for _ in range(2)]
            found = run(*given)
            gradients = torch.autograd.grad(found.sum(), given)
            expected = pieces(*given)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), given))
    assert left == []


FORMS = {
    "layer_norm": lambda x, w, b, v: F.gelu(F.layer_norm(x * 2, x.shape[-1:], w, b)) @ v,
    "rms_norm": lambda x, w, b, v: F.gelu(F.rms_norm(x * 2, x.shape[-1:], w) + b) @ v,
    "group_norm": lambda x, w, b, v: F.silu(F.group_norm(x.abs()[:, :, None], 2, w, b))[:, :, 0] @ v,
    "batch_norm": lambda x, w, b, v: F.silu(F.batch_norm(x * 2, None, None, w, b, True)) @ v,
    "relu of batch_norm": lambda x, w, b, v: F.relu(F.batch_norm(x * 2, None, None, w, b, True)) @ v,
    "bare layer_norm": lambda x, w, b, v: (F.layer_norm(x * 2, x.shape[-1:]).tanh() * w + b) @ v,
    "returned layer_norm": lambda x, w, b, v: F.layer_norm(x * v[0], x.shape[-1:], w, b),
    "leaky_relu": lambda x, w, b, v: F.leaky_relu(x @ v * w + b, 0.1) @ v,
    "falling": lambda x, w, b, v: F.leaky_relu(x @ v * w + b, -0.5) @ v,
    "relu6": lambda x, w, b, v: F.relu6(x @ v * w + b) @ v,
    "rounded ends": lambda x, w, b, v: F.hardtanh(x @ v * w + b, -0.7, 0.7) @ v,
    "softplus": lambda x, w, b, v: F.softplus(x @ v * w + b) @ v,
    "softmax": lambda x, w, b, v: F.softmax((x @ v * w + b).float(), -1).to(x.dtype) @ v,
    "loss": lambda x, w, b, v: F.cross_entropy(x @ v * w + b, torch.arange(len(x), device=x.device) % 4),
    "teacher": lambda x, w, b, v: F.kl_div(
        (x @ v * w + b).float().log_softmax(-1), (x * 3).detach().float().softmax(-1), reduction="batchmean"
    ),
    "embedding": lambda x, w, b, v: F.layer_norm(
        v[torch.arange(len(x), device=x.device) % 4] + x, w.shape, w, b
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_which_less_is_saved(form, dtype, dynamic, device):
    """No more than today, and results and gradients as near to float64 as eager's."""
    torch.manual_seed(11)
    shapes = ((24, 12), (12,), (12,), (12, 12))
    given = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    if dynamic and device == "cuda":
        try:  # torch 2.11 takes the address of a symbolic size for the size of an rms norm
            torch.compile(FORMS[form], backend="aot_eager", dynamic=True)(*given)
        except RuntimeError:
            pytest.skip("aot_eager raises the same")
    todays = compiled(FORMS[form], given, dynamic=dynamic)[0]
    with typed() as left:
        ours, result, gradients = compiled(FORMS[form], given, dynamic=dynamic)
    assert left == []
    assert ours.saved <= todays.saved
    assert sum(ours.ours + ours.torchs) <= sum(todays.ours + todays.torchs)
    expected = [_eager(FORMS[form], given), _eager(FORMS[form], [_wide(t) for t in given])]
    for found, eager, exact in zip((result, *gradients), *expected, strict=True):
        assert_matches(found, eager, exact, 400, strides=False)


@pytest.mark.parametrize("name", ["gpt", "lstm", "residual", "llama"])
def test_models(name, device):
    make, example = MODELS[name]
    torch.manual_seed(3)
    model, x = make().to(device), example(6).to(device)
    exact = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    runs = []
    with typed() as left:
        ours = torch.compile(model, backend="tsfuser")
        for each, call in ((model, ours), (plain, plain), (exact, exact)):
            y = call(x.double() if each is exact and x.is_floating_point() else x)
            y = y[0] if isinstance(y, tuple) else y
            y.square().mean().backward()
            runs.append([y.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert left == []
    for found, eager, reference in zip(*runs, strict=True):
        assert_matches(found, eager, reference, 400, strides=False)


def _trained(name, device):
    """Launches of a step of training, and bytes of what it saves besides its parameters and operand."""
    make, example = MODELS[name]
    torch.manual_seed(3)
    model, x = make().to(device), example(6).to(device)
    torch._dynamo.reset()
    run = torch.compile(model, backend="tsfuser")
    for _ in range(2):
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        with counted() as rise:
            with hooks:
                y = run(x)
            (y[0] if isinstance(y, tuple) else y).square().mean().backward()
    sizes = {m.data_ptr(): m.nbytes() for m in (t.untyped_storage() for t in saved)}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    return rise["launches"], sum(size for place, size in sizes.items() if place not in own)


@pytest.mark.parametrize("name", MODELS)
def test_models_save_and_launch_no_more(name, device):
    with options.override(enable={}):
        launches, saved = _trained(name, device)
    with typed() as left:
        found = _trained(name, device)
    assert left == []
    assert found[0] <= launches and found[1] <= saved


def test_a_norm_of_a_turned_image_is_saved_as_it_lies(device):
    """The elementwise ops that it is written as would have its operand's strides."""
    make, example = MODELS["convnext"]
    model, x = make().to(device), example(16).to(device)

    def launches():
        torch._dynamo.reset()
        run = torch.compile(model, backend="tsfuser")
        for _ in range(3):
            with counted() as rise:
                run(x).sum().backward()
        return rise["launches"]

    before = launches()
    with typed() as left:
        assert launches() <= before
    assert left == []


def distilled(x, w, v):
    """Of a teacher, whose logits of 16 bits a product makes, and which gets no gradient."""
    taught = (x.detach() @ v.detach()).float().softmax(-1)
    return F.kl_div((x @ w).float().log_softmax(-1), taught, reduction="batchmean")


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_a_softmax_without_gradient_no_result_is_saved(dynamic, device):
    torch.manual_seed(6)
    shapes = (20, 16), (16, 30), (16, 30)
    given = [torch.randn(s, device=device).bfloat16().requires_grad_(k < 2) for k, s in enumerate(shapes)]
    todays = compiled(distilled, given, dynamic=dynamic)[0]
    torch._dynamo.reset()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with typed() as left:
        with hooks:
            torch.compile(distilled, backend="tsfuser", dynamic=dynamic)(*given)
        ours = compiled(distilled, given, dynamic=dynamic)[0]
    assert left == []
    assert [t.dtype for t in saved if t.shape == (20, 30)].count(torch.float32) <= 1  # the student's
    assert ours.saved <= todays.saved and sum(ours.ours) <= sum(todays.ours)
    assert_trains(distilled, given, dynamic)


def items(x, y):
    """The second of equal ops gives what nothing takes of the first."""
    first, second = (x * y).max(-1), (x * y).max(-1)
    pieces = (x.tanh() * y).split(2, -1)[0].exp(), (x.tanh() * y).split(2, -1)[1].sin()
    return first.values.exp() * (second.indices + 1).sin() + pieces[0].sum(-1) * pieces[1].sum(-1)


def sizes(x, y):
    """Numbers that are computed of sizes, twice."""
    rows = y.new_ones(x.size(0) * 2).cumsum(0).sum() + y.new_ones(x.size(0) * 2).sin().sum()
    return x.reshape(x.size(0) * x.size(1)).sin() * rows + x.reshape(x.size(0) * x.size(1)).exp() + y.sum()


def twice(x, y):
    return (x.sin() * y).cumsum(0) * (x.sin() * y).exp(), x.sin(), x.sin().view(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [items, sizes], ids=lambda f: f.__name__)
def test_equal_ops_are_computed_once(program, dynamic, device):
    torch.manual_seed(4)
    given = [torch.randn(6, 7, device=device, requires_grad=True) for _ in range(2)]
    todays = compiled(program, given, dynamic=dynamic)[0]
    with typed():
        ours = compiled(program, given, dynamic=dynamic)[0]
    assert sum(ours.ours + ours.torchs) <= sum(todays.ours + todays.torchs)
    assert_trains(program, given, dynamic)


def test_equal_ops_are_merged_in_the_typed_graph_only(device, monkeypatch):
    """And two results stay two tensors. Nothing is merged where the user wants that."""
    from torch._functorch import config

    def not_here(graph):
        raise AssertionError("the graph of FX has been merged")

    monkeypatch.setattr(partition, "merge_repeats", not_here)
    x, y = (torch.randn(6, 5, device=device, requires_grad=True) for _ in range(2))
    for wanted in (True, False):
        torch._dynamo.reset()
        with typed() as left, config.patch(cse=wanted):
            found = torch.compile(twice, backend="tsfuser", fullgraph=True)(x, y)
        assert left == []
        assert len({t.untyped_storage().data_ptr() for t in found}) == 3
        for ours, theirs in zip(found, twice(x, y)):
            torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(sum(t.sum() for t in made), (x, y)) for made in (found, twice(x, y))]
        torch.testing.assert_close(*gradients)


def test_what_the_program_changes_is_saved_as_it_was(device):
    def function(x, y, state):
        old = state.clone()
        state.mul_(2.0)
        return (x * old).tanh() * y * state.sum()

    torch._dynamo.reset()
    x, y = (torch.randn(6, 5, device=device, requires_grad=True) for _ in range(2))
    states = [torch.full((6, 5), 0.3, device=device) for _ in range(2)]
    with typed() as left:
        run = torch.compile(function, backend="tsfuser", fullgraph=True)
        found, expected = (f(x, y, s) for f, s in zip((run, function), states))
        gradients = [torch.autograd.grad(r.sum(), (x, y)) for r in (found, expected)]
    assert left == []
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(states[0], states[1])
    torch.testing.assert_close(*gradients)


def test_logits_that_leave_are_saved_though_they_are_a_view(device):
    def function(x, w, target):
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, 40), target), logits

    torch._dynamo.reset()
    x, w = (torch.randn(s, device=device).bfloat16().requires_grad_() for s in ((3, 8, 16), (40, 16)))
    target = torch.randint(40, (24,), device=device)
    saved = []
    with (
        typed() as left,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        loss, logits = torch.compile(function, backend="tsfuser", fullgraph=True)(x, w, target)
    assert left == []
    known = {t.untyped_storage().data_ptr() for t in (x, w, target, logits)}
    assert sum(t.numel() for t in saved if t.untyped_storage().data_ptr() not in known) <= 2 * 24 + 1


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x: checkpoint(torch.sin, x, use_reentrant=False).exp(), "a checkpoint"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * 2, ""),
    ],
    ids=["checkpoint", "branches"],
)
def test_what_it_does_not_take_is_divided_as_before(function, reason, device):
    torch._dynamo.reset()
    x = torch.randn(5, 4, device=device, requires_grad=True)
    with typed() as left:
        found = torch.compile(function, backend="tsfuser")(x)
        [gradient] = torch.autograd.grad(found.sum(), x)
    assert left and all(reason in text for text in left)
    expected = function(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


@torch.library.custom_op("tsfuser_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


halved.register_autograd(lambda context, gradient: halved(gradient))


def test_an_op_of_another_library_is_neither_moved_nor_repeated(device):
    def function(x, y):
        return (halved(x.exp()) * y).sin() + halved(y)

    torch.manual_seed(2)
    assert_trains(function, [torch.randn(5, 4, device=device, requires_grad=True) for _ in range(2)])


def test_what_passes_write_that_torch_has_no_op_for(device, monkeypatch):
    """Torch divides the graph as it was."""

    def strange(work):
        (node,) = work.joint.graph.findAllNodes("aten::sin", True)
        made = insert(work.joint.graph, node, "tsfuser::packed", [node.inputsAt(0)])
        node.replaceInput(0, made.output())

    monkeypatch.setattr(divide, "_STEPS", (Pass("strange", strange),))
    torch._dynamo.reset()
    x = torch.randn(5, 4, device=device, requires_grad=True)
    with typed() as left:
        found = torch.compile(lambda x: (x.tanh() * 3).sin().tanh(), backend="tsfuser")(x)
        [gradient] = torch.autograd.grad(found.sum(), x)
    assert left == ["tsfuser::packed of a joint graph is not written for torch"]
    expected = (x.tanh() * 3).sin().tanh()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_the_reason_is_logged(capfd):
    torch._dynamo.reset()
    x = torch.randn(5, 4, requires_grad=True)
    with typed(), options.override(log_levels={"partition": 0}):
        torch.compile(lambda x: checkpoint(torch.sin, x, use_reentrant=False), backend="tsfuser")(x)
    assert "torch chooses what the forward saves: a checkpoint says" in capfd.readouterr().err


def test_nothing_changes_without_the_option(monkeypatch):
    monkeypatch.setattr(translate, "translate", None)
    monkeypatch.setattr(divide, "divide", None)
    with options.override(enable={"joint_graph": ""}):  # which is for scripted programs
        compiled(classify, operands(classify))
        compiled(image, operands(image))


class Residual(nn.Module):
    """Each layer adds to a sum what a product and a dropout give."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        x = F.dropout(self.first(x), 0.1) + x
        for norm, linear in zip(self.norms, self.linears):
            x = x + F.dropout(linear(norm(x)), 0.1)
        return x.square().sum()


def test_sums_that_layers_carry_along_are_saved():
    """Computed again, each kernel of the backward would read two operands for one."""
    model, x, saved = Residual(5), torch.randn(5, 8).requires_grad_(), []
    with (
        typed() as left,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(model, backend="tsfuser")(x)
    assert left == []
    sums = [
        t for t in saved if t.dtype == torch.float32 and t.shape == x.shape and t.data_ptr() != x.data_ptr()
    ]
    assert len(sums) >= 4  # but for the first and the last
