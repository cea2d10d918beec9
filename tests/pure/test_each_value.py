"""Which combinations of the parameters of a test run by default, and the marker `each_value`."""

import itertools
from types import SimpleNamespace

import pytest


class Item:
    """What conftest asks of an item of pytest."""

    path, originalname = "test_it.py", "test_it"

    def __init__(self, pairs, **params):
        self.marker = None if pairs is None else SimpleNamespace(args=pairs)
        self.keywords = {} if pairs is None else {"each_value"}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self.marker


@pytest.fixture
def conftest(request):
    [found] = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "_with_each_value")]
    return found


@pytest.fixture
def select(conftest):
    return conftest._with_each_value


DTYPES, SHAPES, FLAGS = ("float32", "float16", "int32"), ([1, 2], [3], [4, 5], [6]), (False, True)


@pytest.mark.parametrize("pairs, most", [((), 5), ((("shape", "flag"),), 9)], ids=["values", "pairs"])
def test_each_value_is_in_a_combination_and_few_combinations_are_taken(select, pairs, most):
    found = itertools.product(DTYPES, SHAPES, FLAGS)
    items = [Item(pairs, dtype=d, shape=s, flag=f) for d, s, f in found]
    taken = [item.callspec.params for item in select(items, pairs)]
    assert max(map(len, (DTYPES, SHAPES, FLAGS))) <= len(taken) <= most
    for name, values in dict(dtype=DTYPES, shape=SHAPES, flag=FLAGS).items():
        assert all(any(params[name] is value for params in taken) for value in values)
    if pairs:
        assert all(
            any(p["shape"] is s and p["flag"] is f for p in taken)
            for s, f in itertools.product(SHAPES, FLAGS)
        )


@pytest.mark.parametrize("targets", [("cpu", "cpu-fibers"), ("cpu-fibers",)], ids="-".join)
def test_fibers_have_each_value_where_the_cpu_has_all(conftest, targets):
    found = itertools.product(targets, DTYPES, FLAGS)
    items = [Item(None, target=t, dtype=d, flag=f) for t, d, f in found]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest._deselect_long_sweeps(SimpleNamespace(hook=hook), items)
    counts = [sum(item.callspec.params["target"] == target for item in items) for target in targets]
    assert counts == ([6, 3] if len(targets) == 2 else [6])


@pytest.mark.parametrize("parameters, left", [(2, 12), (3, 12), (4, 12)])
def test_of_three_parameters_or_more_each_pair_of_values_runs(conftest, parameters, left):
    """Of 12, 24 and 48 combinations."""
    names, values = ("dtype", "shape", "flag", "other"), (DTYPES, SHAPES, FLAGS, (None, "x"))
    chosen = dict(zip(names, values[:parameters]))
    items = [Item(None, **dict(zip(chosen, found))) for found in itertools.product(*chosen.values())]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest._deselect_long_sweeps(SimpleNamespace(hook=hook), items)
    taken = [item.callspec.params for item in items]
    assert left <= len(taken) <= left + 3
    for one, other in itertools.combinations(chosen, 2):
        for x, y in itertools.product(chosen[one], chosen[other]):
            assert any(p[one] is x and p[other] is y for p in taken)
