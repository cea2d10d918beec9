"""From a Fusion to segments, each of which becomes one kernel.

`records` says what a segment is, `cut` makes segments, `tables` chooses values that get a kernel of their
own, `verify` checks a segment.

In: a Fusion. Out: ordered Segments. Example: `segments(call, fusion, Allocations(1), is_one_pass)`.
"""

from .cut import segments
from .records import Allocations, Buffer, BufferKind, Segment, Temporary, read
from .verify import verify

__all__ = ["Allocations", "Buffer", "BufferKind", "Segment", "Temporary", "read", "segments", "verify"]
