"""`tsfuser.explain` of networks: what a step costs, what costs most, and graphs that are alike."""

import html
import re
import sys

import pytest
import torch
from torch import nn

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import fresh
from tsfuser.debug import check, summary
from tsfuser.debug.compare import Difference
from tsfuser.debug.summary import MOST, costly_kernels, costly_ops, folded, together

pytestmark = pytest.mark.graphs


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.convolution(x)) + x)


@pytest.fixture
def network(device, monkeypatch):
    """Six blocks, each a part that autodiff differentiates; small as it is, it counts as a network."""
    monkeypatch.setattr(summary, "_NETWORK", 0)
    torch.manual_seed(1)
    return nn.Sequential(*(Block(4) for _ in range(6))).to(device)


def operand(device, **options):
    return torch.randn(2, 4, 6, 6, device=device, **options)


@pytest.fixture
def explained(network, device):
    return tsfuser.explain(torch.jit.script(network), operand(device, requires_grad=True))


@pytest.mark.parametrize("trains", [False, True])
def test_copies_that_explain_makes_are_no_cost_of_the_program(device, trains):
    x = torch.randn(40, 64, device=device, requires_grad=trains)
    scripted = fresh(pointwise)
    assert not {"aten::copy_", "aten::set_", "aten::randn"} & set(tsfuser.explain(scripted, x).costs.ops)


def pointwise(x):
    return torch.relu(x + 1.0) * 0.5


def program(x, w):
    y = torch.relu(x + 1.0) * 0.5
    return torch.sigmoid(torch.mm(y, w)) + 1.0


def test_each_kernel_has_its_launches_of_a_step(explained):
    launches = {
        (found.kernel.group, found.kernel.name): found.launches for found in costly_kernels(explained)
    }
    assert launches and all(x.times >= 1 and x.seconds > 0 and x.bytes > 0 for x in launches.values())
    blocks = max(launches.values(), key=lambda x: x.times)
    assert blocks.times >= 5  # the blocks share their plans
    seconds = [found.launches.seconds for found in costly_kernels(explained)]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) < explained.costs.seconds * 50  # of one step, in the same unit


def test_ops_of_torch_have_their_calls_and_reasons(network, device):
    with torch.no_grad():
        found = tsfuser.explain(torch.jit.script(network.eval()), operand(device))
    [called] = [op for op in costly_ops(found) if op.kind == "aten::conv2d"]
    assert called.times == 6 and called.seconds > 0
    assert called.reason.startswith("a convolution is left to torch's libraries")
    assert not any(op.kind == "aten::convolution" for op in costly_ops(found))  # which conv2d calls


def test_the_backward_is_part_of_a_step(explained):
    assert "aten::convolution_backward" in {op.kind for op in costly_ops(explained)}


def test_a_network_begins_with_what_costs_most(explained):
    first, second, *lines = str(explained).splitlines()
    assert first.startswith("Sequential: ") and re.fullmatch(
        r"  a step takes [\d.]+ [mun]s: \d+ launches of kernels [\d.]+ [mun]s \([\d.]+ KB\), "
        r"ops of torch [\d.]+ [mun]s",
        second,
    )
    assert lines[:2] == ["", "kernels that cost most"]
    rows = lines[2 : lines.index("", 2)]
    assert 0 < len(rows) <= MOST and all(re.match(r" +[\d.]+ [mun]s  group \d+ +fused_", row) for row in rows)


def test_a_small_function_has_no_lists(device):
    text = str(tsfuser.explain(fresh(program), *(torch.randn(8, 8, device=device) for _ in range(2))))
    assert "a step takes" in text and "cost most" not in text


