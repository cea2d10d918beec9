"""`torch.compile(model, backend="tsfuser")`: trains and infers as eager does, whatever the sizes.

Most tests look at graphs more than at kernels, so they leave the fibers to `--long`."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.compiled_models import MODELS
from kit.random_programs import sweep
from kit.support import assert_matches
from tsfuser.errors import TsfuserWarning
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings
from tsfuser.planning import compilers, planner
from tsfuser.planning.compile import compile_fusion

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]
BACKEND = "tsfuser"
TERMS = 400  # the longest sums of the models: a convolution of 7 x 7 over 8 images


def compiled(function, **choices):
    return torch.compile(function, backend=BACKEND, **choices)


def outcome(model, function, x):
    """Outputs, gradients of `x` and of the parameters, and buffers after a step of training."""
    x = x.clone().requires_grad_(x.is_floating_point())
    out = function(x)
    out = out if isinstance(out, tuple) else (out,)
    model.zero_grad()
    generator = torch.Generator().manual_seed(17)
    weights = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype) for o in out
    ]
    torch.autograd.backward(out, weights)
    leaves = ([x] if x.requires_grad else []) + list(model.parameters())
    return [
        *(o.detach() for o in out),
        *(leaf.grad for leaf in leaves),
        *(b.clone() for b in model.buffers()),
    ]


def assert_all_match(actual, eager, exact, ops=TERMS):
    assert len(actual) == len(eager) == len(exact)
    for ours, plain, reference in zip(actual, eager, exact):
        assert_matches(ours, plain, reference, ops)


#: With --long: other tests here, in test_compile_training.py and test_compile_channels_last.py train them.
BRIEFLY = ("llama", "vae", "dlrm", "encoder", "convnext", "residual")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in BRIEFLY)) for name in MODELS]
)
def test_models_train_and_infer_as_in_eager_and_new_sizes_compile_nothing(name, device, target, monkeypatch):
    """On the CPU nothing is compiled from the third size on; from the fourth on, where some rows are as long
    as the batch, and 9 is the first odd length. A schedule for CUDA is made for rows of about the same
    length: those of 10 are no longer than those of 9 or 12, and no better a multiple."""
    make_model, make_input = MODELS[name]
    eager = make_model().to(device)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function = compiled(model, dynamic=True)
    kernels = []
    late = []  # fusions that were not planned when the graph was compiled
    monkeypatch.setattr(planner, "compile_fusion", lambda *call: late.append(call) or compile_fusion(*call))
    for size in (4, 6, 9, 12, 10):
        x = make_input(size).to(device)
        wide = x.double() if x.is_floating_point() else x
        assert_all_match(outcome(model, function, x), outcome(eager, eager, x), outcome(exact, exact, wide))
        found = tsfuser.stats()
        assert found["fallbacks"] == {} and found["launches"] > 0
        assert size > 4 or target != "cpu" or not late, late
        kernels.append(found["kernels_compiled"] + found["disk_hits"])
    settled = 3 if target != "cpu" else 2 if name in ("vae", "dlrm") else 1
    assert kernels[settled] == kernels[-1], kernels
    for each in (model, eager, exact):
        each.eval()
    with torch.no_grad():
        assert_all_match(*([o] if torch.is_tensor(o) else o for o in (function(x), eager(x), exact(wide))))


@pytest.mark.parametrize("name", ["vae", "dlrm"])
def test_models_train_as_in_eager(name, device):
    make_model, make_input = MODELS[name]
    eager = make_model().to(device)
    model, exact, x = copy.deepcopy(eager), copy.deepcopy(eager).double(), make_input(6).to(device)
    ours = outcome(model, compiled(model, fullgraph=True), x)
    assert_all_match(ours, outcome(eager, eager, x), outcome(exact, exact, x.double()))
    assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] > 0


def test_a_llama_block_reads_tokens_one_by_one_from_its_cache(device):
    make_model, make_input = MODELS["llama"]
    eager = make_model().to(device)
    model, whole, x = copy.deepcopy(eager), copy.deepcopy(eager), make_input(4).to(device)
    function = compiled(model, fullgraph=True)
    with torch.no_grad():
        for k in range(x.shape[1]):
            at = torch.tensor([k], device=device)
            assert_matches(function(x[:, k : k + 1], at), eager(x[:, k : k + 1], at), ops=TERMS)
        assert_matches(function(x[:, k : k + 1], at), whole(x)[:, -1:].contiguous(), ops=TERMS)
    assert_matches(model.keys, whole.keys, ops=TERMS)
    assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] > 0


def test_all_of_a_graph_is_fused_from_its_first_call_on(device):
    """AOTAutograd watches that call with a dispatch mode, at which a group would step aside."""
    x = torch.randn(8, 16, device=device)
    assert_matches(compiled(lambda x: torch.softmax(x * 2, -1) + 1)(x), torch.softmax(x * 2, -1) + 1, ops=8)
    found = tsfuser.stats()
    assert found["plans_built"] == found["launches"] == 1 and found["fallbacks"] == {}


def test_kernels_of_all_groups_are_compiled_before_the_first_call():
    def function(x, w):
        y = torch.mm(torch.relu(x) * 2, w)
        return torch.mm(torch.softmax(y, -1) + 1, w)

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    program = compile_graph(make_fx(function, tracing_mode="fake")(x, w), Settings())
    started = [job.future for job in compilers._ahead.jobs.values()]
    assert len(started) == 2 and tsfuser.stats()["plans_built"] == 0
    for future in started:
        future.result(60)
    made = tsfuser.stats()["kernels_compiled"]
    assert_matches(program([x, w])[0], function(x, w), ops=64)
    assert tsfuser.stats()["plans_built"] == 2 and tsfuser.stats()["kernels_compiled"] == made


@pytest.mark.parametrize("start", [0, 1])
def test_a_first_call_of_another_class_than_expected(start):
    """A tensor may begin anywhere in its memory, which the traced call does not say."""
    x = torch.randn(33)[start : start + 32].view(8, 4)
    assert_matches(compiled(lambda x: x.tanh() * 2 + 1)(x), x.tanh() * 2 + 1, ops=4)


def test_other_dispatch_modes_see_the_ops():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    function = compiled(lambda x: torch.tanh(x * 2) + 1)
    x = torch.randn(4)
    function(x)
    with Watching(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TsfuserWarning)  # it runs unfused, and says so
        result = function(x)
    assert_matches(result, torch.tanh(x * 2) + 1)
    assert torch.ops.aten.tanh.default in seen


def test_graphs_break_and_go_on():
    def function(x):
        y = torch.sin(x) * 2
        torch._dynamo.graph_break()
        return torch.relu(y) + x

    x = torch.randn(4, 5)
    assert_matches(compiled(function)(x), function(x), ops=4)
    assert tsfuser.stats()["launches"] == 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(function, fullgraph=True)(x)


def test_inference_modes_autocast_and_accumulation(device):
    eager = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)).to(device)
    model = copy.deepcopy(eager)
    function = compiled(model)
    x = torch.randn(6, 16, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_matches(function(x), eager(x), ops=TERMS)
    for _ in range(3):
        for each in (function, eager):
            each(x).square().sum().backward()
    for ours, plain in zip(model.parameters(), eager.parameters()):
        assert_matches(ours.grad, plain.grad, ops=TERMS)
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        ours, plain = function(x), eager(x)
    exact = copy.deepcopy(eager).double()(x.double())
    assert_matches(ours, plain, exact, ops=TERMS, precision=torch.bfloat16)
    assert tsfuser.stats()["fallbacks"] == {}


def test_inputs_that_change_in_place_and_views_of_them():
    def function(x, y):
        x.mul_(2).add_(1)
        y[0].copy_(torch.sin(x[1]) + y[1])
        return x.t() + 1, x[0], y.view(-1)

    ours = [torch.randn(4, 4), torch.randn(4, 4)]
    eager = [x.clone() for x in ours]
    version = ours[0]._version
    for made, plain in zip((*compiled(function)(*ours), *ours), (*function(*eager), *eager)):
        assert_matches(made, plain, ops=4)
        ours[0] += 1
        eager[0] += 1
    assert ours[0]._version - version > 5


@pytest.mark.parametrize("recompute", [True, False])
def test_the_backward_reads_what_an_input_was_before_it_changed(recompute):
    """torch's partitioner has it compute 1 / (z * z + 1) again, of the new z."""

    def function(x, y, z):
        result = torch.reciprocal(z * z + 1) * x + y * (z[:2].exp().t() + 1).sum()
        z.sigmoid_()
        return result * 0.75, z.view(-1)

    results = []
    for f in (compiled(function, options={"recompute": recompute}), function):
        x, y = (torch.arange(1.0, 4.0, requires_grad=True) for _ in range(2))
        z = torch.tensor([[2.0, 3.0, 1.0]] * 3)
        f(x, y, z)[0].sum().backward()
        results.append((x.grad, y.grad, z))
    for ours, plain in zip(*results):
        assert_matches(ours, plain, ops=16)


