"""Clusters of nodes: acyclic, bounded, and as large as the order of nodes allows."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsfuser.grouping import cluster
from tsfuser.grouping.cluster import Item, absorb, arrange, clusters


def program(rows):
    """Items from rows of (positions read, device, extra positions to follow); value `i` is what item `i`
    makes, values from 1000 on are inputs of the block."""
    uses = {}
    for reads, _, _ in rows:
        for v in reads:
            uses[v] = uses.get(v, 0) + 1
    items = []
    for i, (reads, device, after) in enumerate(rows):
        before = tuple(sorted({v for v in reads if v < 1000} | set(after)))
        fused = device is not None
        items.append(
            Item(
                before,
                device,
                False,
                reads if fused else (),
                ((i, uses.get(i, 1)),) if fused else (),
                reads if fused else (),
            )
        )
    return items


def chain(*devices):
    return program([((i - 1,) if i else (1000,), device, ()) for i, device in enumerate(devices)])


def test_a_chain_is_one_cluster():
    assert clusters(chain("cpu", "cpu", "cpu")) == [[0, 1, 2]]


def test_devices_do_not_mix():
    assert clusters(chain("cpu", "cuda:0", "cuda:0")) == [[0], [1, 2]]


def test_a_node_between_keeps_two_clusters_apart():
    items = program([((1000,), "cpu", ()), ((0,), None, ()), ((1,), "cpu", ()), ((0, 2), "cpu", ())])
    assert clusters(items) == [[0], [2, 3]]


def test_an_order_edge_keeps_two_clusters_apart():
    """The second node changes in place what the first reads, and the third must follow it."""
    items = program([((1000,), "cpu", ()), ((1000,), None, (0,)), ((1000, 0), "cpu", (1,))])
    assert clusters(items) == [[0], [2]]


def test_an_item_joins_what_reads_it_not_what_it_only_comes_after():
    """A cast that has to come behind a norm, and is read behind a product of that norm's."""
    rows = [((1000,), "cpu", ()), ((0,), None, ()), ((1001,), "cpu", (0,)), ((1, 2), "cpu", ())]
    items = program(rows)
    assert clusters(items) == [[0, 2], [3]]
    items[2] = items[2]._replace(held=frozenset((0,)))
    assert clusters(items) == [[0], [2, 3]]


def test_what_must_be_in_memory_is_made_by_another_cluster():
    """The last node looks elements up in what the second makes; the first is read by both."""
    items = program([((1000,), "cpu", ()), ((0,), "cpu", ()), ((1, 0), "cpu", ())])
    assert clusters(items) == [[0, 1, 2]]
    items[2] = items[2]._replace(apart=(1,))
    assert clusters(items) == [[0, 1], [2]]
    items = program([((1000,), "cpu", ()), ((1001,), "cpu", ()), ((0, 1), "cpu", ()), ((2, 0), "cpu", ())])
    items[3] = items[3]._replace(apart=(0,))
    assert clusters(items) == [[0, 1, 2], [3]]
    items = program([((1000,), "cpu", ()), ((0, 1001), "cpu", ()), ((1001, 1002), "cpu", ())])
    items[1] = items[1]._replace(apart=(0,))
    assert clusters(items) == [[0], [1, 2]]


def test_siblings_meet_over_what_both_read():
    items = program([((1000, 1001), "cpu", ()), ((1000, 1002), "cpu", ())])
    assert clusters(items) == [[0, 1]]
    assert clusters(items, horizontal=False) == [[0], [1]]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("near", [(), (1000,)])
def test_siblings_meet_over_a_small_value_only_where_nothing_parts_them(near, parts):
    items = [
        Item((), "cpu", reads=(1000, 1001), makes=((0, 1),), meets=(1000, 1001), near=near),
        Item((), parts=parts),
        Item((), "cpu", reads=(1000, 1002), makes=((2, 1),), meets=(1000, 1002), near=near),
    ]
    assert clusters(items) == ([[0], [2]] if near and parts else [[0, 2]])


def test_a_loose_item_joins_a_cluster_but_starts_none():
    a, b, c = chain("cpu", "cpu", "cpu")
    loose = [Item(x.after, x.device, True, x.reads, x.makes, x.meets) for x in (a, b, c)]
    assert clusters(loose) == []
    assert clusters([a, loose[1], loose[2]]) == [[0, 1, 2]]


