"""`tsfuser.explain` of parts of networks: autodiff, loops and modules in lines, reasons and drawings."""

import re

import pytest
import torch

import tsfuser
from kit import models
from kit.support import fresh
from tsfuser.debug.drawing import drawing
from tsfuser.debug.findings import GraphReport, Node
from tsfuser.debug.source import Place
from tsfuser.debug.table import duration

pytestmark = pytest.mark.graphs


class Read(torch.nn.Module):
    """A network, and a counter of a batch norm: what is read is not left for the end of the graph."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.norm = next(m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d))

    def forward(self, x):
        return self.network(x) * self.norm.num_batches_tracked


WAYS = ("forward", "backward")


def explained(name, device, training=True, wrapped=lambda module: module):
    module, inputs = models.build(name, "small", device)
    scripted = torch.jit.script(wrapped(module).train(training))
    inputs[0].requires_grad_(training)
    with torch.set_grad_enabled(training):
        return tsfuser.explain(scripted, *inputs)


def line_of(text):
    with open(models.__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_ops_in_a_branch_of_a_module_have_the_line_that_calls_it(device):
    """Torch forgets the callers of a node in an If without results, as of `num_batches_tracked.add_(1)`."""
    counts = [n for n in explained("resnet_basic", device, wrapped=Read).left_out if n.kind == "aten::add_"]
    assert {n.place.line for n in counts} == {line_of("out = self.layers(x)")}
    assert all(n.place.within.startswith("batchnorm.py:") for n in counts)


def test_an_op_that_autodiffs_formula_repeats_has_its_line_where_there_is_one(device):
    found = explained("resnet_basic", device)
    lines = {n.kind: n.place.line for g in found.graphs[1:] for x in g.groups for n in x.nodes}
    assert lines["aten::_batch_norm_impl_index"] == line_of("out = self.layers(x)")
    assert lines["aten::add"] == line_of("out += identity")
    assert lines["aten::relu"] in (0, line_of("return self.relu(out)"))  # there are two
    backward = [n.place.line for g in found.graphs[3:] for x in g.groups for n in x.nodes]
    assert backward and not any(backward)


def test_modules_and_the_ways_that_formulas_do_not_go_are_left_out(device):
    found = explained("encoder", device)
    assert "did not run" not in str(found) and all(
        n.kind.startswith(("aten::", "tsfuser::")) for n in found.left_out
    )
    quiet = explained("resnet_basic", device, training=False)
    assert {n.kind for n in quiet.left_out} == {"aten::conv2d"}


def test_a_reshape_is_not_called_free(device):
    reasons = {n.kind: n.reason for n in explained("gpt", device, training=False).left_out}
    assert "copy" in reasons["aten::reshape"] and "costs no time" in reasons["aten::view"]
    quiet = {n.kind: n.reason for n in explained("encoder", device, training=False).left_out}
    assert "copy" in quiet["aten::reshape"] and "costs no time" in quiet["aten::transpose"]


def test_views_are_differentiated_with_what_is_around_them(device):
    left_out = {n.kind for n in explained("encoder", device).graphs[0].left_out}
    assert not left_out & {"aten::view", "aten::reshape", "aten::transpose"}


def test_a_group_that_is_there_twice_has_the_lines_of_both(device):
    text = str(explained("encoder", device, training=False))
    lines = line_of("self.dropout(self.merge(mixed))"), line_of("self.dropout(self.shrink(hidden))")
    assert re.search(r"\(2 times\): .*layer_norm\n    from models.py:%d, models.py:%d\n" % lines, text)


def test_ops_that_autodiff_leaves_out_say_why(device):
    def beside(x, c):
        left, right = torch.sigmoid(x).split(2, -1)
        return torch.tanh(-right * c), left

    def alone(x, c):
        return torch.sort(torch.sigmoid(torch.sort(x, 0)[0]), 0)[0]

    x, c = torch.rand(4, 4, device=device, requires_grad=True), torch.rand(1, device=device)
    reasons = {n.reason for n in tsfuser.explain(fresh(beside), x, c).left_out}
    assert len(reasons) == 1 and "as it does with ops around views" in reasons.pop()
    (reason,) = [n.reason for n in tsfuser.explain(fresh(alone), x, c).left_out if n.kind == "aten::sigmoid"]
    assert reason.startswith("it stands alone among ops that TorchScript's autodiff does not differentiate")


def test_what_a_loop_carries_is_drawn_as_such(device):
    def steps(xs, w):
        h = torch.sort(w, 0)[0]
        for t in range(xs.size(0)):
            h = torch.mm(xs[t], h)
        return torch.sort(h, 0)[0]

    with torch.no_grad():
        found = tsfuser.explain(steps, torch.rand(9, 4, 4, device=device), torch.rand(4, 4, device=device))
    (graph,) = found.graphs
    kinds = [item.kind.removeprefix("aten::") for item in graph.items]
    edges = {(kinds[a], kinds[b]) for a, b in graph.edges}
    assert edges == {("sort", "mm"), ("select", "mm"), ("mm", "mm"), ("mm", "sort")}


def test_a_part_that_did_not_run_is_said_to(device):
    """The first turn of a loop is called with a state that requires no gradient, which its part does not
    take."""
    found = explained("lstm", device)
    idle = [g for g in found.graphs if not g.reached]
    assert [g.title for g in idle] == ["differentiated part 1, forward"]
    assert "differentiated part 1, forward\n  did not run: its guard" in str(found)
    assert [g.title for g in found.graphs[2:4]] == [f"differentiated part 2, {way}" for way in WAYS]
    assert {g.title for g in found.graphs[4:]} == {"in a branch, a loop, a fork or a fallback"}


def boxes(svg):
    """(left, top, right, bottom) of each box."""
    found = re.findall(r'<rect class="box \w+" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', svg)
    return [(x, y, x + w, y + h) for x, y, w, h in (map(int, numbers) for numbers in found)]


def points(path):
    """Points along a path of lines that go straight down, and curves."""
    at = (0.0, 0.0)
    for letter, numbers in re.findall(r"([MVC])([\d. ]+)", path):
        values = list(map(float, numbers.split()))
        ends = [at, (at[0], values[0])] if letter == "V" else [at, *zip(values[::2], values[1::2])]
        for t in (k / 20 for k in range(21)) if letter != "M" else ():
            left = ends
            while len(left) > 1:  # de Casteljau
                left = [tuple(a + (b - a) * t for a, b in zip(p, q)) for p, q in zip(left, left[1:])]
            yield left[0]
        at = ends[-1]


def test_lines_do_not_run_under_boxes():
    nodes = tuple(Node(f"aten::{'op' * k}", Place()) for k in range(1, 5))
    svg = drawing(GraphReport("inference", nodes, ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3))))
    paths = re.findall(r'<path class="edge" d="([^"]*)"', svg)
    assert len(paths) == 5 and len(boxes(svg)) == 4
    under = [
        (x, y) for path in paths for x, y in points(path)
        for left, top, right, bottom in boxes(svg) if left < x < right and top < y < bottom
    ]  # fmt: skip
    assert not under


def test_short_times_are_in_nanoseconds():
    assert [duration(s) for s in (4.2e-8, 1.26e-6, 2.5e-3, 2.395)] == ["42 ns", "1.3 us", "2.50 ms", "2.40 s"]
