"""Prints a Kernel as C++ for both targets.

In: Loop IR. Out: source text that includes `tsfuser.h` and defines one kernel. One method a statement; values
keep the names of their ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .. import ops  # noqa: F401  it defines the symbols
from ..ir.dtypes import DTYPES
from ..ir.symbols import filled, find
from ..lower.index import Const, Var, mul
from ..lower.kernel import Kernel, Param
from ..lower.loop_ir import (
    Accumulate,
    Accumulator,
    Array,
    AwaitCluster,
    Barrier,
    BlockReduce,
    BlockScan,
    ClusterReduce,
    ColumnReduce,
    Compute,
    CooperativeReduce,
    CooperativeSlots,
    Draw,
    Fetch,
    FetchGroup,
    FillTile,
    For,
    Hide,
    If,
    Let,
    Load,
    Pack,
    Place,
    Scratch,
    SetLane,
    Stmt,
    Store,
    Uniform,
)  # fmt: skip
from ..lower.traverse import statements

_CHECK = "in_range"  # and of the functions that check its indices
#: How a source begins in which the compiler may not contract `a * b + c` (ir/extremes.py).
WITHOUT_CONTRACTION = "// without contraction of a * b + c\n"


def source(kernel: Kernel, contract: bool = True) -> str:
    """The translation unit of `kernel`. `contract`: whether `a * b + c` may become one instruction where the
    target wants that."""
    return ("" if contract else WITHOUT_CONTRACTION) + _source(kernel)


def _source(kernel: Kernel) -> str:
    fields = _fields(kernel) or ["  char unused;"]
    tiles = ["  SHARED_MEMORY(shared);"] if kernel.shared else []
    tiles += [
        f"  {t.ctype}* const {t.name} = reinterpret_cast<{t.ctype}*>(shared + {t.offset});"
        for t in kernel.tiles
    ]
    tiles += [
        f"  const random_start {_start(f'args.{p.name}')} = start_of(args.{p.name});"
        for p in kernel.params
        if p.ctype == "random_state"
    ]
    tiles += _saved_seeds(kernel)
    tiles += [
        f"  fill_room<{kernel.index}>(blockIdx.x, gridDim.x, {arguments});" for arguments in kernel.rooms
    ]
    tiles += [f"  index_check {_CHECK}(args.{p.name});" for p in kernel.params if p.source == ("flag",)]
    bounds = f"{kernel.threads}, {kernel.resident}" if kernel.resident else kernel.threads
    overlap = (
        ["  launch_dependents();"]
        if kernel.leads
        else ["  wait_for_predecessor();"]
        if kernel.combines_partials
        else []
    )
    frame, begin = "KERNEL", []
    if kernel.cooperative:
        frame = "COOPERATIVE_KERNEL"
    if kernel.cluster:
        frame, bounds = "CLUSTER_KERNEL", f"{kernel.parts}, {bounds}"
        begin = [f"  begin_cluster({', '.join(_mailboxes(kernel))});"]
    lines = ['#include "tsfuser.h"', "", "struct Args {", *fields, "};", ""]
    # where there is a cluster, `tiles` begins with shared memory, where the mailboxes are
    body = [*overlap, *tiles[: len(begin)], *begin, *tiles[len(begin) :], *_block(kernel.body, 1), "}", ""]
    if kernel.batch_capacity:
        return "\n".join([*lines, *_batched(kernel, bounds, body)])
    return "\n".join([*lines, f"{frame}({kernel.name}, Args, {bounds}) {{", *body])


def _mailboxes(kernel: Kernel) -> list[str]:
    """Where the blocks of a cluster count what they are sent, for each exchange, and each half of it."""
    found: list[str] = []
    for s in statements(kernel.body):
        if isinstance(s, ClusterReduce):
            found += [f"shared + {at + s.mailbox}" for at in ((0, s.half) if s.iteration else (0,))]
        elif isinstance(s, ColumnReduce) and s.cluster:
            found.append(f"shared + {s.mailbox}")
    return list(dict.fromkeys(found))


def _fields(kernel: Kernel) -> list[str]:
    """The fields of the argument struct; the elements of an array are one."""
    lengths = Counter(p.array for p in kernel.params)
    plain = ((p, f"[{lengths[p.array]}]" if p.array else "") for p in kernel.params)
    return list(dict.fromkeys(f"  {p.ctype} {p.array or p.name}{length};" for p, length in plain))


def _saved_seeds(kernel: Kernel) -> list[str]:
    """Has the first thread store the seeds of random ops: as the state of another kernel they give the same
    numbers, as its stream 0 (runtime/philox.h)."""
    start = next((_start(f"args.{p.name}") for p in kernel.params if p.source == ("random",)), "")
    return [
        f"  if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) {{ "
        f"args.{p.name}[0] = stream_of({start}, {p.source[2]}).key(); "
        f"args.{p.name}[1] = stream_of({start}, {p.source[2]}).low * 4; }}"
        for p in kernel.params
        if p.source[0] == "seed"
    ]


def _batched(kernel: Kernel, bounds: str | int, body: list[str]) -> list[str]:
    """The source of a batched kernel, as `batched.py` shows it; `body`: of a block."""
    return [
        f"using Table = batched<Args, {kernel.batch_capacity}>;",
        "",
        f"DEVICE void {kernel.name}_block(const Args& args, int32_t batch_block) {{",
        *body,
        f"KERNEL({kernel.name}, Table, {bounds}) {{",
        "  const batch_place at = args.place_of(blockIdx.x);",
        f"  {kernel.name}_block(args.structs[at.index], at.block);",
        "}",
        "",
    ]


def _block(body: tuple[Stmt, ...], depth: int) -> list[str]:
    return [f"{'  ' * depth}{line}" for s in body for line in _PRINT[type(s)](s)]


def _assign(ctype: str, name: str, value: str) -> list[str]:
    """A new constant, or an element of an array that exists."""
    return [f"{name} = {value};" if "[" in name else f"{_constant(ctype)} {name} = {value};"]


def _constant(ctype: str) -> str:
    """The type of a value that is computed once; a pointer to constants stays as it is."""
    return ctype if ctype.startswith("const ") else f"const {ctype}"


def _let(s: Let) -> list[str]:
    return _assign(s.ctype, s.name, str(s.value))


def _address(pointer: str, offset) -> str:
    return (
        pointer
        if offset == Const(0)
        else f"{pointer} + {offset}"
        if isinstance(offset, (Var, Const))
        else f"{pointer} + ({offset})"
    )


def _load(s: Load) -> list[str]:
    if s.packed and s.lanes > 1:
        guard = "" if s.guard is None else f", {s.guard}"
        value = f"load_packed<{s.lanes}>({_address(s.buffer, s.offset)}{guard})"
        return _assign(f"packed<{s.ctype}, {s.lanes}>", s.name, value)
    if s.shared and s.lanes > 1:
        return _assign(
            f"vec<{s.ctype}, {s.lanes}>", s.name, f"load<{s.lanes}>({_address(s.buffer, s.offset)})"
        )
    address = _address(s.buffer, s.offset)
    if s.lanes > 1:
        given = "" if s.guard is None else f", {s.guard}"
        call = (
            f"load<{s.lanes}>({address}{given})"
            if s.count is None
            else f"load_upto<{s.lanes}>({address}, {s.count})"
        )
        return _assign(f"vec<{s.ctype}, {s.lanes}>", s.name, call)
    value = f"load_bool({address})" if s.ctype == "bool" else f"{s.buffer}[{s.offset}]"
    return _assign(s.ctype, s.name, value if s.guard is None else f"{s.guard} ? {value} : {s.ctype}{{}}")


def _place(s: Place) -> list[str]:
    known = f"{_CHECK}({s.index}, {s.extent})"
    return _assign(
        s.ctype,
        s.name,
        f"{known if s.guard is None else f'{s.guard} && {known}'} ? {mul(s.index, s.step)} : {s.missing}",
    )


def _start(state: str) -> str:
    """The kernel's name for where the random numbers of a field begin."""
    return state.removeprefix("args.")


