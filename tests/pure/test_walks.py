"""A walk over a list of nodes that destroys nodes of the list would visit freed memory. So C++ destroys nodes
by `Walk::destroy`, which leaves them out from then on (csrc_stubs/torchscript/nodes.h)."""

from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "csrc_stubs"
#: Files that destroy nodes themselves, and why no list names these afterwards.
OTHERS = {
    "torchscript/nodes.h": "here it is defined",
    "torchscript/graph_snapshot.cpp": "the list is of one block, and holds nothing from inside of a node",
    "torchscript/in_place.cpp": "the node was made by the same function",
    "torchscript/settle_branches.cpp": "from the last node to the first, each once",
    "torchscript/settled_branches.cpp": "the list is made anew for each node",
    "torchscript/twins.cpp": "from the last node of a formula to the first, each once",
}


def test_nodes_are_destroyed_by_the_walk_that_visits_them():
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*")
        if path.suffix in (".h", ".cpp") and "->destroy()" in path.read_text()
    }
    assert found == set(OTHERS)
