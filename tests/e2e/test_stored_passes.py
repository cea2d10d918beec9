"""What passes have made of scripted programs is read from disk, and only where nothing differs."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.stored_graphs import arguments, default_dtype, empty_store
from kit.support import (
    all_graphs,
    assert_matches,
    counted,
    fuse,
    groups,
    no_fallback,
    run_python,
    script,
    train,
)
from tsfuser import _C, options
from tsfuser.frontends.torchscript import passes, stored_passes
from tsfuser.frontends.torchscript.training import differentiable
from tsfuser.joint.packing import pack
from tsfuser.planning import compile

TEXTS = {
    "chain": "(x * 2.5 + y).relu()",
    "norm": "torch.nn.functional.layer_norm(x, [40], y) + x",
    "parts": "torch.cat([x + 1, x * y], 1).flip([0]) * 2",
    "sizes": "(x + y).view(x.size(1), x.size(0)) * x.size(0)",
    "branch": "(x * y).tanh() if n > 3 else (x + y).sigmoid() * 2",
    "product": "torch.nn.functional.gelu(x @ x.t() * 0.5).sum() * y",
    "dropout": "torch.nn.functional.dropout(x * y, 0.0, True) + y",
    "write": "(x * y).add_(1).mul_(x)",
    "nothing": "x @ x.t()",
}
TRAINED = ["chain", "norm", "parts", "sizes", "product"]


def program(name):
    return script(f"def f(x: Tensor, y: Tensor, s: float, n: int):\n    return {TEXTS[name]}\n")


@pytest.fixture(autouse=True)
def store(tmp_path):
    """An empty disk cache in which graphs are kept."""
    with empty_store(tmp_path / "cache", stored_graphs=True) as folder, no_fallback():
        yield folder


@pytest.fixture
def forbidden(monkeypatch):
    """A function after which no pass runs: as in a process whose graphs are all on disk."""

    def forbid():
        tsfuser.reset()
        for module in (passes, differentiable):
            monkeypatch.setattr(module, "run", lambda *_: pytest.fail("a pass ran again"))

    return forbid


def files(store):
    return sorted(store.glob("??/*.pass"))


@pytest.mark.parametrize("name", TEXTS)
def test_a_second_process_runs_no_pass(forbidden, name):
    inputs = arguments()
    first = fuse(program(name), *inputs)
    wanted = first(*inputs)
    forbidden()
    with counted() as rise:
        second = fuse(program(name), *inputs)
    found = second(*inputs)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    assert rise["graphs_read"] > 0 and not rise["passes_failed"]
    assert len(groups(second)) == len(groups(first))
    ids = [sorted(node.i("cache_id") for node in groups(f)) for f in (first, second)]
    assert ids[0] == ids[1]  # and so their plans
    assert texts(second) == texts(first)


def texts(scripted):
    return list(map(canonical, all_graphs(scripted)))


def canonical(graph):
    """Its text without names of values."""
    return torch._C._jit_pass_canonicalize(graph, False).str(False)


@pytest.mark.parametrize("name", TRAINED)
def test_a_second_process_that_trains_runs_no_pass(forbidden, name):
    x, y, *numbers = arguments()
    inputs = (x.requires_grad_(), y.requires_grad_(), *numbers)

    def run():
        scripted = program(name)
        with tsfuser.fuser():
            return train(scripted, inputs), len(groups(scripted))

    (wanted, gradients), count = run()
    forbidden()
    with counted() as rise:
        (found, of_found), again = run()
    assert torch.equal(found, wanted) and all(map(torch.equal, of_found, gradients))
    assert rise["graphs_read"] >= 3 and count == again > 0
    plain = program(name)
    with torch.jit.fuser("none"):
        reference, of_reference = train(plain, inputs)
    for mine, eagers in zip((found, *of_found), (reference, *of_reference)):
        assert_matches(mine, eagers, ops=40)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.rate = nn.Linear(8, 8), nn.LayerNorm(8), 0.0

    def forward(self, x):
        y = F.gelu(self.norm(x)) * 2
        return x + F.dropout(self.up(y), self.rate, self.training).sigmoid()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("training", [False, True])
def test_modules_whose_classes_have_other_numbers(forbidden, training):
    x = torch.randn(5, 8)
    net, recursive = Net().train(training), torch.jit._recursive

    def run():
        recursive.concrete_type_store = recursive.ConcreteTypeStore()  # new classes, under new names
        scripted = torch.jit.script(net)
        net.zero_grad()
        with tsfuser.fuser():
            for _ in range(4):
                with torch.set_grad_enabled(training):
                    y = scripted(x)
        if training:
            y.sum().backward()
        return y, [p.grad for p in net.parameters()]

    wanted = run()
    forbidden()
    with counted() as rise:
        found = run()
    assert rise["graphs_read"] > 0
    assert torch.equal(found[0], wanted[0])
    assert not training or all(map(torch.equal, found[1], wanted[1]))


def test_frozen_modules_keep_their_tensors(forbidden):
    net, x = Block().eval(), torch.randn(5, 8)

    def frozen():
        return torch.jit.freeze(torch.jit.script(net))

    with torch.no_grad():
        fuse(frozen(), x)
        forbidden()
        with counted() as rise:
            module = frozen()
            found = fuse(module, x)(x)
        assert_matches(found, net(x), ops=40)
    assert rise["graphs_read"] > 0
    mine = {n.t("value").data_ptr() for n in module.graph.findAllNodes("prim::Constant") if _is_tensor(n)}
    state = torch.jit.last_executed_optimized_graph()
    used = {n.t("value").data_ptr() for n in state.findAllNodes("prim::Constant", True) if _is_tensor(n)}
    assert mine and used <= mine


def _is_tensor(node):
    return node.hasAttribute("value") and node.kindOf("value") == "t"


def test_errors_name_the_program(forbidden):
    def f(x, y):
        z = x.relu() * 2
        return torch.mm(z.sigmoid() + 1, y)  # a line of this file

    good, bad = (torch.randn(4, 5), torch.randn(5, 2)), (torch.randn(4, 5), torch.randn(3, 2))
    messages = []
    for _ in range(2):
        scripted = fuse(f, *good)
        with pytest.raises(RuntimeError) as error:
            scripted(*bad)
        messages.append(str(error.value))
        forbidden()
    assert messages[0] == messages[1] and "a line of this file" in messages[0]


SOURCE = "def f(x: Tensor, y: Tensor):\n    return (x * 2.5 + y).relu().sum({dim}) * {scale}\n"
PLAIN = {"dim": 0, "scale": 3.0}


@contextlib.contextmanager
def skipping(kind):
    before = set(options.state.skip_kinds)
    options.state.skip_kinds.add(kind)
    try:
        yield
    finally:
        options.state.skip_kinds.clear()
        options.state.skip_kinds.update(before)


CHANGES = {
    "a constant": ({"scale": 3.5}, {}, contextlib.nullcontext),
    "a dim": ({"dim": 1}, {}, contextlib.nullcontext),
    "a size": ({}, {"rows": 25}, contextlib.nullcontext),
    "a dtype": ({}, {"dtype": torch.float64}, contextlib.nullcontext),
    "an option": ({}, {}, lambda: options.override(disable={"recompute": ""})),
    "a kind that is skipped": ({}, {}, lambda: skipping("aten::relu")),
    "the default dtype": ({}, {}, lambda: default_dtype(torch.float64)),
    "no grad": ({}, {}, torch.no_grad),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_hit_where_something_differs(change):
    values, of_inputs, context = CHANGES[change]

    def run(values, of_inputs):
        x, y = arguments(**of_inputs)[:2]
        text = SOURCE.format(**{**PLAIN, **values})
        scripted = fuse(script(text), x, y)
        with torch.no_grad():
            assert_matches(scripted(x, y), script(text)(x, y), ops=40)

    with counted() as rise:
        run({}, {})
    assert rise["graphs_read"] == 0
    with counted() as rise, context():
        run(values, of_inputs)
    assert rise["graphs_read"] == 0
    with counted() as rise:
        run({}, {})
    assert rise["graphs_read"] > 0


def test_equal_layers_are_one_graph(monkeypatch):
    """Names of values differ, and lines of source are those of each layer's place."""
    layer = "    x = torch.mm((x * y + 1).relu(), w)\n"
    text = f"def f(x: Tensor, y: Tensor, w: Tensor):\n{4 * layer}    return x\n"
    x, y, w = torch.randn(4, 6, requires_grad=True), torch.randn(6), torch.randn(6, 6)
    ran = []
    real = differentiable.run
    monkeypatch.setattr(differentiable, "run", lambda *a: ran.append(a) or real(*a))
    scripted = script(text)
    with tsfuser.fuser():
        found, gradients = train(scripted, (x, y, w))
    with torch.jit.fuser("none"):
        wanted, of_eager = train(script(text), (x, y, w))
    assert_matches(found, wanted, ops=200)
    assert_matches(gradients[0], of_eager[0], ops=200)
    assert len(ran) < len(groups(scripted)) - 1


