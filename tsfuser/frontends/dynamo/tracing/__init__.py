"""What AOTAutograd is told before it traces: which ops it decomposes, and into what.

decompositions.py   which ops are decomposed; foreach.py, embeddings.py: two of the decompositions
whole_ops.py        ops that stay whole, although torch has a decomposition
"""
