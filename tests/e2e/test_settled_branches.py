"""Branches that follow from the sizes and attributes of a call: functions that have them run as a function
without branches for each way that calls go."""

import copy
import textwrap
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tsfuser
from kit.opsweep import plain
from kit.support import CALLS, all_graphs, counted, groups, kinds, run_python, script, train
from tsfuser import _C
from tsfuser.debug.plans import plans_of

pytestmark = [pytest.mark.graphs, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]


class Shifting(torch.nn.Module):
    """What windows of images do: it rolls by a list that sizes change, where that says so."""

    def __init__(self, shift=(2, 1), scaled=True):
        super().__init__()
        self.shift = list(shift)
        self.scaled = scaled
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0, 1.5]))

    def forward(self, x):
        y = torch.tanh(x * 2)
        shift = self.shift.copy()
        if x.size(0) <= 4:
            shift[0] = 0
        if sum(shift) > 1:
            y = torch.roll(y, [shift[0]], [0])
        if self.scaled:
            y = y * self.scale + 1
        return torch.sigmoid(y * 3)


def branches(graphs):
    """Those that the program has: of a guard, no block has the program's nodes."""
    return [
        node
        for graph in graphs
        for node in graph.findAllNodes("prim::If", True)
        if not node.inputsAt(0).node().kind().startswith(("prim::CudaFusionGuard", "prim::RequiresGradCheck"))
    ]


def compare(scripted, module, *inputs):
    for _ in range(CALLS):
        torch.testing.assert_close(scripted(*inputs), module(*inputs))


def scripted_anew(module):
    """Torch shares the functions of a class between its modules; this one begins without copies."""
    scripted = torch.jit.script(module)
    scripted._c._get_method("forward")._debug_flush_compilation_cache()
    return scripted


def test_a_function_is_one_group_where_its_branches_follow(device):
    module = Shifting().to(device)
    scripted = scripted_anew(module)
    with tsfuser.fuser(), torch.no_grad():
        compare(scripted, module, torch.randn(8, 3, device=device))
        (group,) = groups(scripted)
        assert {"aten::tanh", "aten::roll", "aten::sigmoid"} <= set(kinds(group))
        assert not branches(all_graphs(scripted))


def test_each_way_has_a_function_and_new_sizes_share_it(device):
    module = Shifting().to(device)
    scripted = scripted_anew(module)
    with tsfuser.fuser(), torch.no_grad():
        for rows in (8, 3, 5, 9, 4, 8, 3, 11):
            compare(scripted, module, torch.randn(rows, 3, device=device))
        assert len(groups(scripted)) == 2
        compiled = tsfuser.stats()["kernels_compiled"]
        compare(scripted, module, torch.randn(21, 3, device=device))
        assert tsfuser.stats()["kernels_compiled"] == compiled


def test_attributes_may_change_between_calls(device):
    module = Shifting().to(device)
    scripted = torch.jit.script(module)
    x = torch.randn(8, 3, device=device)
    with tsfuser.fuser(), torch.no_grad():
        compare(scripted, module, x)
        for shift, scaled in (([0, 0], True), ([0, 0], False), ([3, 0], False), ([2, 1], True)):
            for each in (module, scripted):
                each.shift, each.scaled = shift, scaled
            compare(scripted, module, x)