@pytest.mark.parametrize("word", ["graph_fuser", "partition", "parser"])
def test_who_looks_at_passes_sees_them(word):
    inputs = arguments()
    fuse(program("chain"), *inputs)
    with counted() as rise, options.override(log_levels={word: 1}):
        fuse(program("chain"), *inputs)
    assert rise["graphs_read"] == 0
    assert tsfuser.explain(program("chain"), *inputs).groups


@pytest.mark.parametrize("choice", [{"stored_graphs": False}, {"enable": {"eager_random": ""}}])
def test_nothing_is_kept(store, choice):
    """Without the option; nor where passes ask the GPU."""
    with options.override(**choice):
        fuse(program("chain"), *arguments())
    assert not files(store)


@pytest.mark.parametrize("spoil", [lambda b: b[:-9], lambda b: b[:40] + b"x" + b[41:], lambda b: b""])
def test_damaged_files_are_made_anew(store, spoil):
    inputs = arguments()
    wanted = fuse(program("norm"), *inputs)(*inputs)
    for path in files(store):
        path.write_bytes(spoil(path.read_bytes()))
    stored_passes.forget()
    with counted() as rise:
        found = fuse(program("norm"), *inputs)(*inputs)
    assert rise["graphs_read"] == 0 and torch.equal(found, wanted)
    stored_passes.forget()
    with counted() as rise:
        fuse(program("norm"), *inputs)
    assert rise["graphs_read"] > 0


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x02).", b"\x80\x02K\x01."])
def test_content_that_is_no_graph_is_a_miss(monkeypatch, content):
    graph = program("chain").graph
    place = stored_passes.place_of("graph_pass", [graph])
    monkeypatch.setattr(stored_passes.marshal, "loads", lambda _: (content, ()))
    compile.cache_in(place.folder).put(place.key, ".pass", b"x")
    found = place.find()
    assert found is None or not found.graphs


