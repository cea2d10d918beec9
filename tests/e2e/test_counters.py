"""What batch norms count and check, in training: the counters that are added to at the end of a graph
(csrc_stubs/torchscript/deferred_counts.cpp), and the checks of batches that are ops (batch_checks.cpp)."""

import contextlib
import copy

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs

pytestmark = pytest.mark.graphs

SIZES = (2, 3, 4, 5)


class Block(torch.nn.Module):
    """Two batch norms side by side, as where a residual network halves its images; in double, since gradients
    of batch norms of few values are small differences of large numbers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = torch.nn.Conv2d(3, 3, 1, bias=False), torch.nn.BatchNorm2d(3)
        self.conv2, self.norm2 = torch.nn.Conv2d(3, 3, 1, bias=False), torch.nn.BatchNorm2d(3)

    def forward(self, x):
        a = self.norm1(self.conv1(x))
        return torch.relu(a + self.norm2(self.conv2(x)))


class Shared(Block):
    """One batch norm, twice."""

    def __init__(self):
        super().__init__()
        self.norm2 = self.norm1


class Reading(Block):
    def forward(self, x):
        a = self.norm1(self.conv1(x))
        return torch.relu(a + self.norm2(self.conv2(x))) * self.norm1.num_batches_tracked


class Aliased(Block):
    """The counter is read by another name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", self.norm1.num_batches_tracked)

    def forward(self, x):
        a = self.norm1(self.conv1(x))
        return torch.relu(a + self.norm2(self.conv2(x))) * self.seen


class Given(Block):
    """The counter is an argument."""

    def forward(self, x, counter):
        a = self.norm1(self.conv1(x))
        return torch.relu(a + self.norm2(self.conv2(x))) * counter


seen = []


@torch.jit.ignore
def look(x: torch.Tensor) -> torch.Tensor:
    """Reads the counters of `Watched`, which is no operand."""
    seen.append([n.item() for n in Watched.counters])
    return x


class Watched(Block):
    counters = []

    def forward(self, x):
        a = look(self.norm1(self.conv1(x)))
        return torch.relu(a + self.norm2(self.conv2(x)))


class Cumulative(Block):
    def __init__(self):
        super().__init__()
        self.norm1.momentum = None


class Shrinking(Block):
    """The second batch norm gets fewer values than the first."""

    def forward(self, x):
        a = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(a.mean([2, 3], True))))


class Deeper(Shared):
    """What the batch norms' convolutions read is computed: their order does not matter."""

    def forward(self, x):
        x = self.conv1(x)
        a = self.norm1(self.conv1(x))
        return torch.relu(a + self.norm2(self.conv2(x)))


class Branching(Block):
    """As blocks of ShuffleNet and DenseNet: how a module is made decides what runs."""

    def __init__(self):
        super().__init__()
        self.stride, self.deep = 1, False

    def forward(self, x):
        if self.stride == 1:
            a = self.norm1(self.conv1(x))
            if self.deep:
                a = self.norm2(self.conv2(a))
        else:
            a = self.norm2(self.conv2(x))
        return torch.relu(a) + torch.sigmoid(a)


class Repeated(Block):
    """One batch norm, twice; torch computes the result of the first after the second's, if it may."""

    def forward(self, x):
        a = self.norm1(x)
        return torch.sum(torch.relu(self.norm1(x + 1.0))) + a.view(-1)


class RepeatedInBranch(Branching):
    def forward(self, x):
        if self.stride == 1:
            a = self.norm1(x)
            a = torch.sum(torch.relu(self.norm1(x + 1.0))) + a.view(-1)
        else:
            a = x
        return a


class Raising(Block):
    """An error between the question whether to count and the count."""

    def forward(self, x, parts: int):
        norm, other = self.norm1, self.norm2
        norm.num_batches_tracked.add_(1)
        y = torch.relu(x)
        if self.training:
            y = y.view(parts, -1) * 2.0
            other.num_batches_tracked.add_(1)
        return y


def nodes(scripted, kind):
    return [n for graph in all_graphs(scripted) for n in graph.findAllNodes(kind, True)]


def pair(kind, device):
    torch.manual_seed(0)
    made = kind().to(device, torch.float64)
    module, other = copy.deepcopy(made), copy.deepcopy(made)  # a copy's versions may start elsewhere
    if kind is Aliased:
        assert other.seen is other.norm1.num_batches_tracked
    return module, torch.jit.script(other)


def arguments(module, x):
    return (x, module.norm1.num_batches_tracked) if isinstance(module, Given) else (x,)


def counter(module):
    return module.norm1.num_batches_tracked


def step(module, arguments):
    module.zero_grad()
    result = module(*arguments)
    result.square().sum().backward()
    return result.detach(), [p.grad for p in module.parameters() if p.grad is not None]


def assert_same_state(scripted, module):
    for (name, actual), expected in zip(scripted.named_buffers(), module.buffers()):
        torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")
        if actual.dtype == torch.int64:
            assert actual._version == expected._version, name


def train(kind, device, calls=6):
    module, scripted = pair(kind, device)
    for _ in range(calls):
        x = torch.randn(SIZES, device=device, dtype=torch.float64)
        expected = step(module, arguments(module, x))
        given = (x, counter(scripted)) if kind is Given else (x,)
        with tsfuser.fuser():
            actual = step(scripted, given)
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
        assert_same_state(scripted, module)
    return module, scripted


