"""Beyond torch's recompile_limit a compiled function runs in eager mode: `explain` and `check`, which compile
a copy, say so."""

import inspect
import logging

import pytest
import torch
from torch import nn

import tsfuser

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]
LIMIT = 2


@pytest.fixture(autouse=True)
def limited(forgotten):
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    logging.getLogger("torch._dynamo").setLevel(logging.NOTSET)


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", dynamic=False, **choices)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(torch.tanh(x * 2)) + 1


def in_place():
    model = Scaled()
    model.compile(backend="tsfuser", dynamic=False)
    return model


def scaled(x, *, by=2.0):
    return torch.tanh(x * by) + 1


def broken(x):
    y = torch.tanh(x.sum(0) * 2) + 1
    torch._dynamo.graph_break()
    return torch.sigmoid(x * 2) + y


MAKE = {
    "a function": (lambda: compiled(scaled), "scaled"),
    "a module": (lambda: compiled(Scaled()), "Scaled"),
    "a method": (lambda: compiled(Scaled().forward), "Scaled"),
    "a module in place": (in_place, "Scaled"),
    "a method of a compiled module": (lambda: compiled(Scaled()).forward, "Scaled"),
    "a module of torch's": (lambda: compiled(nn.Sequential(nn.Tanh(), nn.Softmax(-1))), "Sequential"),
}


def rows(n):
    return torch.randn(n, 4)


def graphs_of_a_call(function, *args):
    before = tsfuser.stats()["graph_calls"]
    function(*args)
    return tsfuser.stats()["graph_calls"] - before


def caveat_of(function, *args):
    found = tsfuser.explain(function, *args)
    assert found.groups
    for text in (str(found), found.to_html()):
        assert ("runs this call in eager mode" in text) == bool(found.caveat)
    return found.caveat


@pytest.mark.parametrize("what", MAKE)
def test_a_call_beyond_the_limit_is_said_to_run_in_eager_mode(what):
    make, name = MAKE[what]
    function = make()
    sizes = range(2, 2 + LIMIT)
    for n in sizes:
        assert graphs_of_a_call(function, rows(n)) == 1
    assert graphs_of_a_call(function, rows(7)) == 0
    said = caveat_of(function, rows(7))
    assert said.startswith(f"{name} itself runs this call in eager mode: torch has compiled {LIMIT} graphs")
    assert "expected 3, actual 7" in said and "recompile_limit" in said and "dynamic=True" in said
    report = tsfuser.check(function, rows(7))
    assert report and report.caveat == said and said in str(report)
    assert caveat_of(function, rows(3)) == ""  # which one of its graphs serves
    torch._dynamo.reset()  # the way out that it names
    assert graphs_of_a_call(function, rows(7)) == 1


def test_numbers_and_keywords_are_compared():
    function = compiled(scaled)
    for by in (2.0, 3.0, 4.0):
        function(torch.ones(3), by=by)
    assert "by == 3.0" in tsfuser.explain(function, torch.ones(3), by=5.0).caveat
    assert tsfuser.explain(function, torch.ones(3), by=3.0).caveat == ""
    assert tsfuser.explain(function, torch.ones(3)).caveat == ""


def test_what_follows_a_graph_break_has_a_limit_of_its_own():
    """Its calls are not known before it runs."""
    function = compiled(broken)
    for n in range(2, 4 + LIMIT):
        function(rows(n))
    assert graphs_of_a_call(function, rows(2)) == 2
    said = tsfuser.explain(function, rows(2)).caveat
    assert said.startswith("broken itself may run in eager mode in part") and "resume_in_broken" in said
    assert __file__ in said


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="an argument of newer torch"
)
def test_the_limit_may_be_one_of_the_function():
    function = compiled(scaled, recompile_limit=3)
    for n in range(2, 5):
        function(rows(n))
    assert "torch has compiled 3 graphs" in tsfuser.explain(function, rows(9)).caveat
    torch._dynamo.reset()
    for n in range(2, 4):
        function(rows(n))
    assert tsfuser.explain(function, rows(9)).caveat == ""
