"""Graphs that run as lists of steps do what torch's interpreter does (csrc_stubs/group/step_list.h)."""

import gc
import random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kit.native_support import ADD, refusing_plan
from tsfuser import _C

CONSTANTS = """
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %three : int = prim::Constant[value=3]()
  %none : NoneType = prim::Constant()
"""

#: Bodies of graphs of %x, %y : Tensor, %n : int and %p : bool.
BODIES = {
    "an outer tensor is read in each turn": """
  %r : Tensor = prim::Loop(%n, %yes, %x)
    block0(%i : int, %a : Tensor):
      %b : Tensor = aten::mul(%a, %y)
      %c : Tensor = aten::add(%b, %x, %one)
      -> (%yes, %c)
  return (%r)""",
    "the number of the turn": """
  %r : Tensor, %s : int = prim::Loop(%n, %yes, %x, %zero)
    block0(%i : int, %a : Tensor, %t : int):
      %b : Tensor = aten::add(%a, %i, %one)
      %u : int = aten::add(%t, %i)
      -> (%yes, %b, %u)
  return (%r, %s)""",
    "both change places": """
  %r : Tensor, %s : Tensor = prim::Loop(%n, %yes, %x, %y)
    block0(%i : int, %a : Tensor, %b : Tensor):
      -> (%yes, %b, %a)
  return (%r, %s)""",
    "each needs both of the last turn": """
  %r : Tensor, %s : Tensor = prim::Loop(%n, %yes, %x, %y)
    block0(%i : int, %a : Tensor, %b : Tensor):
      %c : Tensor = aten::add(%a, %b, %one)
      -> (%yes, %b, %c)
  return (%r, %s)""",
    "a condition ends it, or it is not begun": """
  %r : Tensor = prim::Loop(%n, %p, %x)
    block0(%i : int, %a : Tensor):
      %b : Tensor = aten::mul(%a, %y)
      %more : bool = aten::lt(%i, %one)
      -> (%more, %b)
  return (%r)""",
    "what is handed on is not read": """
  %r : Tensor, %s : Tensor = prim::Loop(%n, %yes, %x, %y)
    block0(%i : int, %a : Tensor, %b : Tensor):
      %c : Tensor = aten::neg(%y)
      -> (%yes, %c, %y)
  return (%r)""",
    "constants are handed on": """
  %r : int, %s : bool = prim::Loop(%n, %yes, %zero, %p)
    block0(%i : int, %a : int, %b : bool):
      -> (%yes, %three, %no)
  return (%r, %s)""",
    "one value is handed on twice": """
  %r : Tensor, %s : Tensor = prim::Loop(%n, %yes, %x, %x)
    block0(%i : int, %a : Tensor, %b : Tensor):
      %c : Tensor = aten::add(%a, %b, %i)
      -> (%yes, %c, %c)
  %t : Tensor = aten::sub(%r, %s, %three)
  return (%t, %r)""",
    "loops in a loop": """
  %r : Tensor = prim::Loop(%n, %yes, %x)
    block0(%i : int, %a : Tensor):
      %b : Tensor = prim::Loop(%i, %yes, %a)
        block0(%j : int, %c : Tensor):
          %d : Tensor = aten::add(%c, %y, %i)
          %e : Tensor = aten::mul(%d, %a)
          -> (%yes, %e)
      %f : Tensor = prim::Loop(%three, %p, %b)
        block0(%k : int, %g : Tensor):
          %h : Tensor = aten::sub(%g, %a, %k)
          -> (%p, %h)
      -> (%yes, %f)
  return (%r)""",
    "a choice in a loop": """
  %z : Tensor = aten::neg(%y)
  %w : Tensor = aten::exp(%y)
  %r : Tensor = prim::Loop(%n, %yes, %x)
    block0(%i : int, %a : Tensor):
      %first : bool = aten::eq(%i, %one)
      %b : Tensor = prim::If(%first)
        block0():
          %c : Tensor = aten::mul(%a, %z)
          -> (%c)
        block1():
          %d : Tensor = aten::add(%w, %a, %i)
          -> (%d)
      -> (%yes, %b)
  return (%r)""",
    "a loop in one branch of a choice": """
  %z : Tensor = aten::neg(%y)
  %r : Tensor = prim::If(%p)
    block0():
      %b : Tensor = prim::Loop(%n, %yes, %x)
        block0(%i : int, %a : Tensor):
          %c : Tensor = aten::mul(%a, %z)
          -> (%yes, %c)
      -> (%b)
    block1():
      %d : Tensor = aten::add(%x, %y, %one)
      -> (%d)
  %s : Tensor = aten::mul(%r, %z)
  return (%s)""",
    "an outer value is read behind the loop, too": """
  %z : Tensor = aten::neg(%y)
  %r : Tensor = prim::Loop(%n, %yes, %z)
    block0(%i : int, %a : Tensor):
      %b : Tensor = aten::mul(%a, %z)
      -> (%yes, %b)
  %s : Tensor = aten::sub(%r, %z, %one)
  return (%s)""",
    "a loop that only computes an operand": """
  %r : Tensor = prim::Loop(%n, %yes, %x)
    block0(%i : int, %a : Tensor):
      %b : Tensor = aten::sub(%a, %x, %three)
      -> (%yes, %b)
  tsfuser::loop_end()
  %s : Tensor = aten::add(%x, %r, %one)
  return (%s)""",
    "lists of numbers and of tensors": """
  %size : int[] = aten::size(%x)
  %axis : int = aten::__getitem__(%size, %zero)
  %sizes : int[] = prim::ListConstruct(%axis, %axis)
  %z : Tensor = aten::expand(%x, %sizes, %no)
  %all : Tensor[] = prim::ListConstruct(%z, %y, %x)
  %r : Tensor = aten::cat(%all, %zero)
  %lengths : int[] = prim::ListConstruct(%axis, %three, %three)
  %parts : Tensor[] = aten::split_with_sizes(%r, %lengths, %zero)
  %s : Tensor, %t : Tensor, %u : Tensor = prim::ListUnpack(%parts)
  return (%s, %u, %r)""",
    "a list that lacks tensors": """
  %size : int[] = aten::size(%x)
  %where : Tensor = aten::arange(%three, %none, %none, %none, %none)
  %at : Tensor?[] = prim::ListConstruct(%none, %where)
  %r : Tensor = aten::index(%x, %at)
  return (%r)""",
}


