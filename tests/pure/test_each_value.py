"""Which combinations of the parameters of a test run by default, and the marker `each_value`."""

import itertools
from types import SimpleNamespace

import pytest

from kit import cases


class Item:
    """What conftest asks of an item of pytest."""

    path, originalname = "test_it.py", "test_it"

    def __init__(self, pairs, lists=(), **params):
        self.marker = None if pairs is None else SimpleNamespace(args=pairs)
        self.lists = [SimpleNamespace(args=(names,)) for names in lists]
        self.keywords = {} if pairs is None else {"each_value"}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self.marker

    def iter_markers(self, name):
        return self.lists


DTYPES, SHAPES, FLAGS = ("float32", "float16", "int32"), ([1, 2], [3], [4, 5], [6]), (False, True)


@pytest.mark.parametrize("pairs, most", [((), 5), ((("shape", "flag"),), 9)], ids=["values", "pairs"])
def test_each_value_is_in_a_combination_and_few_combinations_are_taken(pairs, most):
    found = itertools.product(DTYPES, SHAPES, FLAGS)
    items = [Item(pairs, dtype=d, shape=s, flag=f) for d, s, f in found]
    taken = [item.callspec.params for item in cases.with_each_value(items, pairs)]
    assert max(map(len, (DTYPES, SHAPES, FLAGS))) <= len(taken) <= most
    for name, values in dict(dtype=DTYPES, shape=SHAPES, flag=FLAGS).items():
        assert all(any(params[name] is value for params in taken) for value in values)
    if pairs:
        assert all(
            any(p["shape"] is s and p["flag"] is f for p in taken)
            for s, f in itertools.product(SHAPES, FLAGS)
        )


@pytest.mark.parametrize("targets", [("cpu", "cpu-fibers"), ("cpu-fibers",)], ids="-".join)
def test_fibers_have_each_value_where_the_cpu_has_all(targets):
    found = itertools.product(targets, DTYPES, FLAGS)
    items = [Item(None, target=t, dtype=d, flag=f) for t, d, f in found]
    counts = [sum(item.callspec.params["target"] == target for item in selected(items)) for target in targets]
    assert counts == ([6, 3] if len(targets) == 2 else [6])


@pytest.mark.parametrize("parameters, left, most", [(2, 8, 9), (3, 8, 9), (4, 8, 10)])
def test_each_value_is_run_with_two_values_of_each_other_parameter(parameters, left, most):
    """Of 12, 24 and 48 combinations; a flag with both."""
    names, values = ("dtype", "shape", "flag", "other"), (DTYPES, SHAPES, FLAGS, (None, "x"))
    chosen = dict(zip(names, values[:parameters]))
    items = [Item(None, **dict(zip(chosen, found))) for found in itertools.product(*chosen.values())]
    taken = [item.callspec.params for item in selected(items)]
    assert left <= len(taken) <= most
    for one, other in itertools.permutations(chosen, 2):
        for x in chosen[one]:
            assert sum(any(p[one] is x and p[other] is y for p in taken) for y in chosen[other]) >= 2


def test_what_is_parametrized_as_a_list_runs_in_each_combination_of_the_list():
    """Which may name values of two parameters, and is no product of theirs."""
    listed = [(n, k) for n in range(5) for k in range(3)]
    items = [Item(None, ("n, k",), n=n, k=k) for n, k in listed]
    assert [(i.callspec.params["n"], i.callspec.params["k"]) for i in selected(items)] == listed


def test_two_classes_may_have_tests_of_one_name():
    items = [Item(None, dtype=d, flag=f) for _ in range(2) for d in DTYPES for f in FLAGS]
    for k, item in enumerate(items):
        item.cls = (None, Item)[k // 6]
    assert len(selected(items)) == 12


def selected(items):
    left = cases.of_long_runs(items)
    return [item for item in items if item not in left]
