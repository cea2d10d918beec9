// Dtypes in a differentiable graph that a call decides:
//
//     aten::type_as(%x, %like)      aten::to(%x, %dtype, ...)      aten::sum(%x, %dtype)
//
// Where such a dtype is one of whole numbers, eager's result has no gradient, but autodiff's backward hands
// one on; and no check of torch asks. In: the node of the graph, as torch has made it. Out: which of its
// inputs decide. Example: tests/e2e/test_open_dtypes.py.
#pragma once

#include <cstddef>
#include <vector>

namespace torch::jit {
struct Node;
}  // namespace torch::jit

namespace tsfuser {

struct OpenDtypes {
  // Whether all of them were fractional when torch profiled: autodiff's backward is made for that.
  bool fractional = true;
  // Inputs, tensors or dtypes as ints, that have to be fractional in each call. Not those that surely are:
  // torch's check passes them only if they require a gradient.
  std::vector<size_t> inputs;
};

OpenDtypes open_dtypes(const torch::jit::Node& differentiable);

}  // namespace tsfuser
