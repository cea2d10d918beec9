"""`torch.compile(model, backend="tsfuser")`: trains and infers as eager does, whatever the sizes.

Most tests look at graphs more than at kernels, so they leave the fibers to `--long`."""

import copy
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

import tsfuser
from kit import prefork
from kit.compiled_models import MODELS
from kit.random_compiled import sweep
from kit.support import ROOT, assert_matches
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


BRIEFLY = ("llama", "vae", "dlrm")  # the next tests are enough for them where time counts


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


@pytest.mark.parametrize(
    "choices, words",
    [
        (
            {"options": {"fast": True}},
            "no option 'fast'; its options are skip, horizontal, single_node, recompute, channels_last",
        ),
        ({"options": {"horizontal": 1}}, "'horizontal' cannot be 1: it is True or False"),
        ({"options": {"skip": ["gelu"]}}, "like 'aten::gelu'"),
        ({"mode": "max-autotune"}, "no mode 'max-autotune'"),
    ],
)
def test_choices_without_a_meaning_are_errors(choices, words):
    with pytest.raises(Exception, match=words):
        compiled(lambda x: x.exp() + 1, **choices)(torch.ones(2))


def test_what_is_skipped_stays_out_of_groups():
    x = torch.randn(8)
    assert_matches(compiled(lambda x: x.exp() + 1, options={"skip": ["aten::exp"]})(x), x.exp() + 1)
    assert tsfuser.stats()["launches"] == 0
    torch._dynamo.reset()
    compiled(lambda x: x.exp() + 1)(x)
    assert tsfuser.stats()["launches"] == 1


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


def test_sizes_are_arithmetic_of_the_graph():
    def function(x, y):
        return (
            (x * y.shape[0] + x.shape[1]).softmax(-1).reshape(-1) * x.numel(),
            x.shape[0] * 2 + 1,
            x.shape[0] // 2,
        )

    whole = compiled(function, dynamic=True, fullgraph=True)
    for n in (3, 5, 8):
        ours, plain = (f(torch.ones(n, n + 1), torch.ones(n)) for f in (whole, function))
        assert_matches(ours[0], plain[0], ops=16)
        assert ours[1:] == plain[1:]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_floats_that_sizes_decide():
    def function(x):
        y = x * 2 / x.shape[1] ** 0.5 + math.sqrt(x.shape[0]) - x.shape[0] / x.shape[1]
        return y * (x.shape[1] * 0.5 - 1)

    whole = compiled(function, dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, 2 * n)
        assert_matches(whole(x), function(x), function(x.double()), ops=16)
    found = tsfuser.stats()
    assert found["left_to_python"] == {} and found["plans_built"] == 1


def test_negative_zero_stays_apart_from_zero():
    def function(x):
        return torch.where(x > 0, 0.0, -0.0) * x.abs(), torch.where(x > 0, -0.0, 0.0) * x.abs()

    x = torch.randn(16)
    for ours, plain in zip(compiled(function)(x), function(x)):
        assert torch.equal(torch.signbit(ours), torch.signbit(plain))


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


def test_tensors_that_the_program_holds_as_constants(device):
    def function(x, mask):
        masked = torch.where(mask, x, torch.tensor(float("-inf")))
        return torch.softmax(masked, -1) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)

    x, mask = torch.randn(6, 4, device=device), torch.ones(6, 4, dtype=torch.bool, device=device).tril()
    assert_matches(compiled(function)(x, mask), function(x, mask), ops=16)
    assert tsfuser.stats()["plans_built"] == tsfuser.stats()["launches"] == 1


NUMBERS = {torch.int64: 1.7, torch.bool: 1, torch.float64: 2, torch.int32: 3, torch.float32: 0.1}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_tensor_that_is_filled_with_a_number_keeps_its_dtype(dtype):
    """1.7 is 1 in a tensor of ints. The number alone would lead to floats."""

    def function(mask, x):
        return torch.where(mask, x, torch.full((), NUMBERS[dtype], dtype=dtype)) + x

    mask, x = torch.arange(8) % 3 > 0, torch.arange(8).to(dtype)
    ours, plain = compiled(function)(mask, x), function(mask, x)
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


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


def test_numbers_that_tensors_hold():
    function = compiled(lambda x: torch.relu(x) * x.sum().item() + 1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for x in (torch.rand(4), torch.arange(4)):
            assert_matches(function(x), torch.relu(x) * x.sum().item() + 1, ops=8)


def test_activation_checkpoints_draw_the_mask_again():
    from torch.utils.checkpoint import checkpoint

    def function(x):
        return checkpoint(lambda x: F.dropout(x * 1.0, 0.5) * 2, x, use_reentrant=False)

    x = torch.ones(64, 8, requires_grad=True)
    y = compiled(function)(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)


def _python(source, folder, *paths):
    others = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *others])}
    return prefork.run(["-c", source], env=environment, cwd=folder)


