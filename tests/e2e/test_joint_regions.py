"""Programs in which joint graphs differentiate regions: modules, branches, loops, views, calls of Python."""

import copy
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.support import fresh, script
from tsfuser import _C
from tsfuser.joint.packing import PACKED

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


def packed(scripted):
    """How many differentiable graphs were made of its regions."""
    state = scripted.get_debug_state()
    graphs = [g for plan in state.execution_plans.values() for g in _C.joint_graphs(plan.code)]
    return sum(len(graph.findAllNodes(PACKED, True)) for graph in graphs)


# ---- modules


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor):
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Images(nn.Module):
    """Running statistics, a counter, an op in place, checks of sizes, biases that are None."""

    def __init__(self):
        super().__init__()
        self.first, self.one = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor):
        h = F.relu(self.one(self.first(x)), inplace=True)
        h = F.relu(self.two(self.second(h)) + h)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, (1, 1)), 1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor):
        return self.head(self.layer(self.table(x)))


class Cells(nn.Module):
    """A loop, a list that grows, a branch on data."""

    def __init__(self):
        super().__init__()
        self.given, self.state = nn.Linear(3, 16), nn.Linear(4, 16)

    def forward(self, x: Tensor):
        h, c = torch.zeros(x.size(1), 4).to(x), torch.zeros(x.size(1), 4).to(x)
        states = []
        for step in range(x.size(0)):
            i, f, o, u = (self.given(x[step]) + self.state(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(c)
            if bool(h.sum() > 0):
                h = h * 0.5 + c.sin()
            states.append(h)
        return torch.stack(states)


MODULES = {
    Perceptron: lambda rows: torch.randn(rows, 6, dtype=torch.float64),
    Images: lambda rows: torch.randn(rows, 2, 5, 5, dtype=torch.float64),
    Words: lambda rows: torch.randint(7, (rows, 4)),
    Cells: lambda rows: torch.randn(rows, 2, 3, dtype=torch.float64),
}


def pair(kind, device="cpu"):
    torch.manual_seed(3)
    module = kind().to(device, torch.float64)
    return torch.jit.script(copy.deepcopy(module)), module


def step(module, optimizer, x):
    optimizer.zero_grad()
    loss = module(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same_state(one, other):
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_a_module_is_trained_as_in_eager(kind, device):
    """Losses, parameters, running statistics and counters, at sizes that change."""
    scripted, module = pair(kind, device)
    both = [(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)) for m in (scripted, module)]
    with tsfuser.fuser():
        for rows in (3, 3, 3, 3, 5, 3, 5, 5):
            x = MODULES[kind](rows).to(device)
            torch.testing.assert_close(*(step(m, o, x) for m, o in both))
            assert_same_state(scripted, module)
        assert packed(scripted)


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_modes_in_turn(kind):
    """Training, evaluation with and without gradients, and frozen parameters."""
    scripted, module = pair(kind)
    with tsfuser.fuser():
        for turn in range(12):
            x = MODULES[kind](3)
            for m in (scripted, module):
                m.train(turn % 3 != 1)
                next(m.parameters()).requires_grad_(turn % 4 < 2)
                m.zero_grad()
            with torch.set_grad_enabled(turn % 3 != 2):
                results = [m(x) for m in (scripted, module)]
            torch.testing.assert_close(*results)
            assert results[0].requires_grad == results[1].requires_grad
            if turn % 3 != 2:
                for result in results:
                    result.square().mean().backward()
                torch.testing.assert_close(
                    *([p.grad for p in m.parameters() if p.grad is not None] for m in (scripted, module))
                )
            assert_same_state(scripted, module)


def test_a_batch_norm_still_refuses_single_values():
    scripted, _ = pair(Images)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(MODULES[Images](3)).sum().backward()
        assert packed(scripted)
        with pytest.raises(Exception, match="Expected more than 1 value per channel"):
            scripted(torch.randn(1, 2, 1, 1, dtype=torch.float64))


# ---- functions


def branched(x: Tensor, w: Tensor, flag: bool, bias: Tensor | None):
    h = (x * w).tanh()
    if flag:
        h = h.sin() * x
    if bias is not None:
        h = (h + bias).exp()
    if bool(h.sum() > 1.0):
        h = (h * w).cos() * 2.0
    return h


def test_branches_on_flags_and_data():
    scripted = fresh(branched)
    x, w, b = (torch.linspace(-1, k, 6, dtype=torch.float64).requires_grad_() for k in (1, 2, 3))
    with tsfuser.fuser():
        for turn in range(12):
            given = (x if turn % 2 else x - 2.0, w, turn % 3 == 0, b if turn % 4 < 2 else None)
            found = []
            for function in (scripted, branched):
                result = function(*given)
                found.append((result.detach(), torch.autograd.grad(result.sum(), [x, w])))
            torch.testing.assert_close(*found)
        assert packed(scripted)


@torch.jit.ignore
def doubled(x: Tensor) -> Tensor:
    return torch.tensor(x.detach().tolist(), dtype=x.dtype, device=x.device) + x


def test_a_call_of_python_between_regions():
    def called(x: Tensor, w: Tensor):
        h = doubled((x * w).sin())
        return h.cos() * w

    scripted = fresh(called)
    x, w = (torch.linspace(-1, k, 6, dtype=torch.float64).requires_grad_() for k in (1, 2))
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, called):
                result = function(x, w)
                found.append((result.detach(), torch.autograd.grad(result.sum(), [x, w])))
            torch.testing.assert_close(*found)
        assert packed(scripted) == 2


def test_the_graph_that_ran_last_is_shown_with_all_regions():
    def called(x: Tensor, w: Tensor):
        h = doubled(torch.hypot(x, w).sin())
        return h.cos() * w

    scripted, w = fresh(called), torch.linspace(1, 2, 6)
    with tsfuser.fuser():
        for _ in range(4):
            for x in (torch.ones(6), torch.ones(6).requires_grad_()):
                scripted(x, w)
                last = torch.jit.last_executed_optimized_graph()
        assert len(last.findAllNodes(PACKED, True)) == len(scripted.graph_for(x, w).findAllNodes(PACKED)) == 2
        scripted(torch.ones(6), w)
        last = torch.jit.last_executed_optimized_graph()
    assert not last.findAllNodes(PACKED, True) and "aten::cos" in str(last)


# ---- results that share memory


def turned(x: Tensor, w: Tensor):
    return (x * w).sin().t()


def of_an_input(x: Tensor, w: Tensor):
    return x.view(-1), (x * w).sin()


def itself(x: Tensor, w: Tensor):
    h = (x * w).sin()
    return h, x, h


def parts(x: Tensor, w: Tensor):
    h = (x * w).sin()
    return h[0], h[1:], h.transpose(0, 1)


def pieces(x: Tensor, w: Tensor):
    first, second = (x * w).sin().chunk(2, 1)
    return first, second.cos()


def with_a_number(x: Tensor, w: Tensor):
    h = (x * w).sin()
    return h, h.size(0) + 1


def listed(x: Tensor, w: Tensor):
    h = (x * w).sin()
    return [h, h.t()]


VIEWS = [turned, of_an_input, itself, parts, pieces, with_a_number, listed]


def graded(function, write):
    """Results, gradients and views of a program, whose results are written to where `write` says so."""
    x, w = (torch.linspace(-1, k, 12, dtype=torch.float64).view(3, 4).requires_grad_() for k in (1, 2))
    results = function(x, w)
    results = results if isinstance(results, (tuple, list)) else (results,)
    tensors = [r for r in results if isinstance(r, Tensor)]
    loss = sum((r * torch.arange(r.numel()).view_as(r)).sum() for r in tensors)
    if write:
        tensors[0].mul_(2.0)
        loss = loss + sum(r.sin().sum() for r in tensors)
    bases = [r._base is not None for r in tensors]
    memory = [r.untyped_storage().data_ptr() for r in tensors]
    shares = [a == b for a in memory for b in memory]
    gradients = torch.autograd.grad(loss, [x, w])
    return [r.detach() if isinstance(r, Tensor) else r for r in results], gradients, bases, shares


@pytest.mark.parametrize("program", VIEWS, ids=lambda f: f.__name__)
def test_results_that_share_memory(program):
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(graded(scripted, False), graded(program, False))
        assert packed(scripted) == 1


@pytest.mark.parametrize("program", [turned, itself, parts], ids=lambda f: f.__name__)
def test_results_that_share_memory_and_are_written_to(program):
    """sin reads its operand in the backward, not its result."""
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(graded(scripted, True), graded(program, True))
        assert packed(scripted) == 1


# ---- autocast


def autocast_step(module, x, dtype):
    module.zero_grad()
    with torch.autocast(x.device.type, dtype):
        result = module(x)
    result.float().square().mean().backward()
    return result.detach(), [p.grad for p in module.parameters()]


@pytest.mark.parametrize("kind", [Perceptron, Images], ids=lambda k: k.__name__)
def test_autocast(kind, device):
    """With other dtypes in turn, and without it: torch writes one into the graph, with which it is packed."""
    torch.manual_seed(3)
    module = kind().to(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    with tsfuser.fuser():
        for turn in range(12):
            x = MODULES[kind](4).to(device, torch.float32)
            dtype = torch.float16 if turn % 6 == 5 and device == "cuda" else torch.bfloat16
            if turn % 4 == 3:
                torch.testing.assert_close(*(m(x) for m in (scripted, module)), rtol=1e-4, atol=1e-4)
                continue
            (got, mine), (want, theirs) = (autocast_step(m, x, dtype) for m in (scripted, module))
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)
        assert packed(scripted)


def test_a_group_norms_check_of_its_batch_parts_no_region():
    """It multiplies the items of a sum of lists in a loop."""
    module = nn.Sequential(nn.Tanh(), nn.GroupNorm(4, 4), nn.Tanh())
    scripted = torch.jit.script(copy.deepcopy(module))
    x = torch.randn(3, 4, 5, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            got, want = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (scripted, module))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.randn(1, 4, 1))
        with pytest.raises(torch.jit.Error, match="more than 1 value per channel"):
            scripted(torch.randn(1, 4, 1, requires_grad=True))
    assert packed(scripted) == 1


