"""What AOTAutograd is told before it traces: which ops it decomposes, and into what.

decompositions.py   which ops are decomposed; foreach.py, embeddings.py: two of the decompositions
eager_layouts.py    ops that are traced with other strides than torch's kernels give
whole_ops.py        ops that stay whole, although torch has a decomposition
"""
