// Where the nodes of a graph come from: lines of source.
#pragma once

#include <torch/csrc/jit/ir/ir.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

namespace tsfuser {

// A line of source: file, line, column, text.
using Frame = std::tuple<std::string, size_t, size_t, std::string>;

// Where a node comes from: its own place, then those of the calls around it that were inlined. The code of a
// module that was loaded is made from what was saved; the lines from which that was made are saved with it.
std::vector<Frame> frames(const torch::jit::Node& node);

// Has the node stand for a line of source.
void set_place(torch::jit::Node& node, const std::string& file, size_t line, const std::string& text);

}  // namespace tsfuser
