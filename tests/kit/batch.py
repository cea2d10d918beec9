"""Many kernels in one translation unit, for tests that make thousands of them: the runtime headers are read
once a batch, and g++ or NVRTC starts once a batch.

In: calls of scripted functions, made inside `collecting`: nothing is compiled there, groups run unfused, and
what they asked for is noted. Out: after `load` the same calls find their kernels compiled. Example:

    with collecting() as kernels:
        for _ in range(3):
            scripted(x)
    load(kernels)
    scripted(x)            # fused
"""

import contextlib
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import tsfuser
from tsfuser import options
from tsfuser.errors import CompileError, Refusal
from tsfuser.planning import compile as pipeline
from tsfuser.planning import compilers, targets
from tsfuser.target.disk_cache import DiskCache
from tsfuser.target.host import HostTarget

INCLUDE = '#include "tsfuser.h"\n'
#: Kernels a translation unit. g++ takes 0.3 s for the headers, as long as for a few kernels; a CUDA module is
#: loaded once for each of its kernels.
SIZE = {"cpu": 48, "cuda": 16}


@contextlib.contextmanager
def collecting():
    """Yields a dict that gets the kernels asked for inside: source -> (name, device)."""
    found, compiled, started = {}, pipeline.functions, compilers.start

    def note(target, kernels, device):
        found.update((source, (name, device)) for source, name in kernels)

    def refuse(kernels, device):
        note(None, kernels, device)
        raise Refusal("kernels are compiled later, in a batch")

    pipeline.functions, compilers.start = refuse, note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tsfuser.TsfuserWarning)
            yield found
    finally:
        pipeline.functions, compilers.start = compiled, started


def load(kernels, opt_level=0, jobs=2):
    """Compiles what `collecting` found and hands it to tsfuser, whose plans are made anew. A kernel that does
    not compile in its batch is left to tsfuser, which says what is wrong with it."""
    tsfuser.reset()
    pipeline._functions.most = max(pipeline._functions.most, len(kernels))
    by_device = {}
    for source, (name, device) in kernels.items():
        by_device.setdefault(device, []).append((source, name))
    for device, pairs in by_device.items():
        target = _target(device, opt_level)
        size = SIZE[device.partition(":")[0]]
        parts = [pairs[k : k + size] for k in range(0, len(pairs), size)]
        with ThreadPoolExecutor(jobs) as pool:
            for loaded in pool.map(lambda part: _compile(target, part, device), parts):
                for source, function in loaded.items():
                    pipeline._functions.add(pipeline._key(source, device), function)


def _target(device, opt_level):
    if device != "cpu":
        target = pipeline._target(device, options.host_launch())
        target._functions.clear()  # those of the batch before
        return target
    cache = DiskCache(options.cache_dir())
    if options.host_launch() != "block":
        return targets.chosen(device, options.host_launch()).compiler(cache)
    return HostTarget(cache, opt_level=opt_level)


def _compile(target, pairs, device):
    """Source -> loaded function, empty where the compiler does not take the batch."""
    names = {source: f"{name}_{k}" for k, (source, name) in enumerate(pairs)}
    text = INCLUDE + "\n".join(_renamed(source, name, names[source]) for source, name in pairs)
    try:
        path = target.compile(text, "batch") if device == "cpu" else target.compile(text, "batch", device)
        return {source: target.load(path, name, device) for source, name in names.items()}
    except CompileError:
        return {}


def _renamed(source, name, new):
    """The kernel without its include, under a name of its own, as is the struct of its arguments."""
    body = source.replace(INCLUDE, "").replace("struct Args {", f"struct {new}_args {{")
    return re.sub(rf"KERNEL\({name}, Args,", f"KERNEL({new}, {new}_args,", body)