def test_a_bias_that_may_be_none_is_cast_in_the_region(device):
    """Torch writes no cast of it."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)).to(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    x = torch.randn(2, 3, 5, 5, device=device)
    with tsfuser.fuser():
        for _ in range(4):
            (got, mine), (want, theirs) = (autocast_step(m, x, torch.bfloat16) for m in (scripted, module))
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert packed(scripted) == 1


def test_questions_about_a_tensor_part_no_region():
    def noisy(x: Tensor, scale: Tensor):
        y = torch.sort(x, 0)[0] * scale
        ones = torch.ones([1], dtype=y.dtype, device=y.device)
        return torch.tanh(y * ones) * ones

    x, scale = torch.randn(6, 5).requires_grad_(), torch.rand(5).requires_grad_()
    scripted = fresh(noisy)
    with tsfuser.fuser():
        for _ in range(4):
            got = torch.autograd.grad(scripted(x, scale).sum(), (x, scale))
    torch.testing.assert_close(got, torch.autograd.grad(noisy(x, scale).sum(), (x, scale)))
    assert packed(scripted) == 1


def test_turns_of_a_loop_are_one_region():
    """The gradient of a weight is not added up turn by turn."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor):
            for _ in range(8):
                x = torch.tanh(self.inner(x)) * 0.5
            return x

    module, x = Turns(), torch.randn(3, 4)
    scripted = torch.jit.script(copy.deepcopy(module))
    with tsfuser.fuser():
        for _ in range(4):
            got, want = (
                torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (scripted, module)
            )
            torch.testing.assert_close(got, want)
        inner = [f for f, _ in scripted(x).grad_fn.next_functions if "Accumulate" not in f.name()]
    assert not inner


