"""Compiled graphs on disk: what one process has traced and grouped, the next one only reads.

`graph_text` writes down all that decides what AOTAutograd and our passes make of a graph of TorchDynamo, and
refuses where it cannot be sure; `surroundings` adds modes, flags, options and versions. `record` is what is
kept: AOTAutograd's metadata and the typed graphs. `request` looks for the graph that torch compiles now, and
keeps it; `torch_cache` is where torch asks for it.
"""