def _uniform(s: Uniform) -> list[str]:
    if s.walk:
        return _eager(s)
    arguments = f"{_start(s.state)}, {s.stream}, {s.offset}"
    if s.lanes > 1:
        return _assign(f"vec<{s.ctype}, {s.lanes}>", s.name, f"uniform<{s.ctype}, {s.lanes}>({arguments})")
    return _assign(s.ctype, s.name, f"uniform<{s.ctype}>({arguments})")


def _eager(s: Uniform) -> list[str]:
    law, arguments = f"eager_{s.law}<{s.ctype}>", ", ".join([_start(s.state), *s.walk, str(s.offset)])
    if s.lanes > 1:
        return _assign(f"vec<{s.ctype}, {s.lanes}>", s.name, f"eager_numbers<{law}, {s.lanes}>({arguments})")
    return _assign(s.ctype, s.name, f"eager_number<{law}>({arguments})")


def _draw(s: Draw) -> list[str]:
    call = f"draw({s.name}_room, {_start(s.state)}, {s.stream}, {s.offset}, {s.count})"
    return [f"{s.ctype} {s.name}_room[{s.most + 8}];", f"const {s.ctype}* const {s.name} = {call};"]


def _compute(s: Compute) -> list[str]:
    operands = [f"{x}[{s.lane}]" if x in s.vectors else x for x in s.operands]
    arguments = [filled(a, operands) for a in s.arguments] or operands
    template = find(s.symbol).template(s.kind).replace("{ctype}", s.ctype)
    return _assign(s.ctype, s.name, filled(template, arguments))


