"""What the passes over FX graphs share: inserting nodes, and reading facts of nodes.

insert.py   puts ops before a node, with their traced results
strides.py  the ops that depend on the strides of their operands
updates.py  the inputs that the program changes
compared.py  whether an op is elementwise, selects, or jumps
types.py, sizes.py   types and size expressions, as torch._C.Graph has them
recomputed.py   names of the 16-bit values that both forward and backward compute
places.py   the lines of the user's program
"""
