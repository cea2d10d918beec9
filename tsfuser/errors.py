"""The errors and warnings of tsfuser.

In: a reason, as a sentence. Out: exceptions that carry it unchanged to `explain`, to warnings and to the
user.
"""


class Refusal(Exception):
    """Something that tsfuser does not fuse, with the reason as a sentence. Never reaches the user as an
    exception unless fallback is disabled."""


class CompileError(RuntimeError):
    """A generated kernel did not compile; the message has the compiler's output and the source's path."""


class TsfuserWarning(UserWarning):
    """A group runs unfused, or a pass gave up on a graph; the program's result is right all the same."""


class PassFailed(TsfuserWarning):
    """A pass of tsfuser gave up on a graph, by a mistake of tsfuser's."""
