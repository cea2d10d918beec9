"""An FX graph of ATen ops becomes a typed torch._C.Graph.

translate.py   the nodes; arguments.py: their arguments; numbers.py: numbers, and checks
split.py       cuts a graph around nodes that cannot be translated
"""
