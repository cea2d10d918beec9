"""The groups that are in batches: one launch runs the kernel of several groups.

In: a group. Out: whether it is one of them, as the end of its text says. Example: `is_expected(3)`.
"""

from __future__ import annotations

from .. import _C

MARK: str = _C.batched_mark  # the end of the text of such a group


def is_expected(group_id: int) -> bool:
    """Whether plans of the group are for batched launches."""
    return _C.group_text(group_id).endswith(MARK)
