"""Cheaper forms of nodes, in the FX graph of a forward or a backward, before it is translated.

simplify.py      one node at a time; its rules: indexing.py, late_casts.py, copies.py, bools.py,
                 fused_multiply_add.py, new_tensors.py
parts.py         slices move in front of the ops whose result they are a slice of
product_sums.py  sums of matrix products, each added as soon as it is computed
ranges.py        ranges of numbers, made once
traced_layouts.py   last: what reads strides sees those that were traced
"""
