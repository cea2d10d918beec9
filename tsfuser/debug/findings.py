"""What `explain` finds, as records.

In: what became of a scripted function. Out: `Findings`, from which `table` and `page` are written. Example:
`findings.graphs[0].left_out[0].reason` -> "a matrix product is left to..."."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .costs import Costs
from .observe import Timing
from .raw import Launch, Planned
from .source import Place


@dataclass(frozen=True)
class Node:
    """An op: `kind` like `aten::add`, where it stands in the program, and why it is not fused ("" if it
    is)."""

    kind: str
    place: Place
    reason: str = ""


@dataclass(frozen=True)
class Kernel:
    """One launch. `segment`: its number in the group; `schedule`: the parameters that the scheduler chose;
    `seconds` is None where nothing was launched; `fraction`: of the device's memory bandwidth, None where
    that is unknown; `plan`: how it is launched."""

    segment: int
    name: str
    schedule: str
    source: str
    registers: int
    launch: Timing | None = None
    fraction: float | None = None
    plan: Planned | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Where it belongs, how it is launched, what it takes, and its source."""
        return kernel_text(self)

    @property
    def group(self) -> int:
        """The number of its group."""
        return self.plan.group if self.plan else -1

    @property
    def inputs(self) -> tuple[str, ...]:
        """What `launch` takes, in order: `x.1: float32[64, 64] on cuda:0`."""
        return self.plan.inputs() if self.plan else ()

    @property
    def grid(self) -> int:
        """Blocks of the launch; 0 where there was nothing to compute."""
        return self.launch.grid if self.launch else 0

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block, along x and y."""
        return (self.launch.block_x, self.launch.block_y) if self.launch else (0, 0)

    def raw(self) -> Any:
        """A `cupy.RawKernel` of its source, to be launched as `arguments` says. Raises ValueError
        for a kernel for CPU tensors, which CuPy does not launch, and where there is no CuPy."""
        return self._planned().raw(self.source)

    def arguments(self, *inputs: Any, tensors: tuple[Any, ...] = (), **named: Any) -> Launch:
        """What the plan would launch it with for these inputs of its group: torch tensors, CuPy arrays and
        numbers. Their order is that of `inputs`, which need not be the program's: with names (`x=..., y=...`)
        nothing is swapped. Where only the tensors are given, numbers are as in the call that was explained.
        `tensors`: those of an earlier kernel's `Launch`, from which a later kernel of the group reads; else
        new ones. Raises ValueError for inputs that the plan does not serve.
        """
        return self._planned().launch(inputs, tensors, named)

    def script(self, path: str | Path | None = None) -> str:
        """A Python file that builds and runs this kernel, and those before it in its group, by itself: with
        inputs like those of the call that was explained, it prints times and, for the last kernel of a group,
        whether the results are those of torch's ops. Also written to `path` if one is given. Raises
        ValueError for a kernel that cannot be launched so, in clusters or by a seed of another group."""
        from .kernel_script import script

        siblings = self._planned().siblings
        wanted = 1 + next(k for k, (plan, _) in enumerate(siblings) if plan is self.plan)
        made = script(siblings[:wanted], Path(path).name if path is not None else "kernel.py")
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made

    def _planned(self) -> Planned:
        if self.plan is None:
            raise ValueError(f"nothing is known of the plan of {self.name}")
        return self.plan

    @property
    def seconds(self) -> float | None:
        return self.launch.seconds if self.launch else None

    @property
    def bytes(self) -> int:
        return self.launch.bytes if self.launch else 0


class Kernels(tuple[Kernel, ...]):
    """Kernels, which print as a table."""

    def __repr__(self) -> str:
        return kernels_table(self)

    __str__ = __repr__


def kernels_table(kernels: tuple[Kernel, ...]) -> str:
    """A line a kernel: `0  group 0  fused_add_relu  grid 256, block 128 x 1, 24 registers`."""
    if not kernels:
        return "no kernels: nothing ran fused"
    rows = [(str(k), f"group {x.group}", x.name, _launch_text(x)) for k, x in enumerate(kernels)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def kernel_text(kernel: Kernel) -> str:
    """One kernel with its source."""
    where = f"{kernel.name}: segment {kernel.segment} of group {kernel.group}"
    lines = [where, f"  {kernel.schedule}", f"  {_launch_text(kernel)}"]
    lines += [f"  takes {text}" for text in kernel.inputs]
    return "\n".join([*lines, "", kernel.source])


def _launch_text(kernel: Kernel) -> str:
    if kernel.launch is None:
        return "not launched: there was nothing to compute"
    registers = f", {kernel.registers} registers" if kernel.registers else ""
    return f"{launch_size(kernel)}{registers}"


def launch_size(kernel: Kernel) -> str:
    """Of its launch: on a CPU how many pieces of work threads share."""
    if kernel.plan is not None and not kernel.plan.device.startswith("cuda"):
        return f"{kernel.grid} piece{'' if kernel.grid == 1 else 's'}"
    return f"grid {kernel.grid}, block {kernel.block[0]} x {kernel.block[1]}"


@dataclass(frozen=True)
class Group:
    """A fusion group. `refusal`: why it ran unfused, "" if it ran fused. `reached`: whether it ran at all;
    its guard may not have let the call pass, or the program may have gone another way."""

    number: int
    device: str
    nodes: tuple[Node, ...]
    arguments: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    refusal: str = ""
    reached: bool = True


@dataclass(frozen=True)
class Part:
    """A part of the program that autodiff differentiates, which has graphs of its own."""

    number: int


@dataclass(frozen=True)
class GraphReport:
    """One optimised graph: `items` are its groups, the nodes left out and the differentiated parts, in order;
    `edges`: which item feeds which. `reached`: whether it ran; nothing is known of one that did not."""

    title: str
    items: tuple[Group | Node | Part, ...]
    edges: tuple[tuple[int, int], ...]
    reached: bool = True

    @property
    def groups(self) -> list[Group]:
        return [item for item in self.items if isinstance(item, Group)]

    @property
    def left_out(self) -> list[Node]:
        return [item for item in self.items if isinstance(item, Node)]

    def distinct(self) -> list[tuple[Group, int]]:
        """Its groups, those that share their plans once, with how often they are there."""
        times: dict[int, int] = {}
        for group in self.groups:
            times[group.number] = times.get(group.number, 0) + 1
        first = {group.number: group for group in reversed(self.groups)}
        return [(first[number], n) for number, n in times.items()]


@dataclass(frozen=True)
class Break:
    """Where TorchDynamo ends a graph and leaves what follows to Python, and why, in torch's words."""

    place: Place
    reason: str


@dataclass(frozen=True)
class Findings:
    """`name`: of the function; its optimised graphs, outer ones first; why the function itself does not run
    as they say, "" where it does; where the graphs of a compiled one break; what a step costs; the front end
    that was chosen for a function that is neither scripted nor compiled, else ""."""

    name: str
    graphs: tuple[GraphReport, ...]
    caveat: str = ""
    breaks: tuple[Break, ...] = ()
    costs: Costs = field(default=Costs(0.0, {}, {}), repr=False)
    front_end: str = ""

    @property
    def groups(self) -> list[Group]:
        return [group for graph in self.graphs for group in graph.groups]

    @property
    def kernels(self) -> Kernels:
        """The kernels of all groups, in order; those of groups that share their plans once."""
        first = {group.number: group for group in reversed(self.groups)}
        return Kernels(k for number in sorted(first) for k in first[number].kernels)

    @property
    def left_out(self) -> list[Node]:
        return [node for graph in self.graphs for node in graph.left_out]
