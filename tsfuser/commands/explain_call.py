"""What `tsfuser.explain` finds for a call that a script has made.

In: a call of a scripted or compiled function. Out: an `Explanation`. That the function itself runs unfused is
said in it, and is no warning here: the line that it would name is the command's, not the script's.
"""

from __future__ import annotations

import warnings

from ..debug.calls import Recorded
from ..debug.explain import Explanation, explain
from ..errors import TsfuserWarning


def explain_call(call: Recorded) -> Explanation:
    """Raises what `explain` raises."""
    with call.mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* itself runs unfused", TsfuserWarning)
        return explain(call.function, *call.args, **call.kwargs)
