"""How a segment is computed: named loops, and where values stay between uses. A scheduler is a file with
`propose`, and an entry in `schedulers.SCHEDULERS`.

In: a Segment. Out: the Proposal of the first scheduler that takes it. Example:

    proposal = propose(call, segment, GPU)      # or the reasons of all schedulers, as text
    [stage] = proposal.stages(allocations)
"""

from .moments import expanded
from .proposal import Proposal, Stage
from .schedulers import propose
from .stages import fusion_stages

__all__ = ["Proposal", "Stage", "expanded", "fusion_stages", "propose"]
