"""Makes groups in a typed graph, and arranges when they run and where they write.

passes.py      the passes that all front ends share, and then these steps:
batched_launches.py, weight_casts.py, gradient_casts.py, lone_ops.py   batches of groups: one launch for
               all of a batch
scalar_ops.py  groups of the arithmetic of 0-dim CPU tensors
in_place.py, in_place_ops.py, add_together.py   groups and ops that write to inputs of the graph; ways.py: the
               ops in a row that may
roundings.py   which 16-bit values groups round, so that forward and backward see the same numbers
order.py       the order of nodes, by the memory that they free; memory.py: that memory
dead.py        inputs of groups over which results may be stored
expected.py    the calls for which groups are planned before they run
"""