def _store(s: Store) -> list[str]:
    address = _address(s.buffer, s.offset)
    if s.lanes > 1:
        value = s.value if s.register == s.ctype else f"convert_lanes<{s.ctype}>({s.value})"
        verb = "add_lanes" if s.adds else "store"
        call = (
            f"{verb}({address}, {value});"
            if s.count is None
            else f"{verb}_upto({address}, {value}, {s.count});"
        )
        return [call if s.guard is None else f"if ({s.guard}) {call}"]
    convert = "exactly" if s.exact else "convert"
    value = s.value if s.register == s.ctype else f"{convert}<{s.ctype}>({s.value})"
    target = f"add_at({address}, {value});" if s.adds else f"{s.buffer}[{s.offset}] = {value};"
    return [target if s.guard is None else f"if ({s.guard}) {target}"]


def _pack(s: Pack) -> list[str]:
    return [f"vec<{s.ctype}, {s.lanes}> {s.name};"]


def _set_lane(s: SetLane) -> list[str]:
    return [f"{s.name}[{s.lane}] = {s.value};"]


def _array(s: Array) -> list[str]:
    vector = "packed" if s.packed else "vec"
    ctype = f"{vector}<{s.ctype}, {s.lanes}>" if s.lanes > 1 else s.ctype
    return [f"{ctype} {s.name}[{s.extent}];"]


def _scratch(s: Scratch) -> list[str]:
    return [f"{s.ctype}* const {s.name} = scratch<{s.ctype}>(shared, {s.elements}, {s.bytes});"]


def _for(s: For) -> list[str]:
    hint = {
        "rows": ["#pragma unroll 1"],
        "unroll": ["#pragma unroll"],
        "group": ["#pragma unroll"],
        "vector": ["#pragma unroll"],
        "simd": ["SIMD_LOOP"],
    }.get(s.bind, [])
    hint = ["LANE_LOOP"] if s.bind == "simd" and isinstance(s.extent, Const) else hint
    index = s.ctype or (
        "int32_t"
        if s.bind in ("unroll", "group", "vector") or (s.bind == "serial" and isinstance(s.extent, Const))
        else "int64_t"
    )
    head = f"for ({index} {s.var} = 0; {s.var} < {s.extent}; ++{s.var}) {{"
    return [*hint, head, *_block(s.body, 1), "}"]