def graph_of(body):
    return torch._C.parse_ir(f"graph(%x : Tensor, %y : Tensor, %n : int, %p : bool):{CONSTANTS}{body}")


DICT = "\n  %dict : Dict(str, Tensor) = prim::DictConstruct()"  # only torch's interpreter knows it


def program_of(body, donated=()):
    graph = graph_of(body)
    results = list(range(len(list(graph.outputs()))))
    return _C.GraphProgram(graph, [], [], results, [None] * len(results), lambda: True, list(donated))


def steps_of(body, donated=()):
    run = program_of(body, donated)
    assert run.is_list_of_steps
    return run


@pytest.mark.parametrize("body", BODIES)
def test_results_are_those_of_torchs_interpreter(body):
    torch.manual_seed(0)
    run, expected = steps_of(BODIES[body]), program_of(DICT + BODIES[body])
    assert not expected.is_list_of_steps
    for n in (0, 1, 2, 5):
        for p in (False, True):
            args = [torch.rand(3, 3), torch.rand(3, 3), n, p]
            before = [x.clone() for x in args[:2]]
            for mine, theirs in zip(run(list(args)), expected(list(args)), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert all(torch.equal(x, y) for x, y in zip(args, before))


class Body:
    """A random graph: ops, choices and loops in each other, over tensors, ints and bools that they see."""

    def __init__(self, seed):
        self.random, self.lines, self.count = random.Random(seed), [], 0
        seen = {"Tensor": ["%x", "%y"], "int": ["%n", "%one", "%zero"], "bool": ["%p", "%no", "%yes"]}
        self.nodes(seen, 1, 7)
        results = [name for names in seen.values() for name in names if name[1:].isdigit()]
        results = self.random.sample(results, min(4, len(results))) + ["%x"]
        self.text = "\n".join(["", *self.lines, f"  return ({', '.join(results)})"])

    def new(self):
        self.count += 1
        return f"%{1000 + self.count}"

    def add(self, depth, line):
        self.lines.append("  " * depth + line)

    def nodes(self, seen, depth, most):
        for _ in range(self.random.randint(1, most)):
            self.random.choice((self.op, self.op, self.question, self.choice, self.loop))(seen, depth)

    def op(self, seen, depth):
        a, b, i = (self.random.choice(seen[kind]) for kind in ("Tensor", "Tensor", "int"))
        made = self.new()
        self.add(depth, f"{made} : Tensor = aten::{self.random.choice(('add', 'sub'))}({a}, {b}, {i})")
        seen["Tensor"].append(made)

    def question(self, seen, depth):
        a, b = (self.random.choice(seen["int"]) for _ in range(2))
        made, summed = self.new(), self.new()
        self.add(depth, f"{made} : bool = aten::lt({a}, {b})")
        self.add(depth, f"{summed} : int = aten::sub({a}, {b})")
        seen["bool"].append(made)
        seen["int"].append(summed)

    def block(self, seen, depth, head, kinds, parameters=()):
        """A block that returns values of the `kinds`."""
        self.add(depth, head)
        inside = {kind: list(names) for kind, names in seen.items()}
        for name, kind in parameters:
            inside[kind].append(name)
        self.nodes(inside, depth + 1, 3)
        results = [self.random.choice(inside[kind][-4:]) for kind in kinds]
        self.add(depth + 1, f"-> ({', '.join(results)})")

    def made_of(self, seen, kinds):
        made = [self.new() for _ in kinds]
        for name, kind in zip(made, kinds):
            seen[kind].append(name)
        return ", ".join(f"{name} : {kind}" for name, kind in zip(made, kinds))

    def kinds(self):
        return self.random.choices(("Tensor", "Tensor", "int", "bool"), k=self.random.randint(1, 3))

    def choice(self, seen, depth):
        if depth > 5:
            return
        kinds, place = self.kinds(), len(self.lines)
        condition = self.random.choice(seen["bool"])
        for k in range(2):
            self.block(seen, depth + 1, f"block{k}():", kinds)
        head = f"{self.made_of(seen, kinds)} = prim::If({condition})"
        self.lines.insert(place, "  " * depth + head)

    def loop(self, seen, depth):
        if depth > 5:
            return
        kinds, place = self.kinds(), len(self.lines)
        operands = [self.random.choice(seen[kind]) for kind in kinds]
        condition = self.random.choice(["%yes", *seen["bool"]])
        turn, *given = [(self.new(), kind) for kind in ("int", *kinds)]
        listed = ", ".join(f"{name} : {kind}" for name, kind in (turn, *given))
        self.block(seen, depth + 1, f"block0({listed}):", ("bool", *kinds), (turn, *given))
        head = f"prim::Loop(%three, {', '.join((condition, *operands))})"
        self.lines.insert(place, "  " * depth + f"{self.made_of(seen, kinds)} = {head}")
        self.add(depth, "tsfuser::loop_end()")  # without it torch's interpreter may lose operands


def test_random_graphs(request):
    several = 0
    for seed in range(5000 if request.config.getoption("--long") else 150):
        body = Body(seed).text
        run, expected = steps_of(body), program_of(DICT + body)
        several += "Loop" in body
        for n in (0, 2):
            args = [torch.full((2,), 3, dtype=torch.int64), torch.tensor([5, -7]), n, bool(seed % 2)]
            for mine, theirs in zip(run(list(args)), expected(list(args)), strict=True):
                assert mine == theirs if isinstance(mine, int) else torch.equal(mine, theirs), body
    assert several > 50


def test_an_error_leaves_the_next_call_as_it_was():
    run = steps_of(BODIES["an outer tensor is read in each turn"])
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        run([x, torch.rand(2, 2), 3, True])
    [result] = run([x, y, 1, True])
    assert torch.equal(result, x * y + x)


@pytest.mark.parametrize("line", [3, 8])  # of programs that share the group
def test_an_error_in_an_unfused_group_names_the_programs_line(native, line):
    native.set_planner(lambda group, args, varies: refusing_plan(native, 6, "for the test"))
    graph, subgraph = torch._C.Graph(), torch._C.parse_ir(ADD)
    values = [graph.addInput() for _ in range(2)]
    group = graph.create("prim::CudaFusionGroup", values, 1)
    [inner] = subgraph.findAllNodes("aten::add")
    _C.set_place(inner, "program.py", line, "a + b")
    group.g_("Subgraph", subgraph)
    graph.appendNode(group)
    graph.registerOutput(group.output())
    run = _C.GraphProgram(graph, [], [], [0], [None], lambda: True)
    x = torch.rand(3)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        run([x, torch.rand(2)])
    assert _C.take_failed_place() == f'File "program.py", line {line}: a + b'
    assert _C.take_failed_place() is None
    assert torch.equal(run([x, x])[0], x + x)


@pytest.mark.parametrize("node", ["aten::warn(%message, %three)", "prim::RaiseException(%message, %none)"])
def test_instructions_of_the_interpreter_go_there(node):
    run = program_of(f"""
  %message : str = prim::Constant[value="a message"]()
  {node}
  return (%x)""")
    assert not run.is_list_of_steps


def test_the_profiler_sees_the_graph():
    run = steps_of(BODIES["the number of the turn"])
    with torch.profiler.profile() as profile:
        run([torch.rand(3, 3), torch.rand(3, 3), 2, True])
    names = [event.name for event in profile.events()]
    assert "tsfuser_graph" in names and "aten::add" in names


def test_a_list_of_another_length_is_an_error():
    run = steps_of("""
  %parts : Tensor[] = aten::unbind(%x, %zero)
  %s : Tensor, %t : Tensor = prim::ListUnpack(%parts)
  return (%s, %t)""")
    x = torch.rand(3, 2)
    with pytest.raises(RuntimeError, match="Expected 2 elements in a list but found 3"):
        run([x, x, 0, True])
    assert torch.equal(run([x[:2], x, 0, True])[1], x[1])


@pytest.fixture
def watched():
    """An op that hands its operand on, and the memories of which it notes whether they are still there."""
    seen, memories = [], []

    def look(x):
        gc.collect()
        seen.append([not memory.expired() for memory in memories])
        return x.clone()

    library = torch.library.Library("tsfuser_test_steps", "DEF")
    library.define("look(Tensor x) -> Tensor")
    library.impl("look", look, "CPU")
    yield seen, memories
    library._destroy()


def test_an_input_that_nobody_reads_dies_at_once(watched):
    seen, memories = watched
    run = steps_of("\n  %a : Tensor = tsfuser_test_steps::look(%x)\n  return (%a)", donated=(0, 1))
    args = [torch.rand(64), torch.rand(64), 0, True]
    memories += [StorageWeakRef(x.untyped_storage()) for x in args[:2]]
    run(args)
    assert seen == [[True, False]]


#: In each turn the memory of %x is gone: the first turn has read it for the last time, or no turn reads it.
READ = "%b : Tensor = aten::mul(%a, %y)"
NOT_READ = "%b : Tensor = aten::neg(%y)"


@pytest.mark.parametrize("body", [pytest.param(READ, id="read"), pytest.param(NOT_READ, id="not read")])
@pytest.mark.parametrize("n", [0, 2])
def test_tensors_die_when_nobody_reads_them_any_more(watched, n, body):
    seen, memories = watched
    run = steps_of(
        f"""
  %r : Tensor = prim::Loop(%n, %yes, %x)
    block0(%i : int, %a : Tensor):
      {body}
      %c : Tensor = tsfuser_test_steps::look(%b)
      -> (%yes, %c)
  %s : Tensor = tsfuser_test_steps::look(%r)
  return (%s)""",
        donated=(0, 1),
    )
    args = [torch.rand(64), torch.rand(64), n, True]
    memories += [StorageWeakRef(x.untyped_storage()) for x in args[:2]]
    run(args)
    assert seen == [[False, True]] * n + [[n == 0, False]]
