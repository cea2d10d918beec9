"""Graphs of torch.compile that run in pieces, with Python between them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]
_watched: list = []  # storages
_alive: list = []  # how many of them are alive, at each call of `count`


@torch.library.custom_op("tsfuser_pieces::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    _alive.append(sum(not ref.expired() for ref in _watched))
    return x.clone()


count.register_fake(torch.empty_like)


@torch.library.custom_op("tsfuser_pieces::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


def _traced(function, *args):
    """The compiled graph of the function, and what was made of it."""
    module = make_fx(function)(*args)
    with watch.watching() as (_, outcomes):
        program = compile_graph(module, Settings(), watch.Origin(watch.Source(0), "inference"))
    return program, outcomes[0]


def test_a_piece_frees_its_inputs_while_it_runs():
    def function(x, w):
        y = (x.exp() + 1) * 2
        torch.ops.tsfuser_pieces.add_one_(y)  # cuts the graph
        z = y.sin() + 1  # the last to read y, in the second piece
        z = torch.ops.tsfuser_pieces.count(z)
        z = torch.ops.tsfuser_pieces.count(z * w)  # the last to read w
        return torch.ops.tsfuser_pieces.count(z.cos() * 2)

    _alive.clear()
    args = [torch.randn(5), torch.randn(5)]
    program, outcome = _traced(function, *args)
    assert outcome.foreign
    expected = function(*(x.clone() for x in args))
    _alive.clear()
    _watched[:] = [StorageWeakRef(x.untyped_storage()) for x in args]
    assert_matches(program(args), expected, ops=16)
    assert args == [] and _alive == [1, 0, 0]


def test_values_that_several_pieces_read():
    table = torch.randn(5)

    def function(x, unused):
        y = x.exp() + table
        z = torch.zeros_like(y)
        torch.ops.tsfuser_pieces.add_one_(z)
        u = y * z * table
        torch.ops.tsfuser_pieces.add_one_(u)
        return u + y * u, x, None, y, u * u

    x = torch.randn(5)
    program, outcome = _traced(function, x, x)
    assert len(outcome.programs) >= 2
    for ours, plain in zip(program([x, x]), function(x, x), strict=True):
        assert ours is plain if plain is None else torch.allclose(ours, plain)