_CALL = """
import torch
{line}
x = torch.randn(8)
result = torch.compile(lambda x: torch.tanh(x * 2) + 1, backend="tsfuser")(x)
torch.testing.assert_close(result, torch.tanh(x * 2) + 1)
import tsfuser
assert tsfuser.stats()["launches"] == 1, tsfuser.stats()
"""


def test_an_installed_tsfuser_is_found_without_an_import(tmp_path):
    """The metadata are those that pip would write from pyproject.toml."""
    from setuptools.config.pyprojecttoml import read_configuration

    points = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]["entry-points"]
    info = tmp_path / "tsfuser-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tsfuser\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    done = _python(_CALL.format(line=""), tmp_path, ROOT, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    ["import tsfuser", "import torch._dynamo; torch._dynamo.list_backends(); import tsfuser"],
    ids=["before", "after"],
)
def test_a_checkout_is_found_once_it_is_imported(tmp_path, line):
    package = tmp_path / "tsfuser"
    package.symlink_to(Path(tsfuser.__file__).parent)  # no metadata beside it
    done = _python(_CALL.format(line=line), tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_import_leaves_torch_dynamo_alone():
    loaded = "('torch._dynamo' in sys.modules)"
    source = f"import sys, torch; before = {loaded}; import tsfuser; assert {loaded} == before"
    done = _python(source, ROOT, ROOT)
    assert done.returncode == 0, done.stderr


_watched: list = []  # storages
_alive: list = []  # how many of them are alive, at each call of the two ops


def _count():
    _alive.append(sum(not ref.expired() for ref in _watched))


@torch.library.custom_op("tsfuser_tests::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    _count()
    _watched.append(StorageWeakRef(x.untyped_storage()))
    return x.clone()


@torch.library.custom_op("tsfuser_tests::look_back", mutates_args=())
def look_back(x: torch.Tensor) -> torch.Tensor:
    _count()
    return x.clone()


look.register_fake(torch.empty_like)
look_back.register_fake(torch.empty_like)
look.register_autograd(lambda context, gradient: look_back(gradient))


@pytest.fixture
def nothing_watched():
    _watched.clear()
    _alive.clear()


def test_saved_tensors_live_until_their_last_reader(nothing_watched):
    w = torch.randn(4, 4)

    def function(x):
        for _ in range(4):
            x = look((x @ w).tanh())
        return x

    x = torch.randn(3, 4, requires_grad=True)
    compiled(function, options={"recompute": False})(x).sum().backward()
    # forward: the results of tanh, which are saved; backward: those whose gradient is still to come
    assert _alive == [0, 1, 2, 3] + [4, 3, 2, 1]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_arguments_live_until_their_last_reader(nothing_watched, in_pieces):
    def function(x):
        y = (x.exp() + 1) * 2
        if in_pieces:
            torch.ops.tsfuser_tests.add_one_(y)
        return look(y)

    program = compile_graph(make_fx(function, tracing_mode="fake")(torch.randn(3)), Settings())
    args = [torch.randn(3)]
    _watched.append(StorageWeakRef(args[0].untyped_storage()))
    program(args)
    assert args == [] and _alive == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["encoder", "residual", "unet"])
def test_the_peak_of_a_training_step_is_no_higher_than_inductors(name):
    make_model, make_input = MODELS[name]
    x = make_input(256 if name == "encoder" else 64).cuda()
    peaks = []
    for backend in ("tsfuser", "inductor"):
        torch._dynamo.reset()
        function = torch.compile(make_model().cuda(), backend=backend)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            function(x.clone().requires_grad_()).square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] <= 1.02 * peaks[1]


def test_errors_name_the_line_of_the_program():
    def function(x, at):
        y = x.exp() + 1
        return torch.index_select(y, 0, at) * 2  # the line that is wrong

    look_up = compiled(function)
    look_up(torch.ones(3), torch.tensor([0, 2]))
    with pytest.raises(Exception, match=r"test_torch_compile\.py(.|\n)*the line that is wrong"):
        look_up(torch.ones(3), torch.tensor([0, 5]))


def test_random_programs(place):
    """`python -m kit.random_compiled` runs more of them."""
    count, failed = sweep(range(8), place)
    assert count > 4 and not failed, failed
    assert tsfuser.stats()["launches"] > 0


@pytest.mark.parametrize("op", [torch.sub, torch.add, torch.mul])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_a_number_before_the_tensor_joins_its_group(op, dtype):
    """ATen's `sub(2, x)`, which tracing by torch leaves as it is, has its number behind in the op table."""

    def function(x):
        return op(2, x) * op(0.5, x)

    x = torch.randn(4, 8).mul(8).to(dtype)
    program = compile_graph(make_fx(function, tracing_mode="fake")(x), Settings())
    tsfuser.reset()
    result = program([x])
    assert_matches(result[0] if isinstance(result, tuple) else result, function(x), ops=8)
    assert tsfuser.stats()["launches"] == 1