def _if(s: If) -> list[str]:
    no = ["} else {", *_block(s.no, 1)] if s.no else []
    return [f"if ({s.condition}) {{", *_block(s.yes, 1), *no, "}"]


def _barrier(s: Barrier) -> list[str]:
    return ["__syncthreads();"]


def _fill_tile(s: FillTile) -> list[str]:
    return [
        f"fill_tile<{s.pitch}>({s.tile}, {_address(s.buffer, s.offset)}, {s.stride}, {s.rows}, {s.columns});"
    ]


def _accumulator(s: Accumulator) -> list[str]:
    return [
        f"{s.ctype} {s.name}[{s.lanes}];",
        f"for (int32_t lane = 0; lane < {s.lanes}; ++lane) {s.name}[lane] = {s.identity};",
    ]


def _accumulate(s: Accumulate) -> list[str]:
    now = f"{s.name}[{s.lane}]"
    masked = s.guard is not None and s.identity
    value = f"(({s.guard}) ? {s.value} : {s.identity})" if masked else s.value
    line = f"{now} = {filled(find(s.combine).template(), (now, value, *s.others))};"
    return [line if s.guard is None or masked else f"if ({s.guard}) {line}"]


def _block_reduce(s: BlockReduce) -> list[str]:
    fold = [f"fold_lanes<{t.combine}, {s.fold}>({t.name});" for t in s.totals] if s.fold else []
    lanes = f", {s.fold}" if s.fold else ""
    if s.warp:
        return fold + [f"reduce_warp<{t.combine}, {s.warp}{lanes}>({t.name});" for t in s.totals]
    half = f"{s.iteration} % 2 * {s.half} + " if s.iteration else ""
    if s.across:
        lanes = f", {s.fold}, {s.across}"
    stores = [
        f"store_partial_{s.axis}<{t.combine}{lanes}>({t.name}, shared + {half}{t.offset});" for t in s.totals
    ]
    warps = f", {s.warps}" if s.axis == "x" else ""
    loads = [
        f"load_partial_{s.axis}<{t.combine}{warps}{lanes}>"
        f"({t.name}, shared + {half}{t.offset}, {t.identity});"
        for t in s.totals
    ]
    sync = f"sync_{s.axis}<{s.across}>();" if s.across else f"sync_{s.axis}();"
    return [*fold, *stores, sync, *loads]


def _block_scan(s: BlockScan) -> list[str]:
    half = f"{s.iteration} % 2 * {s.bytes} + " if s.iteration else ""
    how = f"{s.combine}, {s.across}"
    if s.axis == "x":
        how = f"{s.combine}, {str(s.backwards).lower()}, {s.warp}, {s.across}"
    place = f"shared + {half}{s.offset}" if s.bytes else "nullptr"
    return [f"scan_{s.axis}<{how}>({s.name}, {s.carry}, {place});"]


def _fetch(s: Fetch) -> list[str]:
    guard = "true" if s.guard is None else s.guard
    return [f"fetch<{s.lanes}>({_address(s.prefetched, s.place)}, {_address(s.buffer, s.offset)}, {guard});"]


def _fetch_group(s: FetchGroup) -> list[str]:
    return ["fetch_wait();" if s.wait else "fetch_group();"]


def _hide(s: Hide) -> list[str]:
    return [f"hide({s.name}, {s.iteration});"]


def _cooperative_slots(s: CooperativeSlots) -> list[str]:
    return [
        f"const cooperative_slots {s.name} = slots_of<{s.words}>("
        f"{s.memory}, {s.block_set}, {s.parts}, {s.part}, {s.iteration});"
    ]


def _cooperative_reduce(s: CooperativeReduce) -> list[str]:
    totals = [(k % s.warps, found) for k, found in enumerate(zip(s.totals, s.words, s.shared))]
    stores = [f"store_partial_cooperative<{k}>({t.name}, {s.slots}, {word});" for k, (t, word, _) in totals]
    loads = [
        f"load_partial_cooperative<{t.combine}, {k}>"
        f"({t.name}, {s.slots}, {word}, shared + {at}, {t.identity});"
        for k, (t, word, at) in totals
    ]
    return [
        *stores,
        *loads,
        "sync_cooperative();",
        *(f"receive_cooperative({t.name}, shared + {at});" for _, (t, _, at) in totals),
    ]