def test_inputs_that_change_places():
    def function(x, y):
        kept = x * 1
        x.copy_(y)
        y.copy_(kept)

    x, y = torch.ones(3), torch.zeros(3)
    compiled(function)(x, y)
    assert x.tolist() == [0] * 3 and y.tolist() == [1] * 3


def test_a_dropout_drops_at_its_rate_follows_the_seed_and_has_one_mask_both_ways(device):
    function = compiled(lambda x: F.dropout(x * 2, 0.25) + 0)
    x = torch.ones(1000, 100, device=device, requires_grad=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(function(x))
    assert torch.equal(*runs)  # the first call, too
    y = function(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0) and not torch.equal(y, runs[0])
    # 100,000 draws: five standard deviations of the rate
    assert abs((y != 0).double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert tsfuser.stats()["launches"] > 0


def test_losses_are_taken_apart_where_that_leads_to_ops_with_rows():
    def function(x, y):
        return F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y.tanh())

    x, y = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    ours, plain, exact = compiled(function)(x, y), function(x, y), function(x.double(), y.double())
    assert_matches(ours.detach(), plain.detach(), exact.detach(), ops=TERMS)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (ours, plain)]
    assert_matches(*gradients, ops=TERMS)
    assert tsfuser.stats()["fallbacks"] == {}
    assert tsfuser.stats()["plans_built"] == 2  # one group forward, one backward


