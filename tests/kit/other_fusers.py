"""torch's switches of its other fusers (NNC and older ones), which belong to the process."""

import contextlib
import sys

#: By the function that tells a switch of torch, the one that sets it.
_SETTERS = {
    "_jit_texpr_fuser_enabled": "_jit_set_texpr_fuser_enabled",
    "_jit_can_fuse_on_cpu": "_jit_override_can_fuse_on_cpu",
    "_jit_can_fuse_on_gpu": "_jit_override_can_fuse_on_gpu",
}


def switches():
    """Name -> whether it is on; {} before torch is imported, which pure tests do not do."""
    torch = sys.modules.get("torch")
    return {name: getattr(torch._C, name)() for name in _SETTERS} if hasattr(torch, "_C") else {}


def set_back(before):
    """Sets the switches to what `switches()` said before. -> what had changed, by its name"""
    changed = {name: state for name, state in switches().items() if before.get(name, state) != state}
    for name in changed:
        getattr(sys.modules["torch"]._C, _SETTERS[name])(before[name])
    return changed


@contextlib.contextmanager
def kept():
    """A context that may change them, as `tsfuser.enable()` does."""
    before = switches()
    try:
        yield
    finally:
        set_back(before)
