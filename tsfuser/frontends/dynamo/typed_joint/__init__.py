"""AOTAutograd's joint graph as a joint graph of typed ops, which has the passes of `tsfuser.joint`.

Experimental: where PYTORCH_NVFUSER_ENABLE asks for `typed_joint`. In the order in which they are used:

translate.py   the nodes of FX, and what stands for each
write_back.py  what the passes have changed, in the FX graph
divide.py      the steps; forward and backward, of the nodes of FX, as the cut of the typed graph says
instead.py     what only the backward computes in another form
"""
