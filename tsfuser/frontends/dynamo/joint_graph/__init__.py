"""Passes over the joint graph of forward and backward, before it is cut in two.

partition.py      the steps below, and what the forward saves for the backward
channels_last.py  the layout of convolutions, also without a backward; layout_choice.py: whether it changes
attention.py      plans of cuDNN's attention, apart from those of eager code
dropout.py, norms.py, softmaxes.py, from_results.py, sizes_only.py   forms of which the forward saves less
repeats.py        equal ops are computed once
discontinuous.py  values that the backward must not compute again
recomputable.py   which ops the backward may compute again
"""
