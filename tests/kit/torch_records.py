"""What torch.compile measures and writes for its own records, left out of tests.

In: nothing. Out: a graph of three ops is compiled in 31 ms of 47. Example:

    leave_out()
"""

import logging
import sys


def leave_out():
    """Torch writes to memory of 256 MB to time the guards of each frame with cold caches, for a number in its
    records. And it writes each of its graphs as JSON where its trace has a handler, which pytest gives to
    loggers that do not propagate. Does nothing for modules that are not imported."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
    if "torch" in sys.modules:
        trace = logging.getLogger("torch.__trace")
        trace.propagate = True
        for handler in list(trace.handlers):  # those that pytest has for the whole run
            if type(handler).__module__.startswith("_pytest."):
                trace.removeHandler(handler)
