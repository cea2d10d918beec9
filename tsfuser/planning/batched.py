"""The groups that are in batches: one launch runs the kernel of several groups.

In: a group, before it is planned. Out: whether it is one of them. Example: `expect(3)`, `is_expected(3)`.
"""

from __future__ import annotations

_groups: set[int] = set()  # registry: by number, for good, as groups are


def expect(group_id: int) -> None:
    """Has the plans of a group made for batched launches."""
    _groups.add(group_id)


def is_expected(group_id: int) -> bool:
    """Whether somebody has asked for that."""
    return group_id in _groups