def test_what_is_not_in_the_graph_is_not_kept():
    @torch.jit.ignore
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def f(x):
        return (outside(x) * 2).relu() + 1

    x = torch.randn(4, 5)
    with counted() as rise:
        for _ in range(2):
            scripted = fuse(f, x)
    assert torch.equal(scripted(x), f(x)) and rise["graphs_read"] == 0
    with pytest.raises(ValueError, match="function of Python"):
        _C.graphs_text([scripted.graph])


def test_two_processes(store, tmp_path):
    code = """
import torch, tsfuser
def f(x, y):
    return torch.nn.functional.layer_norm(x * 2, [8], y).relu() + x
x, y = torch.arange(40.).view(5, 8).requires_grad_(), torch.ones(8)
scripted = torch.jit.script(f)
with tsfuser.fuser():
    for _ in range(4):
        x.grad = None
        z = scripted(x, y); z.sum().backward()
print(tsfuser.stats()["graphs_read"], z.double().sum().item(), x.grad.double().abs().sum().item())
"""
    settings = {"TSFUSER_CACHE_DIR": str(store), "TSFUSER_STORED_GRAPHS": "1"}
    first, second = (run_python(tmp_path, code, **settings)[1].split() for _ in range(2))
    assert first[0] == "0" and int(second[0]) >= 3 and first[1:] == second[1:]


TEXT = """graph(%x : Float(3, 5, strides=[5, 1], requires_grad=0, device=cpu), %n : int, %c : bool):
  %one : int = prim::Constant[value=1]()
  %f : float = prim::Constant[value=0.5]()
  %list : int[] = prim::Constant[value=[1, 2]]()
  %a : Tensor = aten::add(%x, %x, %one)
  %b : Tensor = prim::If(%c)
    block0():
      %p : Tensor = aten::mul(%a, %f)
      -> (%p)
    block1():
      -> (%a)
  %r : Tensor = aten::sum(%b, %list, %c, %n)
  return (%b)"""
