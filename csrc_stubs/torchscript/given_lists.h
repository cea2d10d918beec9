// A differentiable graph that gets lists of tensors, or tensors that may be None, as eager code.
//
// Before a differentiable graph torch checks which tensors require a gradient, and autodiff has derived the
// backward for those. What a list or a `Tensor?` holds is not checked: in a call in which it differs, a
// result would lose its gradient. In: the node, before its graphs are rewritten, and the stack of a call.
// Out: whether autodiff's backward is the wrong one for this call, and the results as ops of torch give
// them. Example: tests/e2e/test_given_lists.py.
#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <vector>

namespace tsfuser {

class GraphOfLists {
 public:
  // Null for a graph that gets nothing of that kind.
  static std::shared_ptr<GraphOfLists> of(const torch::jit::Node& node);

  bool takes(const torch::jit::Stack& stack) const;
  void run(torch::jit::Stack& stack) const;

 private:
  size_t inputs_ = 0;
  std::vector<size_t> unchecked_;  // the inputs of that kind
  bool any_ = false;               // whether some result has a gradient
  bool all_ = true;                // whether all have, and all unchecked inputs get one
  std::unique_ptr<torch::jit::Code> code_;
};

}  // namespace tsfuser
