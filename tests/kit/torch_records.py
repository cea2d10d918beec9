"""What torch measures and writes for its own records, left out of tests.

In: nothing. Out: torch.compile compiles a graph of three ops in half of the time, and `torch.manual_seed`
takes a hundredth of its time where there is no GPU. Example:

    leave_out()
"""

import functools
import logging
import sys
import types


def leave_out():
    """Torch writes to memory of 256 MB to time the guards of each frame with cold caches, for a number in its
    records. And it writes each of its graphs as JSON where its trace has a handler, which pytest gives to
    loggers that do not propagate. For each graph it makes twelve empty tensors, as fake ones, which stand for
    a random state that nothing reads here, and collects garbage, which conftest.py has Python do less often.
    Without a GPU, a seed is kept for later with the stack of who gave it, as text with lines of source, once
    for each kind of device. Does nothing for modules that are not imported."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
    config = sys.modules.get("torch._dynamo.config")
    if hasattr(config, "run_gc_after_compile"):
        config.run_gc_after_compile = False
    states = getattr(sys.modules.get("torch._decomp.decompositions_for_rng"), "PhiloxState", None)
    if hasattr(states, "reset"):
        states.reset = _reset
    for name in ("cuda", "xpu", "mtia"):
        device = sys.modules.get(f"torch.{name}")
        if hasattr(device, "traceback"):
            device.traceback = types.SimpleNamespace(format_stack=list)
    if "torch" in sys.modules:
        trace = logging.getLogger("torch.__trace")
        trace.propagate = True
        for handler in list(trace.handlers):  # those that pytest has for the whole run
            if type(handler).__module__.startswith("_pytest."):
                trace.removeHandler(handler)


def _reset(state):
    state.seed = state.base_offset = _empty()
    state.relative_offset = 0
    state.offset_advanced_at_least_once = False


@functools.cache
def _empty():
    with sys.modules["torch._subclasses.fake_tensor"].unset_fake_temporarily():
        return sys.modules["torch"].tensor(())