class Normed(nn.Module):
    """A norm's result is read by a product, and leaves the region."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 1), norm, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor):
        y = self.norm(self.first(x))
        return doubled(self.second(y).tanh()).sin() * y


@pytest.mark.parametrize("kind", [nn.BatchNorm2d(4), nn.LayerNorm(5)], ids=lambda m: type(m).__name__)
def test_a_norms_result_that_a_product_saves_may_leave_a_region(kind, device):
    torch.manual_seed(3)
    module = Normed(kind).to(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    scripted._c._get_method("forward")._debug_flush_compilation_cache()  # torch shares it by class
    with tsfuser.fuser():
        for _ in range(4):
            x = torch.randn(2, 2, 5, 5, device=device)
            got, want = (
                [y, *torch.autograd.grad(y.square().sum(), list(m.parameters()))]
                for m in (scripted, module)
                for y in [m(x)]
            )
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        assert packed(scripted) == 2


@pytest.mark.parametrize("gradients", [True, False])
def test_an_exception_tells_of_the_programs_function(gradients):
    text = """def program(x, n: int):
    y = torch.exp(x) * x
    y = torch.sin(y) + y
    assert n != 5, "five"
    return torch.cat([y, x * 2], n).cos()
"""
    scripted, x = script(text), torch.rand(3, 4).requires_grad_(gradients)
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x, 1)
        for n, said in (5, "five"), (7, "Dimension out of range"):
            with pytest.raises(Exception, match=said) as found:
                scripted(x, n)
            functions = set(re.findall(r", in ([^\s]+)", str(found.value)))
            assert functions and functions <= {"program", "tsfuser_unfused"}  # a group's fallback
    assert not gradients or packed(scripted)


class Padded(nn.Module):
    """Sizes that are parts of lists decide how a tensor is padded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor):
        h = torch.sin(self.first(x))
        height, width, _ = h.shape[-3:]
        rows = list(h.shape)
        h = F.pad(h, (0, 0, 0, width % 2, 0, height % 2, 0, rows[0] % 2))
        return self.second(h[..., 0::2, 0::2, :].cos())


