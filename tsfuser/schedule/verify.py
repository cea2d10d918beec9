"""What must hold for every Schedule, and how one is read back from its text.

`verify`: a Schedule in, None or a sentence that names the first fault out. `read`: what `str(schedule)` has
printed in, the Schedule out. Example: `verify(read(str(schedule)))`.
"""

from __future__ import annotations

from collections import Counter

from ..ir import size as sz
from ..ir.code import read as read_record
from ..ir.size import Size
from ..segment import Buffer, BufferKind
from .domain import Access, Dim, Domain
from .loops import (
    BINDINGS,
    PLACES,
    SCOPES,
    Cooperative,
    Fuse,
    Loop,
    Placement,
    Reduction,
    Scanning,
    Schedule,
    Split,
    Tiling,
)

#: At most one loop has such a binding.
_ONCE = ("block", "thread.x", "thread.y", "rows", "group", "vector", "simd")


def read(text: str) -> Schedule:
    """The Schedule that `str` has printed."""
    return read_record(
        text,
        Schedule,
        Domain,
        Dim,
        Access,
        Buffer,
        BufferKind,
        Loop,
        Split,
        Fuse,
        Placement,
        Reduction,
        Cooperative,
        Scanning,
        Tiling,
    )


def verify(schedule: Schedule) -> str | None:
    """None if the relations lead from the dims of the domain to the loops, every loop has a known binding,
    and every loop and value that the schedule names exists."""
    names = [x.name for x in schedule.loops]
    complaint = _relations(schedule) or _bindings(schedule)
    if complaint:
        return complaint
    loads = {a.buffer.value.name for a in schedule.domain.loads}
    stores = {a.buffer.value.name for a in schedule.domain.stores}
    for placed in schedule.placements:
        if placed.where not in PLACES:
            return f"no value stays in {placed.where}"
        if placed.where in ("tile", "prefetched", "held", "kept") and placed.value not in loads:
            return f"{placed.value}, to stay in {placed.where}, is not loaded"
        if placed.where == "store_tile" and placed.value not in stores:
            return f"{placed.value}, to stay in {placed.where}, is not stored"
    counts = Counter(p.value for p in schedule.placements)
    if twice := [name for name in counts if counts[name] > 1]:
        return f"{twice[0]} stays in two places"
    scanning = schedule.scanning
    if scanning is not None and (missing := [x for x in scanning.loops if x not in names]):
        return f"there is no loop {missing[0]} to scan along"
    if (
        scanning is not None
        and scanning.axis
        and f"thread.{scanning.axis}" not in {x.bind for x in schedule.loops}
    ):
        return f"no threads along {scanning.axis} pass on what they have"
    how = schedule.reduction
    if how is None:
        return None
    if missing := [x for x in how.loops if x not in names]:
        return f"there is no loop {missing[0]} to accumulate over"
    if how.side_by_side and how.side_by_side not in names:
        return f"there is no loop {how.side_by_side} over rows"
    if how.side_by_side in how.loops:
        return f"what is side by side along {how.side_by_side} is accumulated over it"
    if complaint := _scope(how):
        return complaint
    if f"thread.{how.axis}" not in {x.bind for x in schedule.loops}:
        return f"no threads along {how.axis} combine"
    return None


def _scope(how: Reduction) -> str | None:
    """Checks that the schedule has the fields that its scope needs, and none of another scope."""
    if how.scope not in SCOPES:
        return f"nothing combines in a {how.scope}"
    if (how.scope == "warp") != (how.warp > 0):
        return f"{how.warp} threads of a warp are to combine, but the scope is {how.scope}"
    if (how.scope in ("cluster", "cooperative")) != (how.cooperative is not None):
        do = "do not " if how.cooperative is None else ""
        return f"blocks {do}share a row, but the scope is {how.scope}"
    if how.scope == "grid" and how.partial is None:
        return "the grid combines partial results, but none are stored"
    return None


def _relations(schedule: Schedule) -> str | None:
    """Replays the relations from the domain's dims to the loops, by name. The extent of the outer loop of a
    split is not known: `times` of `Schedule.split` may make it larger than the quotient."""
    known: dict[str, Size | None] = {d.name: d.extent for d in schedule.domain.dims}
    for r in schedule.relations:
        made: dict[str, Size | None]
        if isinstance(r, Split):
            if r.parent not in known or known[r.parent] not in (None, r.extent):
                return f"{r.parent} of extent {r.extent} is split, but there is no such loop"
            used, made = [r.parent], {r.outer: None, r.inner: r.by}
        else:
            used, made = [r.outer, r.inner], {r.into: None}
        made.pop("", None)
        for x in used:
            known.pop(x, None)  # fused with a loop that runs once and comes from no dim, it may be new
        if twice := [x for x in made if x in known]:
            return f"there are two loops {twice[0]}"
        known |= made
    loops = {x.name: x.extent for x in schedule.loops}
    if len(loops) < len(schedule.loops):
        return "two loops have one name"
    if added := [x for x in loops if x not in known and loops[x] is not sz.const(1)]:
        return f"{added[0]} comes from no dim of the domain"
    if lost := [x for x in known if x not in loops]:
        return f"{lost[0]} is no loop of the schedule"
    wrong = [x for x in known if known[x] not in (None, loops[x])]
    return f"{wrong[0]} has another extent than its relations give it" if wrong else None


def _bindings(schedule: Schedule) -> str | None:
    """Checks that each binding is known, and that no more loops than allowed have it."""
    counts = Counter(x.bind for x in schedule.loops)
    for bind, n in counts.items():
        if bind not in BINDINGS:
            return f"nothing is called {bind}"
        if n > 1 and bind in _ONCE:
            return f"{n} loops are bound to {bind}"
    if not counts["block"]:
        return "no loop is bound to blocks"
    for x in schedule.loops:
        if x.bind in ("unroll", "group", "vector") and not x.extent.is_const:
            return f"{x.name} is {x.bind}, but its extent is known only at run time"
    return None
