"""How many plans a group keeps: a bounded number, those that are of use."""

import gc
import random
import weakref

import pytest
import torch

from kit.native_support import ADD, group_function

#: What a test sets, and what groups share at least however many there are.
GROUP, LEAST = 32, 16


class Token:
    """Lives as long as its plan."""


class Planner:
    """Makes one plan a size, which passes the first argument through."""

    def __init__(self, native):
        self.native, self.made, self.tokens = native, [], weakref.WeakSet()
        native.set_planner(self)

    def __call__(self, group, args, varies):
        size, token = args[0][3][0], Token()
        self.made.append(size)
        self.tokens.add(token)
        return self.native.Plan(6, [], [(0, 0, size)], [], [], [("input", 0)], keepalive=(token,))


@pytest.fixture
def limits(native):
    before = native.set_plan_limits(10**6, GROUP)
    yield native.set_plan_limits
    native.set_plan_limits(*before)


@pytest.fixture
def planner(native, limits):
    return Planner(native)


def call(function, size):
    a = torch.full((size,), float(size))
    result = function(a, a)
    assert torch.equal(result, a) or torch.equal(result, a + a)  # fused (see Planner), or not


def group_of(native, text):
    return native.group_id(torch._C.parse_ir(ADD), text)


def test_ever_new_classes_leave_a_bounded_number_of_plans(native, planner):
    group = group_of(native, "ever new")
    function = group_function(ADD, 2, cache_id=group)
    for size in range(1, 4000):
        call(function, size)
        assert len(native.group_plans(group)) <= GROUP
    assert len(planner.made) > 10 * GROUP  # later ones got their turn
    assert planner.made[-1] > 3800


def test_plans_that_are_dropped_are_destroyed(native, planner):
    """But for those that this thread remembers by their exact sizes, some 1024 of all groups."""
    function = group_function(ADD, 2, cache_id=group_of(native, "destroyed"))
    for size in range(1, 20000):
        call(function, size)
    gc.collect()
    assert len(planner.made) > 4000 and len(planner.tokens) <= 1024 + GROUP + 1


def test_what_is_in_use_stays(native, planner):
    """Also where it is found by exact sizes only, without a look at the group's plans."""
    group = group_of(native, "in use")
    function = group_function(ADD, 2, cache_id=group)
    for size in range(10, 3000):
        call(function, size)
        call(function, 5)
    assert planner.made.count(5) == 1
    assert any(True for reason, _ in native.group_plans(group))
    assert len(planner.made) > 5 * GROUP


@pytest.mark.parametrize("excess", [1, GROUP, 3 * GROUP])
def test_a_round_of_too_many_classes_does_not_plan_again_and_again(native, planner, excess):
    function = group_function(ADD, 2, cache_id=group_of(native, f"a round of {excess}"))
    for _ in range(20):
        for size in range(1, GROUP + excess + 1):
            call(function, size)
    assert len(planner.made) == GROUP


def test_after_a_change_of_classes_the_new_ones_are_planned(native, planner):
    function = group_function(ADD, 2, cache_id=group_of(native, "change"))
    for sizes in (range(1, GROUP + 1), range(1001, GROUP + 1001)):
        for _ in range(10):
            for size in sizes:
                call(function, size)
    assert sorted(planner.made) == [*range(1, GROUP + 1), *range(1001, GROUP + 1001)]


def test_groups_share_what_the_process_keeps(native, planner, limits):
    """Once it is taken: each group may have LEAST all the same."""
    limits(10 * GROUP, GROUP)
    groups = [group_of(native, f"share {k}") for k in range(60)]
    for _ in range(2):
        for group in groups:
            function = group_function(ADD, 2, cache_id=group)
            for size in range(1, 50):
                call(function, size)
        counts = [len(native.group_plans(group)) for group in groups]
        assert counts == [GROUP] * 10 + [LEAST] * 50
        native.reset()


def test_ranks_and_dtypes_that_are_gone_leave_nothing(native, limits):
    """Each argument of another structure than the last one's: structures are dropped with their plans."""
    made = []

    def planner(group, args, varies):
        made.append(args)
        leaves = 2 * (2 * len(args[0][3]) + 1)
        return native.Plan(leaves, [], [], [], [], [("input", 0)])

    native.set_planner(planner)
    group = group_of(native, "structures")
    function = group_function(ADD, 2, cache_id=group)
    rng = random.Random(0)
    dtypes = [torch.float32, torch.float64, torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool]
    for _ in range(3000):
        a, b = (torch.ones((1,) * rng.randrange(1, 9), dtype=rng.choice(dtypes)) for _ in range(2))
        if a.dim() == b.dim():
            function(a, b)
    assert len(native.group_plans(group)) <= GROUP < len(made)


def test_plans_go_while_threads_use_them(native, planner, limits):
    """Calls under way keep their plan; nothing is lost, and every result is right."""
    from concurrent.futures import ThreadPoolExecutor

    group = group_of(native, "threads")
    function = group_function(ADD, 2, cache_id=group)

    def work(seed):
        rng = random.Random(seed)
        for k in range(2000):
            call(function, rng.randrange(k // 10 + 1, k // 10 + 40))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(native.group_plans(group)) <= GROUP and len(planner.made) > 3 * GROUP