@pytest.mark.parametrize("sizes", [(2, 5, 5, 3), (3, 4, 5, 3), (1, 1, 1, 3)])
def test_sizes_of_parts_of_lists_are_known(sizes, device):
    """Of values behind them, too, it is decided what autocast casts."""
    torch.manual_seed(3)
    module = Padded().to(device)
    scripted = torch.jit.script(copy.deepcopy(module))
    with tsfuser.fuser():
        for _ in range(4):
            x = torch.randn(sizes, device=device)
            (got, mine), (want, theirs) = (autocast_step(m, x, torch.bfloat16) for m in (scripted, module))
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert packed(scripted) == 1


def heads(x: Tensor, w: Tensor):
    """As `multi_head_attention_forward` in a trace: sizes are tensors, and ints are asked of them."""
    length, count, width = x.shape
    size = torch.div(width, 2, rounding_mode="trunc") if torch.jit.is_tracing() else width // 2
    y = torch.mm(x.reshape(-1, width), w).sin()
    y = y.view(length, count * 2, size).transpose(0, 1)
    return y.reshape(count, (2 * width) // 2, -1).cos() * ((length + 1) * 2 - 1)


def test_sizes_of_a_trace_part_no_region():
    x, w = torch.randn(5, 3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    traced = torch.jit.trace(heads, (x, w), check_trace=False)
    assert "aten::Int" in str(traced.graph)
    with tsfuser.fuser():
        for rows in (5, 5, 5, 5, 7, 1):
            given = torch.randn(rows, 3, 8, requires_grad=True), w
            got, want = (
                [y, *torch.autograd.grad(y.square().sum(), given)]
                for f in (traced, heads)
                for y in [f(*given)]
            )
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert packed(traced) == 1


UNREAD = {
    "at once": "return torch.tanh(x) * x.sin()",
    "behind a branch": "p = (-v, v) if n > 2 else (x, v.narrow(0, 0, 1))\n    return torch.tanh(p[0]) + p[0]",
    "in a dead branch": "p = (v * r, x) if n > 9 else (x, x)\n    return torch.tanh(p[1]) * x.exp()",
    "of its size": "return torch.tanh(x) * v.size(0)",
    "of a shape": "return torch.tanh(x).sum_to_size(v.exp().shape) * x",
    "of zeros": "return torch.tanh(x) + torch.zeros_like(v.sin()) * x",
    "of an expansion": "return (x.sum() * torch.tanh(x).mean()).expand_as(v.exp()) * x",
    "of a dtype": "return (x.sin() * torch.tanh(x)).type_as(v.exp())",
    "twice": "return torch.tanh(x) * v * NORM",
    "twice, once read": "w = NORM\n    return torch.tanh(x) * v * w.size(0)",
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("name", UNREAD)
def test_statistics_of_a_norm_that_nobody_reads_are_written(name, norm, training, device):
    norm = f"torch.nn.functional.{norm}(x, m, r, w, w, {training}, 0.25)"
    text = "def f(x: Tensor, m: Tensor, r: Tensor, w: Tensor, n: int):\n"
    text += f"    v = {norm}\n    {UNREAD[name].replace('NORM', norm)}\n"
    eager, scripted = {"torch": torch, "Tensor": Tensor}, torch.jit.CompilationUnit(text).f
    exec(text, eager)
    with tsfuser.fuser():
        for n in (2, 2, 2, 2, 3, 2):
            x, w = (torch.randn(sizes, device=device, requires_grad=True) for sizes in ((6, 1, 4), (1,)))
            mine, its = ([torch.ones(1, device=device) for _ in range(2)] for _ in range(2))
            got, want = scripted(x, *mine, w, n), eager["f"](x, *its, w, n)
            got, want = ([y, *torch.autograd.grad(y.sum(), x)] for y in (got, want))
            torch.testing.assert_close([*got, *mine], [*want, *its], rtol=1e-4, atol=1e-4)
