"""Walks through a program's kernels thread by thread and checks what their threads touch.

In: the stages of a call and their allocations. Out: nothing, or an AssertionError where an access leaves its
tensor, is less aligned than its width, or an element is stored twice or never. Example:
`walk(*planned(program, tensor(4, 8)))`.
"""

from collections import Counter
from dataclasses import replace

from kit.programs import build, check_kernel, stages
from tsfuser.ir import size as sz
from tsfuser.ir.dtypes import DTYPES
from tsfuser.lower import index as ix
from tsfuser.lower.loop_ir import Fetch, For, If, Let, Load, Place, Store
from tsfuser.lower.pipeline import lower
from tsfuser.schedule.machine import GPU

_ITEM = {d.ctype: d.itemsize for d in DTYPES.values()}


def _quotient(a, b):
    assert a >= 0 and b > 0, f"a quotient of {a} and {b}, which C++ takes as numbers without signs"
    return a // b


def planned(program, *args, machine=GPU):
    """(call, allocations as (sizes, strides), kernels) of `program`, every pass verified."""
    device = "cuda:0" if machine.has_threads else "cpu"
    call, fusion = build(program, *(replace(a, device=device) for a in args), device=device)
    found, temporaries = stages(call, fusion, machine)
    kernels = [lower(s.segment, s.schedule, s.segment.name, check_kernel) for s in found]
    return call, [(o.sizes, o.strides) for o in (*fusion.outputs, *temporaries)], kernels


def walk(call, allocations, kernels, whole=True):
    """All threads if `whole`, which then have to store every element; else the first and last few blocks,
    threads and iterations."""
    _compiled.clear()
    walker = _Walker(call, [tuple([call.value(x) for x in part] for part in a) for a in allocations], whole)
    for kernel in kernels:
        walker.kernel(kernel)
    assert max(walker.stored.values(), default=1) == 1, f"stored twice: {walker.stored.most_common(3)}"
    if whole:
        # where blocks meet
        met = {p.source[1] for kernel in kernels for p in kernel.params if p.source[0] == "cleared"}
        for k, (sizes, _) in enumerate(walker.allocations):
            if k in met:
                continue
            count = sum(1 for i, _ in walker.stored if i == k)
            expected = call.value(sz.product(sizes))
            assert count == expected, f"{count} of the {expected} elements of allocation {k} are stored"


class _Walker:
    def __init__(self, call, allocations, whole):
        self.call, self.allocations, self.whole = call, allocations, whole
        self.stored = Counter()

    def some(self, count):
        return range(count) if self.whole or count <= 4 else sorted({0, 1, count // 2, count - 2, count - 1})

    def kernel(self, kernel):
        self.tiles = {t.name: t for t in kernel.tiles}
        self.where = {f"args.{p.name}": p.source for p in kernel.params if p.is_pointer}
        fields = {
            f"args.{p.name}": self.call.value(p.source[1]) for p in kernel.params if p.source[0] == "size"
        }
        grid, x, y = (self.call.value(size) for size in (kernel.grid, kernel.block_x, kernel.block_y))
        assert grid == 0 or 0 < x * y <= max(kernel.threads, 1)
        for block in self.some(grid):
            for ty in self.some(y):
                for tx in self.some(x):
                    names = {
                        "blockIdx.x": block,
                        "threadIdx.x": tx,
                        "threadIdx.y": ty,
                        "blockDim.x": x,
                        "blockDim.y": y,
                    }
                    self.body(kernel.body, {**fields, **names})

    def body(self, body, env):
        for s in body:
            if isinstance(s, Let):
                env[_key(s.name, env)] = evaluate(s.value, env)
            elif isinstance(s, Place):
                env[_key(s.name, env)] = self.place(s, env)
            elif isinstance(s, For):
                for i in self.some(evaluate(s.extent, env)):
                    env[s.var] = i
                    self.body(s.body, env)
            elif isinstance(s, If):
                self.body(s.yes if evaluate(s.condition, env) else s.no, env)
            elif isinstance(s, Fetch):
                self.fetch(s, env)
            elif (
                isinstance(s, (Load, Store)) and not s.shared and (s.guard is None or evaluate(s.guard, env))
            ):
                count = s.lanes if s.count is None else max(0, min(s.lanes, evaluate(s.count, env)))
                self.access(s, evaluate(s.offset, env), count)

    def place(self, s, env):
        """As if all indices were the largest that there may be: what is touched then is in bounds, and
        aligned."""
        largest = int(s.extent) if s.extent.isdigit() else env[s.extent]
        return (
            (largest - 1) * evaluate(s.step, env) if s.guard is None or evaluate(s.guard, env) else s.missing
        )

    def fetch(self, s, env):
        """What is fetched lies in the tensor, and its copy in its tile, aligned."""
        tile, place = self.tiles[s.prefetched], evaluate(s.place, env)
        assert 0 <= place <= tile.rows * tile.pitch - s.lanes and place % s.lanes == 0, (
            f"{s} fills [{place}, +{s.lanes}] of {tile}"
        )
        if s.guard is None or evaluate(s.guard, env):
            self.access(
                Load("", tile.ctype, s.buffer, s.offset, lanes=s.lanes), evaluate(s.offset, env), s.lanes
            )

    def access(self, s, offset, count):
        kind, k = self.where[s.buffer]
        if kind in ("input", "update"):
            tensor = self.call.args[k]
            sizes, strides, alignment = tensor.sizes, tensor.strides, tensor.alignment
        else:
            (sizes, strides), alignment = self.allocations[k], 256
        end = 0 if 0 in sizes else 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides))
        assert count == 0 or 0 <= offset <= end - count, f"{s} touches [{offset}, +{count}] of {end}"
        width = min(16, s.lanes * _ITEM[s.ctype])
        whole = s.lanes > 1 and count == s.lanes
        assert not whole or (offset * _ITEM[s.ctype] % width == 0 and alignment % width == 0), (
            f"{s} is misaligned at {offset}"
        )
        if isinstance(s, Store) and kind == "allocation":
            self.stored.update((k, offset + lane) for lane in range(count))


def _key(name, env):
    """`x_v[u]` -> `x_v[2]`."""
    base, _, index = name.partition("[")
    return name if not index else f"{base}[{env.get(index[:-1], index[:-1])}]"


def evaluate(e, env):
    """The value of an index expression."""
    found = _compiled.get(id(e))
    if found is None:
        names = {"min": min, "quotient": _quotient}
        # with the expression, or another one may get its id
        found = _compiled[id(e)] = eval(f"lambda env: {_source(e)}", names), e
    return found[0](env)


_compiled = {}  # id of an expression -> its function of the variables, and itself; of one walk


def _source(e):
    """The expression in Python."""
    if isinstance(e, ix.Const):
        return str(e.value)
    if isinstance(e, ix.Var):
        base, _, index = e.name.partition("[")
        place = index[:-1]
        return f"env[{e.name!r}]" if not index else f"env['{base}[%s]' % env.get({place!r}, {place!r})]"
    if isinstance(e, ix.Select):
        return f"({_source(e.yes)} if {_source(e.condition)} else {_source(e.no)})"
    a, b = _source(e.a), _source(e.b)
    if e.op in ("min", "quotient"):
        return f"{e.op}({a}, {b})"
    return f"({a} { {'&&': 'and', '/': '//'}.get(e.op, e.op) } {b})"
