// A region of a program whose forward and backward one joint graph makes (tsfuser/joint/packing.py):
// experimental, where PYTORCH_NVFUSER_ENABLE asks for `joint_graph`. A program calls its regions
// (joint_program.h):
//
//     %y = prim::CallFunction(%joint, %x, %w)
//
// Several results are a tuple. A call that may record gradients, with tensors of certain dtypes, devices and
// ranks, and certain ones that require a gradient, runs a graph of its own (numbers are values in it, but
// for those that a derivative has to know), which is a `prim::DifferentiableGraph`, and what is made behind
// it. Torch's executor would dissolve that, so the graph runs as it is. All other calls run the region's
// graph, as if we were not here: those without gradients, under functorch, with tensors of a subclass, and
// those that Python refuses to pack.
#pragma once

#include "torchscript/owned_call.h"

#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

namespace torch::jit {
struct GraphFunction;
}  // namespace torch::jit

namespace tsfuser {

class JointFunction final : public OwnedFunction {
 public:
  // `written`: the results that the program may write to.
  JointFunction(std::shared_ptr<torch::jit::Graph> graph, const std::vector<int64_t>& written);
  ~JointFunction() override;

  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out, Run run) override;

  struct Input {
    bool asked;     // for its dtype or device only
    bool laid_out;  // packed graphs know whether it is row-major
  };
  struct PackedGraph {  // lives as long as the function
    std::shared_ptr<torch::jit::Graph> graph;
    torch::jit::Code* code;
  };
  // What was packed by now.
  std::vector<PackedGraph> packed() const;
  // What all other calls run; null before the first call.
  torch::jit::GraphFunction* plain() const;

 private:
  struct Packed {  // null: refused
    std::vector<int64_t> words;
    std::shared_ptr<torch::jit::Graph> graph;
    std::unique_ptr<torch::jit::Code> code;
  };

  torch::jit::GraphFunction& made_plain();
  const torch::jit::Code* code_for(at::ArrayRef<c10::IValue> arguments);
  std::vector<size_t> pack(at::ArrayRef<c10::IValue> arguments, const std::vector<bool>& constants,
                           Packed& made) const;

  const std::shared_ptr<torch::jit::Graph> graph_;
  const std::vector<int64_t> written_;
  const std::vector<Input> inputs_;
  mutable std::shared_mutex mutex_;  // of what follows
  std::unique_ptr<torch::jit::GraphFunction> plain_;
  std::vector<bool> constants_;  // the numbers among the arguments that packed graphs have as constants
  std::vector<std::unique_ptr<const Packed>> known_;
};

// The region that the node calls; null for other nodes.
JointFunction* region_of(const torch::jit::Node* node);
// A call of a new one, not yet in `graph`.
torch::jit::Node* region_call(torch::jit::Graph& graph, std::unique_ptr<JointFunction> region,
                              at::ArrayRef<torch::jit::Value*> operands);
// A function of such a graph whose parts are no regions again, under that name.
std::unique_ptr<torch::jit::GraphFunction> plain_function(torch::jit::Graph& graph, const std::string& name);
// Says of a graph that no regions are made of it: a program's graph without any, one inside of a packed
// graph, or of autodiff; and whether it is one.
void make_part(torch::jit::Graph& graph);
bool is_part(const torch::jit::Graph& graph);
// Whether a differentiable graph is one of ours, which no step on autodiff's graphs may change.
bool is_joint(const torch::jit::Node& differentiable);

}  // namespace tsfuser