def test_decompositions_that_begin_with_constants_and_other_decompositions():
    def function(x, y):
        return (
            F.logsigmoid(x) * 2,
            F.binary_cross_entropy_with_logits(x, y),
            F.binary_cross_entropy(x.sigmoid(), y),
            F.kl_div(x.log_softmax(-1), y),
        )

    x, y = torch.randn(8, 16, requires_grad=True), torch.rand(8, 16)
    wide = x.detach().double().requires_grad_()
    results = [(f(at, t), at) for f, at, t in ((compiled(function), x, y), (function, wide, y.double()))]
    for ours, exact in zip(*(found for found, _ in results)):
        assert_matches(ours.detach(), exact.detach().float(), exact.detach(), ops=TERMS)
    gradients = [torch.autograd.grad(sum(o.sum() for o in found), at)[0] for found, at in results]
    assert_matches(gradients[0], gradients[1].float(), gradients[1], ops=TERMS)
    assert tsfuser.stats()["fallbacks"] == {}
    assert tsfuser.stats()["left_to_python"] == {}


@torch.library.custom_op("tsfuser_tests::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


def test_what_no_graph_of_torchscript_holds_runs_between_its_pieces():
    def function(x):
        y = x.exp() * 2
        torch.ops.tsfuser_tests.add_one_(y)  # a higher-order op, once functional
        z = y.relu() + 1
        z = torch.cond(z.sum() > 0, lambda z: z.sin() + 1, lambda z: z.cos() * 2, (z,))
        return z.tanh() * 2

    x = torch.randn(5)
    assert_matches(compiled(function, fullgraph=True)(x), function(x), ops=16)
    assert tsfuser.stats()["launches"] >= 2


def test_activation_checkpoints_draw_the_mask_again():
    from torch.utils.checkpoint import checkpoint

    def function(x):
        return checkpoint(lambda x: F.dropout(x * 1.0, 0.5) * 2, x, use_reentrant=False)

    x = torch.ones(64, 8, requires_grad=True)
    y = compiled(function)(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)


@torch.library.custom_op("tsfuser_test_errors::at_most_one", mutates_args=())
def at_most_one(x: torch.Tensor) -> torch.Tensor:
    if (x > 1).any():
        raise ValueError("an element is larger than 1")
    return x.clone()


at_most_one.register_fake(torch.empty_like)


@torch.library.custom_op("tsfuser_test_errors::once", mutates_args=())
def once(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tsfuser_test_errors::once_backward", mutates_args=())
def once_backward(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no gradient here")


once.register_fake(torch.empty_like)
once_backward.register_fake(torch.empty_like)
once.register_autograd(lambda _, gradient: once_backward(gradient))


def selected(x, at):
    return torch.index_select(x.exp() + 1, 0, at) * 2


def looked_up(x, at):
    return torch.relu(torch.nn.functional.embedding(at, x) * 2)


def gathered(x, at):
    return torch.gather(x.exp() + 1, 0, at) * 2


def indexed(x, at):
    return (x * 2)[at].exp() + 1


def drawn(x, at):
    return torch.multinomial((x * 0 - at).exp() - 1, 2) + x.sum()


def refused(x, at):
    return torch.relu(at_most_one(at * x * 0.5) + 1)


def notes_of(error):
    """What is said below an error: in Python 3.10 as part of its text."""
    return "\n".join(getattr(error, "__notes__", [str(error)]))


ERRORS = [selected, looked_up, gathered, indexed, drawn, refused]


@pytest.mark.parametrize("function", ERRORS)
def test_errors_are_eagers_and_name_the_line_of_the_program(function):
    x, good, bad = torch.ones(4, 1), torch.tensor([-1, 0, -1]), torch.tensor([0, 9, 1])
    if function not in (drawn, refused):
        good = good.abs()
    if function is gathered:
        good, bad = good.unsqueeze(1), bad.unsqueeze(1)
    call = compiled(function)
    assert call(x, good).shape == function(x, good).shape
    with pytest.raises(Exception) as eager:
        function(x, bad)
    for _ in range(2):
        with pytest.raises(type(eager.value), match=re.escape(str(eager.value))) as mine:
            call(x, bad)
        assert type(mine.value) is type(eager.value)
        assert re.search(r"test_torch_compile\.py\", line \d+: return ", notes_of(mine.value))
        if hasattr(mine.value, "add_note"):
            assert str(mine.value) == str(eager.value)


def test_errors_of_the_backward_name_the_line_of_the_forward():
    def function(x):
        y = x * 2
        return once(y).exp()  # whose gradient fails

    x = torch.ones(3, requires_grad=True)
    result = compiled(function)(x).sum()
    with pytest.raises(ValueError, match="no gradient here") as error:
        result.backward()
    assert "# whose gradient fails" in notes_of(error.value)


def test_programs_with_one_group_name_each_their_own_line():
    def first(x, at):
        return torch.gather(x * 2, 1, at).exp() + 1  # of the first

    def second(x, at):
        return torch.gather(x * 2, 1, at).exp() + 1  # of the second

    for function in (first, second):
        call = compiled(function)
        call(torch.rand(5, 7), torch.tensor([[0, 1, 2]]))
        with pytest.raises(RuntimeError, match="index 9 is out of bounds") as error:
            call(torch.rand(5, 7), torch.tensor([[0, 1, 9]]))
        assert f"# of the {function.__name__}" in notes_of(error.value)


def test_scripted_functions_inside_keep_torchscripts_errors():
    scripted = torch.jit.script(selected)

    @torch.library.custom_op("tsfuser_test_errors::calls_scripted", mutates_args=())
    def calls_scripted(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return scripted(x, at)

    calls_scripted.register_fake(lambda x, at: x.new_empty((at.shape[0], x.shape[1])))
    x, good, bad = torch.ones(4, 1), torch.tensor([1, 0]), torch.tensor([0, 9])
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x, good)
        call = compiled(lambda x, at: calls_scripted(x, at) * 2)
        call(x, good)
        with pytest.raises(RuntimeError, match="TorchScript interpreter(.|\n)*<--- HERE") as error:
            call(x, bad)
        with pytest.raises(RuntimeError) as alone:
            scripted(x, bad)
    assert str(error.value).startswith(str(alone.value).strip())


def test_random_programs(place):
    """`python -m kit.random_programs --door compile` runs more of them."""
    counts, failed, _ = sweep(range(8), place, opt_level=0, report=lambda line: None, door="compile")
    assert counts["programs"] > 4 and counts["fused"] > 0 and not failed, failed


def test_random_networks_of_modules(place, request):
    """Two steps each: results, gradients, buffers and all strides. In 87 and 145 the gradient of a batch norm
    behind a transpose is viewed, which raised once."""
    seeds = range(300) if request.config.getoption("--long") else (0, 1, 87, 145)
    run = {"report": lambda line: None, "features": ("modules",), "door": "compile"}
    _, failed, _ = sweep(seeds, place, opt_level=0, **run)
    assert not failed, "\n".join(f"{run.wrong}\n{run.program.script()}" for run in failed)


@pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")
def test_lengths_of_nested_tensors_run_unfused_without_a_warning(device):
    parts = [torch.rand(n, 3, device=device, requires_grad=True) for n in (2, 4)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def function(x):
        return (x * 2).sin() * x

    torch._dynamo.reset()
    found, expected = (f(nested).values() for f in (torch.compile(function, backend="tsfuser"), function))
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(*(torch.autograd.grad(v.sum(), parts) for v in (found, expected))):
        torch.testing.assert_close(mine, theirs)
