"""Where AOTAutograd asks for a compiled graph, and hands over what it knows of one.

torch keeps compiled graphs of inductor by `AOTAutogradCache.try_load` and `save`. Its key does not know of
other backends, and takes seconds of imports. So for the graphs that we compile, and only for these, both ask
the `Request` of this thread instead; other backends get torch's functions as they are. Example:

    with asked(Request(settings, source)):
        aot_autograd(fw_compiler=serializable(forward), ...)(module, inputs)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .request import Key, Request
from .symbols import sizes_among

_mine = threading.local()  # registry: the request of each thread


@contextlib.contextmanager
def asked(request: Request | None) -> Iterator[None]:
    """The graph that torch compiles in this context, in this thread, is looked for by the request."""
    before, _mine.request = getattr(_mine, "request", None), request
    try:
        yield
    finally:
        _mine.request = before


def serializable(compiler: Callable[..., Any]) -> Any:
    """`compiler` for AOTAutograd, which asks its cache only for those of this class."""
    from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    return SerializableAOTDispatchCompiler(OutputCode, compiler)


def mark(call: Any, key: Key) -> None:
    """Marks what a compiler returns as something that torch hands over to its cache."""
    call._fx_graph_cache_key = key


@functools.cache
def install() -> None:
    """Puts our functions in the place of torch's. Raises where this torch has no such functions."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, should_bundle_autograd_cache

    load, make, save = AOTAutogradCache.try_load, AOTAutogradCache.make_entry, AOTAutogradCache.save

    @functools.wraps(load)
    def try_load(module: Any, args: Any, aot_config: Any, *rest: Any, **named: Any) -> Any:
        # Once: what another backend compiles for a part of the graph is none of ours.
        request, _mine.request = getattr(_mine, "request", None), None
        if request is None:
            return load(module, args, aot_config, *rest, **named)
        call = request.find(module, list(args), aot_config)
        if call is None and request.key is not None:
            aot_config = _with_key(aot_config, request.key, sizes_among(args))
        elif should_bundle_autograd_cache():
            _hand_over(aot_config, request)
        return (call, aot_config) if _config_is_frozen() else call

    @functools.wraps(make)
    def make_entry(compiled_fw_func: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(getattr(compiled_fw_func, "_fx_graph_cache_key", None), Key):
            return make(compiled_fw_func, *rest, **named)
        with contextlib.ExitStack() as ours:
            if should_bundle_autograd_cache():
                from .precompiled import kept_by_us

                ours.enter_context(kept_by_us())
            return make(compiled_fw_func, *rest, **named)

    @functools.wraps(save)
    def save_ours(key: Any, entry: Any, remote: bool) -> None:
        if not isinstance(key, Key):
            return save(key, entry, remote)
        key.request.keep(entry)
        if should_bundle_autograd_cache():
            _hand_over(entry.sanitized_aot_config, key.request)

    AOTAutogradCache.try_load = staticmethod(try_load)
    AOTAutogradCache.make_entry = staticmethod(make_entry)
    AOTAutogradCache.save = staticmethod(save_ours)


def _hand_over(aot_config: Any, request: Request) -> None:
    """Torch writes TorchDynamo's results and those of compilers to disk."""
    try:
        from .precompiled import hand_over

        hand_over(aot_config.precompile_backend_id, request)
    except Exception as error:
        request.say_why("torch's precompilation does not get a compiled graph", error)


def _config_is_frozen() -> bool:
    """As since torch 2.13, where `try_load` returns the one that is used from there on, too."""
    from torch._functorch._aot_autograd.schemas import AOTConfig

    return AOTConfig.__dataclass_params__.frozen


def _with_key(aot_config: Any, key: Key, sizes: list) -> Any:
    from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

    info = AOTAutogradCacheInfo(key, time.time_ns(), forward_symints=sizes)
    if _config_is_frozen():
        return dataclasses.replace(aot_config, cache_info=info)
    aot_config.cache_info = info
    return aot_config
