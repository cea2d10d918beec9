// Functions that torch has optimised while fusion was off, though they have ops that groups take. torch
// optimises a function once, so they stay unfused: Python says so when fusion is switched on, and counts
// them in `stats`.
#pragma once

#include "group/python.h"

#include <torch/csrc/jit/ir/ir.h>

#include <memory>

namespace tsfuser {

// The graph is about to be optimised without groups. Remembers where it is from, while it lives.
void note_unfused(const std::shared_ptr<torch::jit::Graph>& graph);

void bind_unfused_functions(py::module_& m);

}  // namespace tsfuser
