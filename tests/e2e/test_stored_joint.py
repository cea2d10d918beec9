"""Joint graphs of scripted programs are read from disk, and only where nothing that they read differs."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed
from kit.stored_graphs import autocast, default_dtype, empty_store
from kit.support import assert_matches, counted, fresh, no_fallback, script
from tsfuser import options
from tsfuser.frontends.torchscript import joint_door
from tsfuser.joint.rules.table import Unknown

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]


@pytest.fixture(autouse=True)
def store(tmp_path):
    """An empty disk cache in which graphs are kept."""
    with empty_store(tmp_path / "cache", stored_graphs=True) as folder, no_fallback():
        yield folder


@pytest.fixture
def made(monkeypatch):
    """Which graphs have been made anew: what each call gave."""
    seen, real = [], joint_door._joint_graph

    def make(*given):
        try:
            seen.append(real(*given))
        except Unknown as unknown:
            seen.append(unknown.numbers)
            raise
        return seen[-1]

    monkeypatch.setattr(joint_door, "_joint_graph", make)
    return seen


def norm(x: Tensor, y: Tensor):
    return F.layer_norm(x * 2, [5], y).relu() + x


def several(x: Tensor, y: Tensor):
    h = torch.tanh(x * y)
    return h.sin() * 2.0, torch.log(h * h + 1), x.size(0)


def product(x: Tensor, y: Tensor):
    return F.gelu(x @ x.t() * 0.5).sum() * y


def dropped(x: Tensor, y: Tensor):
    return F.dropout(x * y, 0.5, True).sigmoid()


PROGRAMS = [norm, several, product, dropped]


def operands(sizes=(4, 5), dtype=torch.float32, masks=(True, True), columns=False):
    """`columns`: each column of the matrix is one after the other in memory."""
    generator = torch.Generator().manual_seed(4)
    shapes = (sizes, sizes[-1:])
    matrix, row = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    made = (matrix.t().contiguous().t() if columns else matrix, row)
    return [tensor.requires_grad_(wants) for tensor, wants in zip(made, masks)]


def trained(called, *given):
    """Results, and gradients of first and second order."""
    torch.manual_seed(5)
    results = called(*given)
    results = [y for y in (results if isinstance(results, tuple) else (results,)) if isinstance(y, Tensor)]
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    total = sum(y.float().sin().sum() for y in results)
    first = torch.autograd.grad(total, leaves, create_graph=True)
    inner = sum(g.float().square().sum() for g in first)
    return [*results, *first, *torch.autograd.grad(inner, leaves, allow_unused=True)]


def run(function, given, calls=4):
    """The function in a new process, as it were: what it was scripted to is forgotten."""
    tsfuser.reset()
    scripted = fresh(function)
    with tsfuser.fuser():
        for _ in range(calls):
            found = trained(scripted, *given)
    return scripted, found


@pytest.mark.parametrize("sizes", [(4, 5), (1, 5)])
@pytest.mark.parametrize("function", PROGRAMS)
def test_a_second_process_makes_no_joint_graph(made, function, sizes):
    given = operands(sizes)
    scripted, first = run(function, given)
    assert is_packed(scripted, *given) and made
    made.clear()
    with counted() as rise:
        scripted, second = run(function, given)
    assert not made and rise["graphs_read"] > 0 and not rise["passes_failed"]
    assert is_packed(scripted, *given)
    for found, wanted, eagers in zip(second, first, trained(function, *given)):
        if wanted is not None:
            assert torch.equal(found, wanted)
        if function is not dropped and eagers is not None:
            assert_matches(found, eagers, ops=200)


class Scaled(torch.nn.Module):
    """Some of its ops stand in a loop or branch; two norms update the same statistics."""

    __constants__ = ["scale", "dim"]

    def __init__(self, scale: float, dim: int):
        super().__init__()
        self.scale, self.dim = scale, dim
        self.norm, self.weight = torch.nn.BatchNorm1d(5), torch.nn.Parameter(torch.linspace(1, 2, 5))

    def forward(self, x: Tensor, y: Tensor, n: int):
        for k in range(n):
            x = self.norm(torch.tanh(x * self.weight) + k) * y
        if n > 2:
            x = torch.sin(x * self.scale).exp()
        return (x * y).sum(self.dim).relu()


@pytest.fixture
def outlined(monkeypatch):
    """How often regions have been made anew."""
    seen, real = [], joint_door._regions

    def make(graph):
        seen.append(real(graph))
        return seen[-1]

    monkeypatch.setattr(joint_door, "_regions", make)
    return seen


def test_regions_are_read_by_a_second_process(outlined):
    """That of the same program only. A program without regions has none in the second process, too."""

    def once(make, *more):
        tsfuser.reset()
        torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
        mine, eager = make(), make()
        called = fresh(mine) if mine is eager else torch.jit.script(mine)
        outlined.clear()
        with tsfuser.fuser():
            for _ in range(4):
                found, wanted = ([f(*given, *more) for given in [operands()]][0] for f in (called, eager))
                assert_matches(found, wanted, ops=100)
        if isinstance(eager, torch.nn.Module):
            torch.testing.assert_close(list(mine.buffers()), list(eager.buffers()), rtol=1e-4, atol=1e-5)
        return len(outlined)

    programs = [(lambda: Scaled(2.0, 0), 3), (lambda: Scaled(2.0, 1), 3), (lambda: Scaled(3.0, 0), 3)]
    programs += [(lambda: norm,), (lambda: sorted_only,)]
    assert [once(*program) for program in programs] == [1] * 5
    assert not any(once(*program) for program in programs)


def sorted_only(x: Tensor, y: Tensor):
    return torch.sort(x)[0]


def test_numbers_that_have_to_be_constants_are_kept(made):
    def f(x: Tensor, y: Tensor, dim: int):
        return (x * 2).sum(dim) * y.sum()

    given = [*operands(), 1]
    run(f, given)
    kinds = set(map(type, made))
    made.clear()
    _, found = run(f, given)
    assert tuple in kinds and not made
    for mine, eagers in zip(found, trained(f, *given)):
        if eagers is not None:
            assert_matches(mine, eagers, ops=200)
    _, found = run(f, [*given[:2], 0])
    assert made
    assert_matches(found[0], f(*given[:2], 0), ops=20)


def test_what_is_refused_is_asked_again(made):
    """And gives no graph of another program."""

    def f(x: Tensor, y: Tensor):
        return torch.sort(x * y)[0].cumprod(0)

    given = operands()
    for _ in range(2):
        _, found = run(f, given)
        assert_matches(found[0], f(*given), ops=20)


SOURCE = (
    "def f(x: Tensor, y: Tensor):\n    return (torch.mm(x, x.t()) * {scale}).relu().sum({dim}) * y.sum()\n"
)
PLAIN = {"dim": 0, "scale": 3.0}

CHANGES = {
    "a constant": ({"scale": 3.5}, {}, contextlib.nullcontext),
    "a dim": ({"dim": 1}, {}, contextlib.nullcontext),
    "a size": ({}, {"sizes": (3, 5)}, contextlib.nullcontext),
    "a layout": ({}, {"columns": True}, contextlib.nullcontext),
    "a dtype": ({}, {"dtype": torch.float64}, contextlib.nullcontext),
    "what wants a gradient": ({}, {"masks": (True, False)}, contextlib.nullcontext),
    "the other one": ({}, {"masks": (False, True)}, contextlib.nullcontext),
    "an option": ({}, {}, lambda: options.override(disable={"recompute": ""})),
    "inputs that are kept": (
        {},
        {},
        lambda: options.override(enable={**options.get("enable"), "keep_inputs": ""}),
    ),
    "autocast": ({}, {}, lambda: autocast(torch.bfloat16)),
    "the default dtype": ({}, {}, lambda: default_dtype(torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_hit_where_something_differs(made, change):
    values, of_inputs, context = CHANGES[change]

    def once(values, of_inputs):
        tsfuser.reset()
        given, text = operands(**of_inputs), SOURCE.format(**{**PLAIN, **values})
        called = script(text)
        made.clear()
        with tsfuser.fuser():
            for _ in range(4):
                found = called(*given)
                gradients = torch.autograd.grad(found.sum(), [t for t in given if t.requires_grad])
        with torch.jit.fuser("none"):
            wanted = script(text)(*given)
            of_eager = torch.autograd.grad(wanted.sum(), [t for t in given if t.requires_grad])
        for mine, eagers in zip((found, *gradients), (wanted, *of_eager)):
            assert mine.dtype == eagers.dtype
            assert_matches(mine, eagers, ops=400)
        return len(made)

    assert once({}, {})
    with context():
        assert once(values, of_inputs)
    assert not once({}, {})


def test_all_of_autocast_is_in_the_key():
    """The CPU's as well, by which dtypes of results are asked, whatever the device of the inputs."""
    graph = torch._C.parse_ir("""graph(%x : Float(3, strides=[1], device=cuda:0)):
  %y : Tensor = aten::relu(%x)
  return (%y)""")

    def key():
        return joint_door._place(graph, [True], [None]).key

    keys = [key()]
    for kind in ("cpu", "cuda"):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype) if kind == "cpu" else _on(kind, dtype):
                keys.append(key())
    assert len(set(keys)) == len(keys) and key() == keys[0]


@contextlib.contextmanager
def _on(kind, dtype):
    """Autocast of devices that need not be there."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def test_numbers_and_masks_are_in_the_key():
    graph = torch._C.parse_ir("""graph(%x : Float(3, strides=[1], device=cpu), %n : int):
  %y : Tensor = aten::sum(%x)
  return (%y)""")
    given = [([True], [None, 1]), ([True], [None, 2]), ([True], [None, 1.0]), ([False], [None, 1])]
    given += [([True], [None, True]), ([True], [None, -0.0]), ([True], [None, 0.0]), ([True], [None, [1]])]
    keys = [joint_door._place(graph, *each).key for each in given]
    assert len(set(keys)) == len(keys)


def test_ops_of_other_libraries_are_not_kept():
    """Python says what they give."""
    with torch.library._scoped_library("stored_joint", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        graph = torch._C.parse_ir("""graph(%x : Float(3, strides=[1], device=cpu)):
  %y : Tensor = stored_joint::twice(%x)
  return (%y)""")
        assert joint_door._place(graph, [True], [None]) is None
