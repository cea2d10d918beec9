// A function whose forward and backward one joint graph makes (tsfuser/joint/packing.py): experimental,
// where PYTORCH_NVFUSER_ENABLE asks for `joint_graph`.
//
// Before torch profiles a graph, it becomes one call of a function of ours, which holds it:
//
//     %y = prim::CallFunction(%joint, %x, %w)
//
// Torch does not show us a graph whose ops all have formulas in its autodiff. Of that it makes
// differentiable graphs; the check before such a one sends all calls to its fallback, which becomes such a
// call in turn.
//
// A call that may record gradients, with tensors of certain dtypes, devices and ranks, and certain ones that
// require a gradient, runs a graph of its own, which is a `prim::DifferentiableGraph`. Torch's executor
// would dissolve that, so the graph runs as it is. All other calls run the program's graph, as if we were
// not here: those without gradients, under autocast or functorch, with tensors of a subclass, and those that
// Python refuses to pack.
#pragma once

#include <ATen/core/function.h>
#include <ATen/core/qualified_name.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

namespace torch::jit {
struct Code;
struct Graph;
struct GraphFunction;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

class JointFunction final : public torch::jit::Function {
 public:
  using Run = c10::function_ref<void(const torch::jit::Code&)>;

  JointFunction(std::shared_ptr<torch::jit::Graph> graph, std::string name);
  ~JointFunction() override;

  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out, Run run) override;
  using Function::call;
  void run(torch::jit::Stack& stack) override;
  size_t num_inputs() const override;
  const c10::QualifiedName& qualname() const override;
  const c10::FunctionSchema& getSchema() const override;
  void ensure_defined() override {}
  Function& setSchema(c10::FunctionSchema) override { return *this; }

  // The graphs that were packed by now.
  std::vector<std::shared_ptr<torch::jit::Graph>> packed() const;

 private:
  using Words = std::vector<int64_t>;
  struct Packed {  // null: refused
    std::shared_ptr<torch::jit::Graph> graph;
    std::unique_ptr<torch::jit::Code> code;
  };

  const torch::jit::Code* code_for(at::ArrayRef<c10::IValue> arguments);
  Packed pack(at::ArrayRef<c10::IValue> arguments) const;

  const std::shared_ptr<torch::jit::Graph> graph_;
  const std::unique_ptr<torch::jit::GraphFunction> plain_;
  const c10::QualifiedName name_;
  mutable std::shared_mutex mutex_;  // of `known_`
  std::map<Words, Packed> known_;
};

// The step of torchscript/prepare.cpp, where it is switched on. Whether the graph is one node now.
bool call_joint_function(torch::jit::Graph& graph, const torch::jit::Node* first);
// Whether it is; returns the state before.
bool use_joint_functions(bool on);
// The packed graphs of the functions that optimised code calls, also behind checks of gradients.
std::vector<std::shared_ptr<torch::jit::Graph>> packed_graphs(torch::jit::Code& code);
// Whether calls of joint functions may be made in the graph.
bool takes_joint_functions(const torch::jit::Graph& graph);
// Whether a differentiable graph is one of ours, which no step on autodiff's graphs may change.
bool is_joint(const torch::jit::Node& differentiable);

}  // namespace tsfuser
