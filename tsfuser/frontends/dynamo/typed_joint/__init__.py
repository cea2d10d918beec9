"""AOTAutograd's joint graph as a joint graph of typed ops, which has the passes of `tsfuser.joint`.

Experimental: where PYTORCH_NVFUSER_ENABLE asks for `joint_graph`.

translate.py   the nodes of FX, and what stands for each
divide.py      forward and backward, of the nodes of FX, as the cut of the typed graph says
"""
