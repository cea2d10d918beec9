// A differentiable graph that gets what no check of torch looks at, as eager code: lists of tensors, tensors
// that may be None, and dtypes that a call decides (open_dtypes.h).
//
// Before a differentiable graph torch checks which tensors require a gradient, and autodiff has derived the
// backward for those. What a list or a `Tensor?` holds is not checked, nor whether a cast passes a gradient
// on: in a call in which it differs, a result would lose its gradient, or get one that it has not. In: the
// node, before its graphs are rewritten, and the stack of a call. Out: whether autodiff's backward is the
// wrong one for this call, and the results as ops of torch give them. Examples:
// tests/e2e/test_given_lists.py, tests/e2e/test_open_dtypes.py.
#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <string>
#include <vector>

namespace tsfuser {

class UncheckedGraph {
 public:
  // Null for a graph that gets nothing of these kinds.
  static std::shared_ptr<UncheckedGraph> of(const torch::jit::Node& node);
  // One that takes each call.
  static std::shared_ptr<UncheckedGraph> always(const torch::jit::Node& node);

  // Whether it gets dtypes only, and no tensors that no check looks at.
  bool asks_for_dtypes_only() const { return unchecked_.empty(); }
  bool takes(const torch::jit::Stack& stack) const;
  void run(torch::jit::Stack& stack) const;

 private:
  void make_code(const torch::jit::Node& node);

  size_t inputs_ = 0;
  std::vector<size_t> fractional_;  // inputs, tensors or dtypes as ints, that must be of a fractional dtype
  std::vector<size_t> unchecked_;   // inputs that may hold tensors
  bool always_ = false;             // takes each call
  bool any_ = false;                // whether some result has a gradient
  bool all_ = true;                 // whether all have, and all unchecked inputs get one
  std::unique_ptr<torch::jit::Code> code_;
};

// Code that runs the ops of the graph as eager does, one at a time.
std::unique_ptr<torch::jit::Code> eager_code(torch::jit::Graph& graph, const std::string& name);

}  // namespace tsfuser