OTHERS = [
    ("value=1]", "value=2]"),
    ("0.5]", "-0.5]"),
    ("[1, 2]", "[2, 1]"),
    ("Float(3", "Float(4"),
    ("strides=[5, 1]", "strides=[1, 3]"),
    ("requires_grad=0", "requires_grad=1"),
    ("Float(", "Double("),
    ("device=cpu", "device=cuda:0"),
    ("aten::mul(%a, %f)", "aten::div(%a, %f)"),
    ("aten::add", "aten::sub"),
    ("-> (%a)", "-> (%x)"),
    ("return (%b)", "return (%a)"),
    ("return (%b)", "return (%b, %a)"),
    ("%n : int", "%n : int?"),
    ("%c : bool", "%c : bool, %m : int"),
]


def test_texts_tell_graphs_apart():
    def text(source):
        return _C.graphs_text(
            [torch._C.parse_ir(source.replace("%r : Tensor = aten::sum(%b, %list, %c, %n)\n", "\n"))]
        )

    texts = [text(TEXT)]
    for old, new in OTHERS:
        assert old in TEXT
        texts.append(text(TEXT.replace(old, new)))
    assert len(set(texts)) == len(texts) and text(TEXT) == texts[0]


def test_texts_say_which_values_are_marked():
    """Names of joint graphs' inputs say what the program does with them; others are no part of the key."""

    def text(first, second):
        return _C.graphs_text(
            [
                torch._C.parse_ir(f"""graph(%{first} : Tensor, %{second} : Tensor):
  %y : Tensor = aten::mul(%{first}, %{second})
  return (%y)""")
            ]
        )

    marked = [("a.written", "b"), ("b", "a.written"), ("a.laid_out", "b"), ("a.joint_part", "b")]
    marked += [("a.written.laid_out", "b"), ("a.written", "b.written"), ("a", "b")]
    assert len({text(*names) for names in marked}) == len(marked)
    for first, second in marked:
        assert text(first, second) == text(f"q{first[1:]}", f"r{second[1:]}")


def test_packed_joint_graphs_come_back():
    """With lists of graphs, and the differentiable node's attributes."""
    source = torch._C.parse_ir("""graph(%x : Float(3, 5, strides=[5, 1], requires_grad=1, device=cpu),
      %w : Float(5, strides=[1], requires_grad=1, device=cpu)):
  %s : Float(3, 5, strides=[5, 1], requires_grad=1, device=cpu) = aten::sigmoid(%x)
  %y : Float(3, 5, strides=[5, 1], requires_grad=1, device=cpu) = aten::mul(%s, %w)
  %z : Float(3, 5, strides=[5, 1], requires_grad=1, device=cpu) = aten::tanh(%y)
  return (%z)""")
    packed = pack(source.copy(), [True, True])
    (back,) = _C.read_made(_C.write_made([packed], [source]), [source])
    assert canonical(back) == canonical(packed)
    nodes = [graph.findNode("prim::DifferentiableGraph") for graph in (packed, back)]
    assert nodes[0].attributeNames() == nodes[1].attributeNames()
    for name in nodes[0].attributeNames():
        kind = nodes[0].kindOf(name)
        mine, its = (getattr(node, kind)(name) for node in nodes)
        if kind in ("g", "gs"):
            mine, its = (list(map(canonical, each if kind == "gs" else [each])) for each in (mine, its))
        assert mine == its
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    found = torch._C._create_function_from_graph("f", back)(x, w)
    wanted = (x.sigmoid() * w).tanh()
    assert_matches(found, wanted, ops=8)
    for mine, eagers in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (found, wanted))):
        assert_matches(mine, eagers, ops=40)


def test_threads_read_one_graph(forbidden):
    from concurrent.futures import ThreadPoolExecutor

    inputs = arguments()
    wanted = fuse(program("norm"), *inputs)(*inputs)
    forbidden()
    with tsfuser.fuser(), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: last_of(program("norm"), inputs), range(8)))
    assert all(torch.equal(y, wanted) for y in found)


def last_of(scripted, inputs):
    for _ in range(4):
        y = scripted(*inputs)
    return y
