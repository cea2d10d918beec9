"""Which combinations of the parameters of a test a run takes.

In: the items of pytest. Out: those that run with --long only. Example:

    left = of_long_runs(items)
"""

import itertools


def of_long_runs(items):
    """The set of items that run with --long only. They are left out: to skip one takes as long as a test,
    as processes send reports of it."""
    left, combinations = set(), {}
    on_cpu = {_test_of(item) for item in items if target_of(item) == "cpu"}
    for item in items:
        if "long" in item.keywords:
            left.add(item)
        elif hasattr(item, "callspec"):
            combinations.setdefault((_test_of(item), target_of(item)), []).append(item)
    for (test, target), cases in combinations.items():
        mark = cases[0].get_closest_marker("each_value")
        if mark or (target == "cpu-fibers" and test in on_cpu):
            left.update(set(cases).difference(with_each_value(cases, mark.args if mark else ())))
        else:
            left.update(set(cases).difference(with_two_of_the_others(cases)))
    return left


def target_of(item):
    """The target of a case; None where it has none."""
    return item.callspec.params.get("target") if hasattr(item, "callspec") else None


def _test_of(item):
    """Two classes of a file may have tests of one name."""
    return item.path, getattr(item, "cls", None), item.originalname


def with_each_value(items, pairs):
    """As few of the items, all of one test, as have each value of each of its parameters and of the pairs."""
    values = {}
    for item in items:
        # combinations share the values of a parameter, which need be neither equal nor hashable
        known = {name: id(value) for name, value in item.callspec.params.items()}
        values[item] = {*known.items(), *((pair, *map(known.get, pair)) for pair in pairs)}
    missing, taken = set().union(*values.values()), []
    while missing:
        most = max(len(found & missing) for found in values.values())
        best = [item for item, found in values.items() if len(found & missing) == most]
        taken.append(best[31 * len(taken) % len(best)])  # not always the first value of the others
        missing -= values[taken[-1]]
    return taken


def with_two_of_the_others(items):
    """As few of the items, all of one test, as have each value of each of its parameters with two values of
    each other one. What one mark parametrizes is one parameter."""
    marks = [mark.args[0] for mark in items[0].iter_markers("parametrize")]
    names = [mark.replace(",", " ").split() if isinstance(mark, str) else list(mark) for mark in marks]
    names += [[name] for name in items[0].callspec.params if not any(name in group for group in names)]
    values = {}
    for item in items:
        params = item.callspec.params
        found = [(k, *(id(params.get(name)) for name in group)) for k, group in enumerate(names)]
        values[item] = [*itertools.permutations(found, 2)]
    if len(names) < 2:
        return items
    partners = {}
    for value, other in itertools.chain(*values.values()):
        partners.setdefault((value, other[0]), set()).add(other)
    missing = {key: min(2, len(others)) for key, others in partners.items()}
    met, taken = set(), []
    while missing:
        gains = {
            item: sum((v, o[0]) in missing and (v, o) not in met for v, o in values[item]) for item in items
        }
        most = max(gains.values())
        best = [item for item, gain in gains.items() if gain == most]
        taken.append(best[31 * len(taken) % len(best)])  # not always the first value of the others
        for value, other in set(values[taken[-1]]) - met:
            met.add((value, other))
            key = value, other[0]
            if key in missing:
                missing[key] -= 1
                if not missing[key]:
                    del missing[key]
    return taken
