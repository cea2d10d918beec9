"""Compiled graphs inside of what torch itself writes to disk: precompilation, which skips TorchDynamo, too.

In: the record of a graph, as `Request` keeps it. Out: an object that torch writes into its files, and that
gives the compiled function in the process that reads them. Both ways are opt-in, since torch drops guards
that it cannot write (docs/guide.md, "A restart without TorchDynamo"). Example:

    # with TORCH_CACHING_PRECOMPILE=1, here and in the process that reads
    torch.compiler.save_cache_artifacts()
    # or
    compiled = torch.compile(f, fullgraph=True, backend="tsfuser").aot_compile(((x,), {}))
    compiled.save_compiled_function("f.bin")
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext

from ....options import first_graph
from ....planning.compile import expect_cuda
from ....target import counters
from .. import counts
from . import record
from .custom_ops import are_unchanged
from .request import Request, mark_groups
from .surroundings import lasting_everywhere

_NOT_ASKED = (
    "TSFUSER_STORED_GRAPHS is off, the mode is 'reduce-overhead', or a dump, log or explain looks at graphs "
    "as they are made"
)


class Artifact(BackendCacheArtifact):  # type: ignore[misc]  # torch is not looked into
    """A graph in torch's cache of TorchDynamo's results. It is loaded while torch reads its file: if that
    raises, torch compiles anew; later an error would reach the program."""

    def __setstate__(self, state: tuple[str, bytes]) -> None:
        self.key, self.content = state
        self._call = load(self.content)

    def __reduce__(self) -> tuple:
        return Artifact.__new__, (Artifact,), (self.key, self.content)

    def __deepcopy__(self, memo: dict) -> Artifact:
        return self  # nothing changes it

    def after_deserialization(self) -> Callable[..., Any]:
        return self._call


class Compiled(SerializableCallable):  # type: ignore[misc]
    """What `aot_compile` gets for a graph. `content`: None where it cannot be written, for the `reason`."""

    def __init__(self, call: Callable[..., Any], content: bytes | None, reason: str = "") -> None:
        self._call, self._content, self._reason = call, content, reason

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        if fn._content is None:
            raise RuntimeError(f"tsfuser cannot write this graph to a file: {fn._reason}")
        return fn._content

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Compiled:
        return cls(load(data), data)


def content_of(request: Request) -> bytes:
    """What torch writes of a graph that was kept."""
    settings = request.settings
    return pickle.dumps(
        (settings, lasting_everywhere(settings), request.custom_ops, request.kept), protocol=5
    )


def load(content: bytes) -> Callable[..., Any]:
    """The function of the graph's arguments. Raises RuntimeError where this process would compile it to
    something else: then torch traces and compiles anew, or tells the user."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    first_graph()
    expect_cuda()
    try:
        settings, made_with, ops, kept = pickle.loads(content)
    except Exception as error:
        raise RuntimeError(f"a precompiled graph cannot be read: {error}. Compile it again") from error
    if made_with != lasting_everywhere(settings):
        raise RuntimeError(
            "a graph was precompiled with other versions or options of tsfuser or torch than this process "
            "has: compile it again, or set the same options"
        )
    if not are_unchanged(ops):
        raise RuntimeError(
            "a graph was precompiled with other custom ops than this process has: compile it again"
        )
    context = torch._guards.TracingContext.try_get()
    with torch._guards.tracing(context or torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        call, made = record.read(kept)
    mark_groups(settings, made.values())
    counters.count("graphs_read")
    counts.count((reason for of_role in made.values() for reason in of_role.foreign.values()), "")
    return lambda *args: call(list(args))


def for_file(call: Callable[..., Any], request: Request | None) -> Compiled:
    """What torch can write of the compiled graph."""
    if request is None:
        return Compiled(call, None, _NOT_ASKED)
    if request.kept is None:
        return Compiled(call, None, request.reason or "it was not compiled as one graph")
    return Compiled(call, content_of(request))


def hand_over(backend_id: str | None, request: Request) -> None:
    """Gives torch the graph for its cache of TorchDynamo's results, if it wants it. `backend_id`: torch's
    name of the graph."""
    if backend_id is not None and request.kept is not None:
        PrecompileContext.record_artifact(Artifact(backend_id, content_of(request)))


@contextlib.contextmanager
def kept_by_us() -> Iterator[None]:
    """In this context torch does not want to write what compilers return by itself."""
    off = dict.fromkeys(("bundled_autograd_cache", "force_autograd_cache", "strict_autograd_cache"), False)
    with torch._functorch.config.patch(off), torch._dynamo.config.patch(caching_precompile=False):
        yield