def test_absorb_takes_what_one_cluster_alone_reads():
    assert absorb([[2, 3]], {0: {1}, 1: {3}}) == [[0, 1, 2, 3]]
    assert absorb([[2, 3]], {1: {3, -1}}) == [[2, 3]]
    assert absorb([[2], [3]], {1: {2, 3}}) == [[2], [3]]


def test_arrange_changes_nothing_that_is_in_order():
    items = program([((1000,), None, ()), ((0,), "cpu", ()), ((1,), "cpu", ()), ((2,), None, ())])
    assert arrange(items, [[1, 2]]) == [[0], [1, 2], [3]]


def test_arrange_moves_readers_of_a_cluster_behind_it():
    items = program([((1000,), "cpu", ()), ((0,), None, ()), ((0,), "cpu", ())])
    assert arrange(items, [[0, 2]]) == [[0, 2], [1]]


def test_arrange_knows_no_order_where_a_node_outside_is_between():
    items = program([((1000,), "cpu", ()), ((0,), None, ()), ((1,), "cpu", ())])
    assert arrange(items, [[0, 2]]) is None


@st.composite
def programs(draw):
    rows = []
    for i in range(draw(st.integers(1, 40))):
        values = (
            st.integers(1000, 1003)
            if not i
            else st.one_of(st.integers(max(0, i - 8), i - 1), st.integers(1000, 1003))
        )
        reads = tuple(draw(st.lists(values, max_size=3)))
        device = draw(st.sampled_from(["cpu", "cuda:0", None, "cuda:0"]))
        after = () if device or not i else tuple(draw(st.lists(st.integers(0, i - 1), max_size=2)))
        rows.append((reads, device, after))
    return program(rows)


def arguments(items, members):
    """Tensors in and out of a cluster, counted from scratch."""
    made = {v: uses for i in members for v, uses in items[i].makes}
    reads = [v for i in members for v in items[i].reads]
    return len({v for v in reads if v not in made}) + sum(reads.count(v) < uses for v, uses in made.items())


@given(programs())
def test_clusters_are_acyclic_disjoint_and_of_one_device(items):
    found = clusters(items)
    flat = [i for members in found for i in members]
    assert sorted(flat) == [i for i, item in enumerate(items) if item.device]
    assert all(len({items[i].device for i in members}) == 1 for members in found)
    order = [i for piece in arrange(items, found) or () for i in piece]  # none if there is a cycle
    place = {i: k for k, i in enumerate(order)}
    assert all(place[p] < place[i] for i, item in enumerate(items) for p in item.after)


@given(programs(), st.integers(2, 6), st.integers(2, 8))
def test_clusters_are_bounded(items, nodes, most):
    before = cluster.MAX_NODES, cluster.MAX_ARGUMENTS
    cluster.MAX_NODES, cluster.MAX_ARGUMENTS = nodes, most
    try:
        for members in clusters(items):
            assert len(members) <= nodes
            assert len(members) == 1 or arguments(items, members) <= most
    finally:
        cluster.MAX_NODES, cluster.MAX_ARGUMENTS = before


@given(programs())
def test_no_two_clusters_could_be_merged_over_an_edge(items):
    """Greedy, but complete on a single producer: where a node has one producer of its device and nothing
    lies between, they are together."""
    home = {i: k for k, members in enumerate(clusters(items)) for i in members}
    for i, item in enumerate(items):
        if item.device and len(item.after) == 1 and items[item.after[0]].device == item.device:
            assert home[i] == home[item.after[0]]


@pytest.mark.parametrize("shape", range(3))
def test_the_work_grows_with_the_nodes_only(shape):
    """Counted in calls of functions, which no other process slows down."""
    few, many = (calls(*large(nodes)[shape]) for nodes in (5_000, 20_000))
    assert many < 6 * few  # four times the nodes


def calls(*items):
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        arrange(items, clusters(items))
    finally:
        sys.setprofile(None)
    return count


def large(nodes):
    """Programs of `nodes` nodes: of two devices; of one device by turns; with readers that come late."""

    def every(make):
        return program([make(i) for i in range(nodes)])

    fan = every(lambda i: ((1000 + i % 7,), "cpu" if i % 2 else None, ()))
    alternating = every(lambda i: ((i - 1,) if i % 900 else (1000,), "cpu" if i % 2 else None, ()))
    late = every(
        lambda i: (
            (1000,) if i % 3 == 0 else (i - 1,) if i % 3 == 1 else (i - 1, 1000),
            None if i % 3 == 1 else "cpu",
            (),
        )
    )
    return fan, alternating, late
