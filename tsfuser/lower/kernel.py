"""A kernel: a body of Loop IR, its arguments and how it is launched.

In: made by `pipeline.lower`. Out: what `codegen.emit` prints as C++ and a plan launches; `str(kernel)` is
pseudo-C to look at, and `kernel.code()` Python that builds it. Example:

    Kernel("fused_add", params, body, "int", grid, block_x, block_y, 128)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.code import code
from ..ir.size import Size
from .loop_ir import Stmt
from .text import lines


@dataclass(frozen=True)
class Param:
    """A field of the kernel's argument struct, or an element of a field that is an array: `starts[2]`.
    `source` tells the plan how to fill it: `("input", i)`, `("update", i)` (an argument that is stored to),
    `("allocation", k)`, `("cleared", k)` (an allocation that is zero when the kernel starts), `("size",
    Size)`, `("number", i, dtype name)`, `("element", i)`, `("random",)`, `("seeded", i)` (where random
    numbers begin that have argument `i` as their seed), `("seed", k, stream)` (the Fusion's seed `k`, to
    which seed and offset of that random op are stored), `("flag",)` (what a kernel on the host sets where it
    finds an index out of range)."""

    name: str
    ctype: str
    source: tuple

    @property
    def array(self) -> str:
        """The name of the array of which it is an element; "" for none."""
        name, bracket, _ = self.name.partition("[")
        return name if bracket else ""

    @property
    def is_pointer(self) -> bool:
        return self.source[0] in ("input", "update", "allocation", "cleared", "flag", "seed")


@dataclass(frozen=True)
class Tile:
    """A square tile in shared memory at byte `offset`: `rows` rows of `pitch` elements of `ctype`."""

    name: str
    ctype: str
    itemsize: int
    rows: int
    pitch: int
    offset: int

    @property
    def bytes(self) -> int:
        return self.rows * self.pitch * self.itemsize


@dataclass(frozen=True)
class Kernel:
    """One kernel: launch sizes are symbolic. `index` is the C type of indices; `shared` in bytes; `grain` is
    how many blocks make a task of the host's thread pool; `resident`: how many blocks registers must leave
    room for on a multiprocessor, 0 for any number; `cooperative`: all blocks run at the same time; `cluster`:
    how many neighbouring blocks do, and reach each other's shared memory, 0 for none; `parts`: the C
    expression for their number; `leads`: the next kernel combines the partial results of this one, and may be
    set up while it runs; `combines_partials`: it is such a next one; `batch_capacity`: how many argument
    structs one launch takes (codegen/batched.py), 0 for a kernel that takes one by itself; `rooms`: the
    arguments, as C++, with which zeros are stored behind parts of tensors (runtime/room.h)."""

    name: str
    params: tuple[Param, ...]
    body: tuple[Stmt, ...]
    index: str
    grid: Size
    block_x: Size
    block_y: Size
    threads: int
    tiles: tuple[Tile, ...] = ()
    shared: Size | int = 0
    grain: Size | int = 1
    resident: int = 0
    cooperative: bool = False
    cluster: Size | int = 0
    parts: str = ""
    leads: bool = False
    combines_partials: bool = False
    batch_capacity: int = 0
    rooms: tuple[str, ...] = ()

    def code(self) -> str:
        """Python that builds the kernel; `verify.read` runs it."""
        return code(self)

    def __str__(self) -> str:
        """Indented pseudo-C, one line a statement."""
        params = ", ".join(f"{p.ctype} {p.name}" for p in self.params)
        launch = f"  grid {self.grid}, block {self.block_x} x {self.block_y}, shared {self.shared} bytes"
        launch += f", clusters of {self.cluster}" if self.cluster else ""
        rooms = [f"  zeros behind parts of {arguments}" for arguments in self.rooms]
        return "\n".join([f"kernel {self.name}({params})", launch, *rooms, *lines(self.body, 1)])