def test_two_modules_of_a_class_go_their_own_ways(device):
    modules = [Shifting((k, 0), k % 2 == 0).to(device) for k in range(4)]
    scripted = [torch.jit.script(module) for module in modules]
    x = torch.randn(8, 3, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(CALLS):
            for one, other in zip(scripted, modules):
                torch.testing.assert_close(one(x), other(x))


def test_more_ways_than_functions_are_kept(device):
    def ways(x, n: int):
        for k in range(2):
            x = x + k
        y = x * 2
        if n & 1 > 0:
            y = torch.relu(y)
        if n & 2 > 0:
            y = torch.tanh(y)
        if n & 4 > 0:
            y = y + 1
        if n & 8 > 0:
            y = torch.sigmoid(y)
        return y * x

    scripted = torch.jit.script(ways)
    x = torch.randn(5, 7, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(3):
            for n in range(16):
                compare(scripted, ways, x, n)


def test_training_has_copies_of_its_own(device):
    module = type("Own", (Shifting,), {})().to(device)  # shares its graphs with no other test's
    scripted = torch.jit.script(module)
    with tsfuser.fuser():
        for rows in (8, 3, 9, 8):
            x = torch.randn(rows, 3, device=device, requires_grad=True)
            with torch.no_grad():
                compare(scripted, module, x)
            y, (dx,) = train(scripted, (x,))
            expected, (de,) = train(module, (x,), calls=1)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(dx, de)
    plans = list(plans_of(scripted.get_debug_state()))
    graphs = [plan.graph for plan in plans]
    assert not branches(graphs) and len(graphs) == 4  # rolled or not, trained or not
    graphs += [graph for plan in plans for graph in _C.joint_graphs(plan.code)]
    assert any(graph.findNode("prim::DifferentiableGraph") for graph in graphs)


def test_what_depends_on_elements_is_asked_in_each_call(device):
    def gated(x, limit: float):
        y = torch.exp(x)
        if x.size(0) > 2:
            y = y + 1
        if bool(x.sum() > 0):
            y = torch.relu(y - 1.5)
        if limit > float(x[0, 0]):
            y = -y
        return y * 2

    scripted = torch.jit.script(gated)
    with tsfuser.fuser(), torch.no_grad():
        for sign in (1, -1, 1, -1, -1, 1, -1, 1):
            x = torch.rand(5, 4, device=device) * sign
            torch.testing.assert_close(scripted(x, 0.0), gated(x, 0.0))
            torch.testing.assert_close(scripted(x, 0.5), gated(x, 0.5))


UNKNOWN = {
    "an element decides how long a list is": """
        def f(x, n: int):
            sizes = [n]
            if bool(x.sum() > 0):
                sizes.append(n)
            y = torch.exp(x)
            if len(sizes) > 1:
                y = y + 1
            return y * 2
    """,
    "the list of an argument is written to": """
        def f(x, n: int, given: List[int] = [1, 2]):
            other = given
            if bool(x.sum() > 0):
                other.append(3)
            y = torch.exp(x)
            if len(given) > 2:
                y = y + 1
            other.clear()
            other.append(1)
            other.append(2)
            return y * 2
    """,
    "a size depends on elements": """
        def f(x, n: int):
            chosen = x[x > 0]
            y = torch.exp(x)
            if chosen.size(0) > 3:
                y = y + 1
            return y * 2
    """,
    "a size depends on elements, through a list": """
        def f(x, n: int):
            parts = [torch.nonzero(x > 0)]
            y = torch.exp(x)
            if torch.cat(parts).size(0) > 5:
                y = y + 1
            return y * 2
    """,
    "a loop runs as often as an element says": """
        def f(x, n: int):
            k = 0
            while k < int((x > 0).sum()) - 4:
                k += 3
            y = torch.exp(x)
            if k > 2:
                y = y + 1
            return y * 2
    """,
    "a dtype decides how long a range is": """
        def f(x, n: int):
            z = x
            if bool(x.sum() > 0):
                z = x.long()
            r = torch.arange(0, 2.5, 1, dtype=z.dtype)
            y = torch.exp(x)
            if r.size(0) > 2:
                y = y + 1
            return y * 2
    """,
    "a question about a device decides whether a dim stays": """
        def f(x, n: int):
            z = x
            if bool(x.sum() > 0):
                z = torch.empty(1, device="meta")
            y = torch.exp(x)
            if torch.sum(x, [0], z.is_cpu).dim() > 1:
                y = y + 1
            return y * 2
    """,
    "a dtype is taken for a size": """
        def f(x, n: int):
            z = x
            if bool(x.sum() > 0):
                z = x.double()
            y = torch.exp(x)
            if torch.eye(z.dtype).size(0) > 6:
                y = y + 1
            return y * 2
    """,
    "tensors of a list get other sizes": """
        def f(x, n: int):
            w = x.new_zeros(0)
            made = [w]
            if bool(x.sum() > 0):
                torch._foreach_abs([x], out=made)
            y = torch.exp(x)
            if w.dim() > 1:
                y = y + 1
            return y * 2 + made[0].sum()
    """,
    "a tensor gets other sizes in place": """
        def f(x, n: int):
            z = torch.zeros(2, n)
            if bool(x.sum() > 0):
                z.resize_(3, n)
            y = torch.exp(x)
            if z.size(0) > 2:
                y = y + 1
            return y * 2
    """,
}


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN)
def test_no_such_branch_is_settled(device, text):
    plain, scripted = script(textwrap.dedent(text)), script(textwrap.dedent(text))
    with torch.no_grad():
        for k in range(10):
            torch.manual_seed(k)
            x = torch.rand(3, 4, device=device) - (0.2 + 0.6 * (k % 2))
            with torch.jit.fuser("none"):
                expected = plain(x, 3)
            with tsfuser.fuser():
                torch.testing.assert_close(scripted(x, 3), expected)


def test_a_dtype_of_an_argument_decides_how_long_a_range_is(device):
    def ranged(x, like):
        z = x.to(like.dtype)
        r = torch.arange(0, 2.5, 1, dtype=z.dtype)
        y = torch.exp(x)
        if r.size(0) > 2:
            y = y + 1
        return y * 2

    scripted = torch.jit.script(ranged)
    x = torch.randn(3, 4, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for dtype in (torch.float32, torch.int64) * CALLS:
            like = torch.zeros(1, dtype=dtype)
            torch.testing.assert_close(scripted(x, like), ranged(x, like))


def test_arguments_on_another_device_of_one_kind(device):
    def together(x, v, w):
        y = torch.exp(x)
        if v.device == w.device:
            y = y + 1
        return y * 2

    class Elsewhere(torch.Tensor):  # such a device need not be there
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    first, second = (
        torch.Tensor._make_wrapper_subclass(Elsewhere, (2,), dtype=torch.float32, device=f"cuda:{k}")
        for k in (0, 1)
    )
    scripted = torch.jit.script(together)
    x = torch.randn(3, 4, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for other in (first, second) * CALLS:
            torch.testing.assert_close(scripted(x, first, other), together(x, first, other))


def test_what_waits_for_another_thread_gives_its_own_back(tmp_path):
    source = """
import torch, tsfuser
torch.set_num_interop_threads(1)
@torch.jit.script
def slow(x):
    for i in range(3):
        x = torch.tanh(x)
    return x
@torch.jit.script
def inner(x):
    return torch.jit.wait(torch.jit.fork(slow, x)) + 1
@torch.jit.script
def waits(x, future: torch.jit.Future[torch.Tensor], n: int):
    y = torch.exp(x)
    if n > 2:
        y = torch.relu(y) + 1
    return y * 2 * torch.jit.wait(future)
class Forks(torch.nn.Module):
    def forward(self, x, n: int):
        future = torch.jit.fork(inner, x)
        return torch.jit.wait(torch.jit.fork(waits, x, future, n))
module = torch.jit.script(Forks())
with tsfuser.fuser(), torch.no_grad():
    for k in range(8):
        module(torch.ones(3, 4), k % 2 * 3)
print("done")
"""
    assert run_python(tmp_path, source, timeout=120)[:2] == (0, "done\n")


def test_two_arguments_may_be_one_tensor(device):
    def same(x, y):
        z = torch.exp(x)
        if x is y:
            z = z + 1
        return z * 2

    scripted = torch.jit.script(same)
    x = torch.randn(3, 4, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for other in (x, x.clone()) * CALLS:
            torch.testing.assert_close(scripted(x, other), same(x, other))


class Checked(nn.Module):
    """Its branches look at how many dims there are, and its checks at sizes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor, other: Optional[Tensor] = None):
        h = F.dropout(torch.tanh(self.linear(x)), 0.0, self.training)
        if other is not None:
            h = h * other
        h.mul_(2.0)
        if h.dim() == 3:
            h = h.transpose(1, 2)
        if len(h.shape) == 2:
            h = self.norm(h)
        else:
            assert h.size(2) != 5, "five"
            h = torch.sigmoid(self.norm(h)) * h
        return torch.relu(h) + 1.0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("joint_graphs")
def test_the_first_call_of_a_size_is_fused_where_only_dims_are_counted(training):
    module = Checked().train(training)
    scripted = scripted_anew(copy.deepcopy(module))
    with tsfuser.fuser(), torch.set_grad_enabled(training):
        for size in [(8, 16)] * 4 + [(4, 8, 16)] * 4:
            compare(scripted, module, torch.randn(size))
        for size in (24, 16), (4, 16, 16), (12, 24, 16), (4, 16):  # each as wide accesses as before
            x = torch.randn(size)
            with counted() as rise:
                found = scripted(x)
            torch.testing.assert_close(found, module(x))
            assert rise["launches"]
        for size in (9, 16), (4, 7, 16):
            compare(scripted, module, torch.randn(size), torch.randn(size))
        for f in scripted, module:
            with pytest.raises(Exception, match="five"):
                f(torch.randn(4, 5, 16))
            if training:
                with pytest.raises(Exception, match="more than 1 value per channel"):
                    f(torch.randn(1, 16))


@pytest.mark.usefixtures("joint_graphs")
@pytest.mark.parametrize("check", ["h.dim() > 1", "h.size(1) > 1"])
def test_a_check_parts_no_region(check):
    """One of dims is settled. One of sizes stays, as each call with others would run the graph as it is; it
    looks at those of the operand."""
    text = f"""def f(x):
    h = torch.exp(x) * x
    h = torch.sin(h) + h
    assert {check}, "too few"
    return torch.cos(h) * h
"""
    scripted, eager = script(text), plain(text)
    with tsfuser.fuser():
        for rows in (3, 3, 3, 3, 4, 5):
            x = torch.rand(rows, 4).requires_grad_()
            torch.testing.assert_close(scripted(x), eager(x))
    (plan,) = plans_of(scripted.get_debug_state())
    assert len(_C.joint_graphs(plan.code)) == 1
    with pytest.raises(Exception, match="too few"), tsfuser.fuser():
        scripted(torch.rand(3).requires_grad_() if "dim" in check else torch.rand(3, 1).requires_grad_())


@pytest.mark.parametrize(
    "parameters, text, choices",
    [
        ("x, how: str", "torch.einsum(how, [x])", ["ij->i", "ij->ji", "ij->"]),
        ("x, how: List[int]", "torch.tensordot(x, x, dims=(how, how))", [[0], [0, 1], [1]]),
    ],
)
def test_how_many_dims_a_product_has_may_depend_on_more(device, parameters, text, choices):
    source = f"""def f({parameters}):
    y = {text}
    if y.dim() == 1:
        return torch.exp(y) * 2
    if y.dim() == 2:
        return torch.sin(y) + 1
    return torch.cos(y) * 3
"""
    scripted, eager = script(source), plain(source)
    with tsfuser.fuser(), torch.no_grad():
        for how in choices * 4:
            x = torch.rand(3, 3, device=device)
            torch.testing.assert_close(scripted(x, how), eager(x, how))


@pytest.mark.parametrize("text", ["x.squeeze(1)", "x.sum(1).squeeze()", "x[:, : x.size(1)].squeeze(1)"])
def test_how_many_dims_are_left_may_depend_on_sizes(device, text):
    source = f"""def f(x):
    y = {text}
    if y.dim() == 1:
        return torch.exp(y) * 2
    return torch.sin(y) + 1
"""
    scripted, eager = script(source), plain(source)
    with tsfuser.fuser(), torch.no_grad():
        for size in [(8, 3), (8, 1), (8, 3), (1, 1), (8, 1), (7, 1), (7, 2), (1, 3)] * 3:
            x = torch.rand(size, device=device)
            torch.testing.assert_close(scripted(x), eager(x))


def test_an_error_of_a_call_is_raised_and_not_remembered(device):
    def checked(x, n: int):
        y = torch.exp(x)
        if n == 0:
            raise ValueError("n is 0")
        if x.size(1) == 4:
            y = y + torch.ones(n, device=x.device)
        return y * 2

    scripted = torch.jit.script(checked)
    x = torch.randn(3, 4, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(CALLS):
            with pytest.raises(torch.jit.Error, match="n is 0"):
                scripted(x, 0)
            with pytest.raises(RuntimeError, match="size of tensor"):
                scripted(x, 3)
            torch.testing.assert_close(scripted(x, 4), checked(x, 4))


def test_a_lookup_by_a_buffer_is_followed_but_not_by_a_mask(device):
    class Table(torch.nn.Module):
        def __init__(self, index):
            super().__init__()
            self.register_buffer("index", index)

        def forward(self, x):
            y = torch.exp(x)[self.index]
            if y.size(0) > 3:
                y = y + 1
            return y * 2

    x = torch.randn(6, 4, device=device)
    for index in (torch.tensor([0, 3, 2, 2, 1]), torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool)):
        module = Table(index).to(device)
        scripted = torch.jit.script(module)
        with tsfuser.fuser(), torch.no_grad():
            compare(scripted, module, x)
            if index.dtype == torch.bool:
                for each in (module, scripted):
                    each.index = ~each.index
                compare(scripted, module, x)
                for each in (module, scripted):
                    each.index = torch.ones_like(each.index)
                compare(scripted, module, x)


def test_random_numbers_are_drawn_once(device):
    """What comes first in a program runs twice in its first call, unless it draws numbers, or writes."""

    def noisy(x):
        y = torch.dropout(x, 0.5, True)
        if x.size(0) > 2:
            y = torch.relu(y) + 1
        return y * 2

    def written(x):
        x.add_(1)
        y = x * 2
        if x.size(0) > 2:
            y = torch.relu(y) + 1
        return y * 2

    x = torch.randn(4, 5, device=device)
    with tsfuser.fuser(), torch.no_grad():
        scripted, plain = torch.jit.script(noisy), noisy
        torch.manual_seed(3)
        found = scripted(x)
        torch.manual_seed(3)
        torch.testing.assert_close(found, plain(x))
        scripted = torch.jit.script(written)
        for _ in range(CALLS):
            one, other = x.clone(), x.clone()
            torch.testing.assert_close(scripted(one), written(other))
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_statistics_that_come_first_are_updated_once(device, norm):
    source = f"""
def f(x, mean, var):
    y = torch.{norm}(x, None, None, mean, var, True, 0.1, 1e-5, False)
    if x.size(0) > 2:
        y = torch.relu(y) + 1
    return y * 2
"""
    scripted, plain = script(source), script(source)
    x = torch.randn(4, 3, 5, device=device)
    ours, theirs = [[torch.zeros(3, device=device), torch.ones(3, device=device)] for _ in range(2)]
    with torch.no_grad():
        for _ in range(CALLS):
            with torch.jit.fuser("none"):
                expected = plain(x, *theirs)
            with tsfuser.fuser():
                torch.testing.assert_close(scripted(x, *ours), expected)
            torch.testing.assert_close(ours, theirs)


STATISTICS = """
def f(x, w, mean, var):
    n = 1
    for i in range(x.dim()):
        n *= x.size(i)
    y = torch.{norm}(x.reshape(2, -1, 3), None, None, mean, var, True, 0.5, 0.1, False)
    y = y.flatten(1) if y.requires_grad else y.contiguous()
    if n == 30:
        z = y * 2
    else:
        z = x * w
    return z * 2, n
"""


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_statistics_are_updated_where_nobody_reads_the_result(norm, gradients, device):
    """torch drops such a norm when it unrolls the loop, and none in a function whose branch it keeps."""
    scripted = script(STATISTICS.format(norm=norm))
    w = torch.ones(3, device=device, requires_grad=gradients)
    with tsfuser.fuser():
        for x in (torch.randn(2, 5, 3, device=device), torch.randn(2, 5, 2, 3, device=device)):
            for _ in range(CALLS):
                statistics, expected = (
                    [f(x.numel() // 6, device=device) for f in (torch.zeros, torch.ones)] for _ in "ab"
                )
                scripted(x, w, *statistics)
                getattr(torch, norm)(x.reshape(2, -1, 3), None, None, *expected, True, 0.5, 0.1, False)
                for ours, eager in zip(statistics, expected):
                    assert not torch.equal(eager, torch.zeros_like(eager))
                    torch.testing.assert_close(ours, eager)


def test_torch_can_log_a_graph_that_has_them(tmp_path):
    """Its log prints each attribute of each node."""
    program = """
        import torch, tsfuser

        @torch.jit.script
        def f(x):
            if x.size(0) > 2:
                x = x * 2
            return torch.tanh(x) + 1

        with tsfuser.fuser():
            for _ in range(4):
                assert torch.equal(f(torch.zeros(3)), torch.ones(3))
    """
    level = ">>profiling_graph_executor_impl"
    status, _, log = run_python(tmp_path, textwrap.dedent(program), PYTORCH_JIT_LOG_LEVEL=level)
    assert status == 0, log[-2000:]
    assert "settled=" in log


def test_explain_tells_of_the_function_without_branches(device):
    found = tsfuser.explain(torch.jit.script(Shifting().to(device)).eval(), torch.randn(8, 3, device=device))
    assert "roll" in str(found) and "did not run" not in str(found)
    assert [len(graph.groups) for graph in found.graphs if graph.groups]


def test_the_general_function_serves_ever_new_facts(device):
    def counted(x, step: int):
        y = torch.exp(x)
        if step % 2 == 0:
            y = y + 1
        return torch.relu(y) * 2

    scripted = torch.jit.script(counted)
    x = torch.randn(3, 4, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for step in range(1200):
            if step % 50 < 2:
                torch.testing.assert_close(scripted(x, step), counted(x, step))
            else:
                scripted(x, step)
        assert len(list(plans_of(scripted.get_debug_state()))) == 1
        for step in (1198, 1199) * CALLS:
            torch.testing.assert_close(scripted(x, step), counted(x, step))
        assert len(list(plans_of(scripted.get_debug_state()))) == 3


def test_values_that_follow():
    graph = torch._C.parse_ir(
        """
        graph(%x : Tensor, %n : int, %list : int[]):
          %one : int = prim::Constant[value=1]()
          %none : NoneType = prim::Constant()
          %size : int = aten::size(%x, %one)
          %exp : Tensor = aten::exp(%x)
          %again : int = aten::size(%exp, %one)
          %positive : bool = aten::gt(%n, %one)
          %length : int = aten::len(%list)
          %sum : Tensor = aten::sum(%x, %none)
          %item : Scalar = aten::item(%sum)
          %places : Tensor = aten::nonzero(%x)
          %found : int = aten::size(%places, %one)
          %dtype : int = prim::dtype(%exp)
          %known : int = prim::dtype(%x)
          %absent : bool = aten::__is__(%x, %none)
          %same : bool = aten::__is__(%x, %exp)
          return (%size)
        """
    )
    names = _C.static_values(graph)
    nodes = [node for node in graph.nodes() if node.kind() != "prim::Constant"]
    unknown = [k for k, node in enumerate(nodes) if node.output().debugName() not in names]
    assert [nodes[k].kind() for k in unknown] == [
        *("aten::item", "aten::nonzero", "aten::size", "prim::dtype", "aten::__is__")
    ]
    assert unknown == [6, 7, 8, 9, 12]


def test_it_can_be_switched_off(tmp_path):
    source = """
import torch, tsfuser
from tsfuser import _C
def f(x):
    y = torch.exp(x)
    if x.size(0) > 2:
        y = torch.relu(y) + 1
    return y * 2
s = torch.jit.script(f)
with tsfuser.fuser(), torch.no_grad():
    for _ in range(4):
        s(torch.randn(3, 4))
(plan,) = s.get_debug_state().execution_plans.values()
print(_C.is_settled(plan.graph))
"""
    assert run_python(tmp_path, source)[:2] == (0, "True\n")
    switched_off = run_python(tmp_path, source, PYTORCH_NVFUSER_DISABLE="settled_branches")
    assert switched_off[:2] == (0, "False\n")


#: Where two ops compute the same once the branch is settled, and one result leaves through another construct.
EQUAL = {
    "a loop": "y = {equal}\n    for i in range(n):\n        y = y - c",
    "a branch": "y = {equal}\n    if bool((c > 9.0).any()):\n        y = y - c",
    "a loop, with other readers": "y = {equal}\n    z = y.sin()\n    for i in range(n):\n        y = y - z",
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("equal", ["c * s", "(c * s).sin() + 1.0", "torch.softmax(c, 0)"])
def test_equal_results_of_a_branch_and_of_what_follows_are_two_tensors(device, name, equal):
    text = (
        f"def f(c: Tensor, s: float, n: int):\n    if s < 0.0:\n        v = {equal}\n    else:\n"
        f"        v = c + s\n    {EQUAL[name].format(equal=equal)}\n    return v, y\n"
    )
    scripted = script(text)
    c = torch.rand(4, device=device)
    with tsfuser.fuser():
        for s in [-1.5] * 5 + [0.5] * 3 + [-1.5] * 2:
            v, y = scripted(c, s, 0)
            assert v.data_ptr() != y.data_ptr()
            if s < 0:  # one may be computed by a group
                torch.testing.assert_close(v, y)


class Dropping(torch.nn.Module):
    """A dropout whose rate is an attribute that may change, behind a branch."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.shift = [1, 0]

    def forward(self, x):
        y = torch.tanh(x * 2)
        if sum(self.shift) > 0:
            y = torch.roll(y, [self.shift[0]], [0])
        y = torch.nn.functional.dropout(torch.softmax(y, -1), self.rate, self.training)
        return torch.sigmoid(y * 3)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_dropout_of_rate_0_is_left_out(device, gradients, monkeypatch):
    """No number is drawn, and no mask is kept, as in eager; if the rate changes, it drops."""
    # else a module of another test hands on what was made for its rate
    monkeypatch.setattr(torch.jit._recursive, "concrete_type_store", torch.jit._recursive.ConcreteTypeStore())
    module = Dropping(0.0).to(device).train()
    scripted = torch.jit.script(module)
    x = torch.randn(64, 40, device=device, requires_grad=gradients)
    with tsfuser.fuser():
        for _ in range(CALLS + 2):
            state = torch.get_rng_state()
            found, expected = scripted(x), module(x)
            torch.testing.assert_close(found, expected)
            assert torch.equal(state, torch.get_rng_state())
            if gradients:
                mine, its = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
                torch.testing.assert_close(mine, its)
        assert not any("dropout" in kind for group in groups(scripted) for kind in kinds(group))
        for rate in (0.5, 1.0, 0.0, 0.5):
            scripted.rate = rate
            for _ in range(CALLS):
                dropped = (scripted(x) == 0.5).float().mean().item()
                assert abs(dropped - rate) < 0.1


def test_a_dropout_between_training_and_inference(device):
    """With a rate that is not 0: it drops in training only, whatever ran before."""
    module = Dropping(0.5).to(device)
    scripted = torch.jit.script(module)
    x = torch.randn(64, 40, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for training in (True, False, True, False):
            scripted.train(training)
            module.eval()
            for _ in range(CALLS):
                found, whole = scripted(x), module(x)
                if not training:
                    torch.testing.assert_close(found, whole)
                assert ((found == 0.5).float().mean().item() > 0.4) == training


def test_a_rate_that_eager_rejects(device):
    module = Dropping(0.0).to(device).train()
    scripted = torch.jit.script(module)
    x = torch.randn(8, 3, device=device)
    with tsfuser.fuser():
        compare(scripted, module, x)
        scripted.rate = 1.5
        with pytest.raises(Exception, match="probability"):
            scripted(x)


class DroppingInALoop(torch.nn.Module):
    """A dropout in a loop, whose branches are not settled, and one in a branch that is."""

    def __init__(self):
        super().__init__()
        self.rate = 0.0
        self.twice = True

    def forward(self, x, times: int):
        y = torch.tanh(x * 2)
        if self.twice:
            y = torch.nn.functional.dropout(y * 2, self.rate, self.training) + 1
        for _ in range(times):
            y = torch.nn.functional.dropout(torch.sigmoid(y), self.rate, self.training) * 3
        return y


def test_a_dropout_in_a_loop_gets_no_branch(device):
    module = DroppingInALoop().to(device).train()
    scripted = torch.jit.script(module)
    x = torch.randn(8, 3, device=device)
    with tsfuser.fuser(), torch.no_grad():
        for times in (1, 2, 3, 1, 2, 3):
            torch.testing.assert_close(scripted(x, times), module(x, times))
        inside = [str(branch) for branch in branches(all_graphs(scripted))]  # those that check the rate
        assert inside and not any("aten::dropout" in text for text in inside)
        scripted.rate = 1.0
        torch.testing.assert_close(scripted(x, 2), torch.zeros_like(x))


HIDDEN = {
    "dropout": "torch.nn.functional.dropout(y, 0.0, True)",
    "type_as": "y.type_as(x)",
    "einsum": 'torch.einsum("i->i", y)',
    "broadcast_tensors": "torch.broadcast_tensors(y, x)[0]",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_branch_stays_before_a_write_to_what_a_schema_hides(device, kind):
    """Without the branch torch's alias analysis, which takes the result for a new tensor, drops the write."""
    source = (
        "def f(x: Tensor, z: Tensor, s: float):\n"
        "    if s > 0:\n        y = x.clone()\n    else:\n        y = z\n"
        f"    a = {HIDDEN[kind]}\n    y.detach().add_(3)\n    return a * 1.0\n"
    )
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = script(source)
    x = torch.arange(4.0, device=device)
    with tsfuser.fuser():
        for s in [1.0] * CALLS + [-1.0]:
            given, expected = ([x.clone(), x.clone() + 10] for _ in range(2))
            assert torch.equal(scripted(*given, s), scope["f"](*expected, s))
            assert all(map(torch.equal, given, expected))