def _await_cluster(s: AwaitCluster) -> list[str]:
    return ["await_cluster();"]


def _cluster_reduce(s: ClusterReduce) -> list[str]:
    half = f"{s.iteration} % 2 * {s.half} + " if s.iteration else ""
    totals = [(k % s.warps, t, f"shared + {half}{at}") for k, (t, at) in enumerate(zip(s.totals, s.shared))]
    mailbox, uses = f"shared + {half}{s.mailbox}", f"{s.iteration} / 2" if s.iteration else "0"
    sent = sum(-(-t.bytes // 32 // 4) * 4 for t in s.totals)
    return [
        *(f"store_partial_cluster<{warp}>({t.name}, {place}, {mailbox});" for warp, t, place in totals),
        f"await_mail<{sent}>({mailbox}, {uses});",
        *(f"load_partial_cluster<{t.combine}>({t.name}, {place}, {t.identity});" for _, t, place in totals),
    ]


def _column_reduce(s: ColumnReduce) -> list[str]:
    shape = f"{s.columns}, {s.warps}"
    stores = [
        f"store_partial_columns<{t.combine}, {s.columns}>({t.name}, shared + {t.offset});" for t in s.totals
    ]
    gathers = [f"gather_columns<{t.combine}, {shape}>({t.name}, shared + {t.offset});" for t in s.totals]
    receives = [f"receive_columns<{shape}>({t.name}, shared + {t.offset});" for t in s.totals]
    return [*stores, "sync_columns();", *gathers, "sync_columns();", *_over_cluster(s, shape), *receives]


def _over_cluster(s: ColumnReduce, shape: str) -> list[str]:
    if not s.cluster:
        return []
    places = [(t, f"shared + {t.offset}, shared + {at}") for t, at in zip(s.totals, s.cluster)]
    mailbox, sent = f"shared + {s.mailbox}", sum(t.bytes // (s.warps + 1) for t in s.totals)
    return [
        *(f"store_columns_cluster<{shape}>({t.name}, {place}, {mailbox});" for t, place in places),
        "sync_columns();",  # what a block has of its columns has been sent, and may be replaced
        f"await_mail<{sent}>({mailbox}, 0);",
        *(
            f"load_columns_cluster<{t.combine}, {shape}>({t.name}, {place}, {t.identity});"
            for t, place in places
        ),
        "sync_columns();",
    ]


_PRINT: dict[type, Callable[[Any], list[str]]] = {
    Let: _let, Load: _load, Place: _place, Uniform: _uniform, Draw: _draw, Compute: _compute, Store:
    _store, Pack: _pack, SetLane: _set_lane, Array: _array, Scratch: _scratch, For: _for, If: _if,
    Barrier: _barrier, FillTile: _fill_tile, Accumulator: _accumulator, Accumulate: _accumulate,
    BlockReduce: _block_reduce, CooperativeSlots: _cooperative_slots, CooperativeReduce:
    _cooperative_reduce, AwaitCluster: _await_cluster, ClusterReduce: _cluster_reduce, ColumnReduce:
    _column_reduce, BlockScan: _block_scan, Fetch: _fetch, FetchGroup: _fetch_group, Hide: _hide,
}  # fmt: skip


def struct_layout(params: tuple[Param, ...]) -> tuple[list[int], int]:
    """Byte offset of each field and the size of the struct, by the C rule of natural alignment."""
    offsets, at, widest = [], 0, 1
    for p in params:
        size, alignment = field_size(p)
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at += size
        widest = max(widest, alignment)
    return offsets, max(-(-at // widest) * widest, 1)


_FIELD = {d.ctype: (d.itemsize, d.itemsize) for d in DTYPES.values()} | {"random_state": (32, 8)}


def field_size(p: Param) -> tuple[int, int]:
    """Size and alignment in bytes."""
    return (8, 8) if p.is_pointer else _FIELD[p.ctype]
