"""What `explain` finds, as records.

In: what became of a scripted function. Out: `Findings`, from which `table` and `page` are written. Example:
`findings.graphs[0].left_out[0].reason` -> "a matrix product is left to..."."""

from __future__ import annotations

from dataclasses import dataclass

from .observe import Timing
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
    that is unknown."""

    segment: int
    name: str
    schedule: str
    source: str
    registers: int
    launch: Timing | None = None
    fraction: float | None = None

    @property
    def seconds(self) -> float | None:
        return self.launch.seconds if self.launch else None

    @property
    def bytes(self) -> int:
        return self.launch.bytes if self.launch else 0


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
class Findings:
    """`name`: of the function; its optimised graphs, outer ones first; why the function itself does not run
    as they say, "" where it does."""

    name: str
    graphs: tuple[GraphReport, ...]
    caveat: str = ""

    @property
    def groups(self) -> list[Group]:
        return [group for graph in self.graphs for group in graph.groups]

    @property
    def left_out(self) -> list[Node]:
        return [node for graph in self.graphs for node in graph.left_out]
