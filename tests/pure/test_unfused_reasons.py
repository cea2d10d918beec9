"""Why fusible nodes are in no group: one sentence for each way to be left over."""

import re

import pytest

pytest.importorskip("torch")

from tsfuser.grouping.cluster import MAX_NODES, Item
from tsfuser.grouping.unfused_reasons import unfused_reasons


def item(*after, device="cpu", meets=(), loose=False):
    return Item(after, device, loose, meets=meets)


BARRIER = Item(())


@pytest.mark.parametrize(
    "items, merged, found, sentence",
    [
        ([BARRIER, item(0)], [[1]], [], "none of the nodes around it can be fused"),
        (
            [item(device="cuda:0"), item(0)],
            [[0], [1]],
            [],
            "it runs on cpu, while the nodes around it run on cuda:0",
        ),
        (
            [item(), Item((0,)), item(0, 1)],
            [[0], [2]],
            [],
            "that is not fused lies between it and the nodes around it that are$",
        ),
        ([item(), item(0)], [[0], [1]], [], "or their group would have more than"),
        ([item(loose=True)], [], [], "it computes a 0-dim CPU tensor"),
        ([item(), item(0)], [[0, 1]], [], "only hand tensors through"),
        (
            [item(), Item((0,), "cpu", apart=(0,))],
            [[0], [1]],
            [],
            "elements of a tensor in memory are looked up",
        ),
        ([item(), item(), item(0, 1)], [[0, 1, 2]], [[0, 2]], "it is a view that something outside"),
    ],
)
def test_each_way_to_be_left_over_has_its_sentence(items, merged, found, sentence):
    reasons = unfused_reasons(items, merged, found)
    assert reasons and any(re.search(sentence, reason) for reason in reasons.values()), reasons


def test_grouped_nodes_and_those_that_cannot_be_fused_get_none():
    items = [item(), BARRIER, item(0), item(2)]
    assert unfused_reasons(items, [[0, 2, 3]], [[0, 2, 3]]) == {}


def test_a_full_group_is_named():
    many = [item(i - 1) if i else item() for i in range(MAX_NODES + 1)]
    full = list(range(MAX_NODES))
    assert unfused_reasons(many, [full, [MAX_NODES]], [full]) == {
        MAX_NODES: f"the group next to it is full: {MAX_NODES} nodes are the most"
    }


def test_siblings_over_a_common_input_count_as_neighbours():
    items = [item(meets=(7,)), item(meets=(7,))]
    assert "lies between" in unfused_reasons(items, [[0], [1]], [])[0]
