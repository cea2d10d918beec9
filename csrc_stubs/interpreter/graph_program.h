// A typed graph with its groups: one call from Python, no Python inside. A list of steps, or, if some node
// cannot be one, torch's interpreter runs it.
//
// In: a graph of a front end without an executor of its own (torch.compile), and the arguments of a call as
// a list. The list is emptied, so that an argument lives no longer than its last reader. Out: a tuple.
// Example:
//     run = _C.GraphProgram(graph, constants=[], updates=[(0, 1)], results=[0, None], orders=[[0, 1]])
//     y, none = run([x])      # and x.copy_(the graph's output 1)
#pragma once

#include "group/python.h"

namespace tsfuser {

void bind_graph_program(py::module_& m);

}  // namespace tsfuser