def test_parts_that_are_alike_are_told_once(explained):
    text = str(explained)
    told = [title for _, title in folded(explained.graphs)]
    if not by_joint_graphs():  # one takes all blocks at once
        assert len(told) < len(explained.graphs) - 4
        assert any(re.match(r"differentiated parts \d.*, forward", title) for title in told)
    assert all(text.splitlines().count(title) == 1 for title in told)
    ops = [group for graph, _ in folded(explained.graphs) for group in graph.groups]
    assert {g.number for g in ops} == {g.number for g in explained.groups}  # each group is still there


def test_parts_that_leave_out_other_lines_are_not_alike(device):
    def function(x, w):
        y = torch.sort(torch.relu(x + 1.0) * 0.5, 0)[0]
        z = torch.mm(torch.relu(y + 1.0) * 0.5, w)
        return torch.relu(z + 1.0) * 0.5

    x, w = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))
    found = tsfuser.explain(fresh(function), x, w)
    assert {n.place.line for n in found.left_out} == {
        n.place.line for graph, _ in folded(found.graphs) for n in graph.left_out
    }


@pytest.mark.parametrize(
    "titles, expected",
    [
        (["part 4, backward"], "part 4, backward"),
        (["part 1, forward", "part 2, forward", "part 4, forward"], "parts 1, 2 and 4, forward"),
        ([f"graph {k}" for k in (1, 2, 3, 5, 7, 8, 9, 10)], "graphs 1 to 3, 5 and 7 to 10"),
    ],
)
def test_titles_of_what_is_alike(titles, expected):
    assert together(titles) == expected


def test_within_a_profiler_ops_are_not_timed(network, device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = tsfuser.explain(torch.jit.script(network), operand(device))
    assert not found.costs.ops and "ops of torch" not in str(found)
    assert "launches of kernels" in str(found)


def test_without_the_profiler_that_torch_calls_old_ops_are_not_timed(network, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler_legacy", None)
    monkeypatch.delattr(torch.autograd, "profiler_legacy", raising=False)
    found = tsfuser.explain(torch.jit.script(network), operand(device))
    assert not found.costs.ops and "launches of kernels" in str(found)


def test_links_of_the_page_lead_to_its_graphs_and_groups(explained):
    page = explained.to_html()
    links = re.findall(r'href="#([^"]+)"', page)
    assert {link.partition("-")[0] for link in links} == {"graph", "group"}
    assert set(links) <= set(re.findall(r'id="([^"]+)"', page))
    assert page.count('<section class="graph">') == len(folded(explained.graphs))


def test_notebooks_show_the_page_in_a_frame(device):
    found = tsfuser.explain(fresh(program), *(torch.randn(8, 8, device=device) for _ in range(2)))
    [framed] = re.findall(r'<iframe srcdoc="([^"]*)"', found._repr_html_())
    assert html.unescape(framed) == found.to_html()


@pytest.mark.each_value
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compile", [torch.jit.script, lambda m: torch.compile(m, backend="tsfuser")])
@pytest.mark.usefixtures("forgotten")
def test_groups_are_numbered_from_0_in_each_report_and_alike_in_checks(network, device, compile, training):
    made, x = compile(network.train(training)), operand(device, requires_grad=training)
    for _ in range(2):  # what ran before changes no number
        found, checked = tsfuser.explain(made, x), tsfuser.check(made, x)
        numbers = [group.number for group in found.groups]
        assert sorted(set(numbers)) == list(range(len(set(numbers))))
        assert {k.group for k in found.kernels} == set(numbers) == set(checked.compared)
        assert {kernel.kernel.group for kernel in costly_kernels(found)} == set(numbers)


def test_a_difference_has_the_number_of_its_group(device, monkeypatch):
    def wrong(run):
        return Difference(run.group, 0, 1.0, 0.0, f"group {run.group} differs") if len(seen) == 1 else None

    seen = []
    monkeypatch.setattr(check, "compare", lambda run: seen.append(run) or wrong(run))
    x, w = (torch.randn(8, 8, device=device) for _ in range(2))
    report = tsfuser.check(fresh(program), x, w)
    assert not report and report.difference.group == 0 and str(report) == "group 0 differs"
