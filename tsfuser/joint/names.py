"""What the name of an input says besides what the program calls the value: `x.1.written.laid_out`.

The graph of a region is all that C++ hands on to Python, and back (csrc_stubs/torchscript/joint_function.cpp
has the same marks).
"""

from __future__ import annotations

import re

from ..graph.wrapper import Graph, Value

#: The program may write to it.
WRITTEN = ".written"
#: The graph of a call has to know whether it is row-major.
LAID_OUT = ".laid_out"
#: It is the first input of a graph that is not to become a joint graph once more.
PART = ".joint_part"

_MARKS = re.compile(rf"({'|'.join(map(re.escape, (WRITTEN, LAID_OUT, PART)))})(\.\d+)?(?=\.|$)")


def add_input(graph: Graph, like: Value, marks: str = "") -> Value:
    """An input with the type and the name of `like`."""
    argument = graph.addInput()
    argument.setType(like.type())
    name = plain_name(like)
    if marks or not name.isdecimal():  # that of a value without a name is its number, which names nothing
        argument.setDebugName(name + marks)
    return argument


def plain_name(value: Value) -> str:
    """The name without marks."""
    return _MARKS.sub("", value.debugName())


def is_written(value: Value) -> bool:
    return WRITTEN in value.debugName()


def mark_as_part(graph: Graph) -> None:
    """`graph` has inputs."""
    first = next(graph.inputs())
    first.setDebugName(plain_name(first) + PART)