def test_counters_are_added_to_together(device):
    _, scripted = train(Block, device)
    assert len(nodes(scripted, "tsfuser::count")) == 2 and len(nodes(scripted, "tsfuser::add_counts")) == 1
    assert not nodes(scripted, "aten::add_")


def test_checks_of_batches_are_ops(device):
    _, scripted = train(Block, device)
    assert len(nodes(scripted, "tsfuser::checked_batch")) == 2
    assert not nodes(scripted, "prim::RaiseException")


@pytest.mark.usefixtures("kept_branches")
def test_counters_in_branches_are_added_to_together(device):
    module, scripted = train(Branching, device)
    assert len(nodes(scripted, "tsfuser::count")) == 3 and len(nodes(scripted, "tsfuser::add_counts")) == 1
    assert not nodes(scripted, "aten::add_")
    for stride, deep, training in ((2, False, True), (1, True, True), (1, True, False), (2, True, True)):
        x = torch.randn(SIZES, device=device, dtype=torch.float64)
        for each in (module, scripted):
            each.stride, each.deep = stride, deep
            each.train(training)
        with tsfuser.fuser():
            actual = step(scripted, (x,))
        torch.testing.assert_close(actual, step(module, (x,)), rtol=1e-7, atol=1e-9)
        assert_same_state(scripted, module)


def test_a_module_that_counts_twice(device):
    _, scripted = train(Shared, device)
    assert counter(scripted).item() == 12


@pytest.mark.parametrize("kind", [Reading, Aliased, Cumulative])
def test_counters_that_the_program_reads_are_added_to_at_once(kind):
    _, scripted = train(kind, "cpu")
    assert not nodes(scripted, "tsfuser::count") and nodes(scripted, "aten::add_")


def test_counters_that_python_reads_are_added_to_at_once():
    module, scripted = pair(Watched, "cpu")
    for each in (module, scripted):
        Watched.counters = [each.norm1.num_batches_tracked, each.norm2.num_batches_tracked]
        seen.clear()
        with tsfuser.fuser():
            for _ in range(3):
                each(torch.randn(SIZES, dtype=torch.float64))
        assert seen == [[1, 0], [2, 1], [3, 2]]


def test_a_counter_that_is_an_argument_is_added_to_at_once(device):
    _, scripted = train(Given, device)
    assert nodes(scripted, "tsfuser::count")


def test_evaluation_counts_nothing(device):
    module, scripted = train(Block, device)
    module.eval(), scripted.eval()
    x = torch.randn(1, 3, 1, 1, device=device, dtype=torch.float64)
    with tsfuser.fuser():
        for _ in range(4):
            torch.testing.assert_close(scripted(x), module(x), rtol=1e-7, atol=1e-9)
    assert_same_state(scripted, module)
    module.train(), scripted.train()
    x = torch.randn(SIZES, device=device, dtype=torch.float64)
    with tsfuser.fuser():
        torch.testing.assert_close(scripted(x), module(x), rtol=1e-7, atol=1e-9)
    assert_same_state(scripted, module)


def test_norms_side_by_side_are_one_group_without_gradients(device):
    """Nothing between them has to stay there: neither what reads the module, nor what is counted. They are
    one module here: in calls that train, the second one sees the statistics that the first one leaves."""
    module, scripted = pair(Deeper, device)
    for k in range(6):
        x = torch.randn(SIZES, device=device, dtype=torch.float64)
        with torch.no_grad(), tsfuser.fuser():
            torch.testing.assert_close(scripted.train(k > 3)(x), module.train(k > 3)(x))
        assert_same_state(scripted, module)
    group = nodes(scripted, "prim::CudaFusionGroup")[0].g("Subgraph")
    assert len(group.findAllNodes("aten::batch_norm")) == 2


@pytest.mark.parametrize("kind", [Repeated, RepeatedInBranch])
def test_calls_of_one_norm_stay_in_order(kind, device):
    train(kind, device)


def test_nothing_is_counted_behind_an_error(device):
    module, scripted = pair(Raising, device)
    x = torch.randn(SIZES, device=device, dtype=torch.float64)
    for parts in (2, 2, 2, 7):
        for each in (module, scripted):
            with tsfuser.fuser(), contextlib.suppress(RuntimeError):
                each(x, parts)
    assert_same_state(scripted, module)


def test_what_was_counted_before_an_error_is_counted(device):
    module, scripted = train(Shrinking, device)
    assert nodes(scripted, "tsfuser::checked_batch") or by_joint_graphs()
    one = torch.randn(1, 3, 4, 5, device=device, dtype=torch.float64)
    message = r"Expected more than 1 value per channel when training, got input size"
    with pytest.raises(ValueError, match=message):
        module(one)
    with pytest.raises(torch.jit.Error, match=rf"builtins.ValueError: {message} \[1, 3, 1, 1\]"):
        with tsfuser.fuser():
            scripted(one)
    assert_same_state(scripted, module)


def test_counters_under_inference_mode(device):
    module, scripted = train(Block, device)
    x = torch.randn(SIZES, device=device, dtype=torch.float64)
    with torch.inference_mode(), tsfuser.fuser():
        for _ in range(3):
            torch.testing.assert_close(scripted(x), module(x), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(counter(scripted), counter(module))
