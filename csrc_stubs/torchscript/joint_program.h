// Programs whose regions joint graphs differentiate (joint_function.h).
//
// Before torch profiles a graph, it becomes one call of a function of ours, which holds it:
//
//     %y = prim::CallFunction(%program, %self, %x)
//
// A call that may record gradients runs the program with its regions outlined (tsfuser/joint/regions.py):
//
//     %w = prim::GetAttr[name="w"](%self);  %y = prim::CallFunction(%region, %x, %w)
//
// All other calls run the program's graph, as if we were not here.
//
// Torch does not show us a graph whose ops all have formulas in its autodiff. Of that it makes
// differentiable graphs; the check before such a one sends all calls to its fallback, which becomes such a
// call in turn.
#pragma once

#include "torchscript/call_facts.h"
#include "torchscript/joint_function.h"
#include "torchscript/owned_call.h"

#include <ATen/core/stack.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace torch::jit {
struct GraphExecutorState;
struct GraphFunction;
}  // namespace torch::jit

namespace tsfuser {

class JointProgram final : public OwnedFunction {
 public:
  // `outlined`: the graph with regions.
  JointProgram(torch::jit::Graph& graph, std::shared_ptr<torch::jit::Graph> outlined);
  ~JointProgram() override;

  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out, Run run) override;

  // What was packed by now, of all regions.
  std::vector<JointFunction::PackedGraph> packed() const;
  // What calls run that record no gradients, or that no packed graph takes: its own, and those of all
  // regions.
  std::vector<torch::jit::GraphFunction*> plain_functions() const;
  // The program's own; null before the first call.
  torch::jit::GraphFunction* plain() const { return made_.load() ? plain_.get() : nullptr; }
  const std::shared_ptr<torch::jit::Graph>& outlined() const { return outlined_; }
  struct Shown {
    std::shared_ptr<torch::jit::Graph> graph;
    std::vector<torch::jit::Code*> codes;  // of the packed graphs in it, in order
  };
  // The same with the packed graphs of the regions, of each the last one.
  Shown shown() const;
  // Whether the last call may have recorded gradients.
  bool has_recorded() const { return has_recorded_.load(); }

 private:
  void make();
  bool may_record_gradients(at::ArrayRef<c10::IValue> arguments) const;

  const std::shared_ptr<torch::jit::Graph> program_, outlined_;
  std::vector<AttributePath> attributes_;  // tensors of modules
  std::mutex mutex_;                       // of what the first call makes
  std::atomic<bool> made_{false};
  std::unique_ptr<torch::jit::GraphFunction> plain_;
  std::unique_ptr<torch::jit::Code> code_;
  std::atomic<bool> has_recorded_{false};
};

// The step of torchscript/prepare.cpp, where it is switched on. Whether the graph is one node now.
bool call_joint_program(torch::jit::Graph& graph, const torch::jit::Node* first);
// A graph that is such a call of that one, which nobody has shown to torch; null where it has no regions.
std::shared_ptr<torch::jit::Graph> as_joint_program(torch::jit::Graph& graph);
// The program that the graph is a call of; null for other graphs.
const JointProgram* joint_program_of(const torch::jit::Graph& graph);
// Whether graphs become such calls; returns the state before.
bool use_joint_functions(bool on);
// The packed graphs of the programs that optimised code calls, also behind checks of gradients.
std::vector<JointFunction::PackedGraph> packed_graphs(torch::jit::Code& code);
// The states of what else these programs run, where it has been optimised.
std::vector<torch::jit::GraphExecutorState> plain_states(torch::jit::Code& code);
// Whether the graph may become a call of such a program.
bool takes_joint_functions(const torch::jit::Graph& graph);
// The graph of what the node calls in the place of a differentiable graph, which says what the program may
// write to of its operands and results. Null where the program writes to nothing.
std::shared_ptr<torch::jit::Graph> noting_writes(torch::jit::Node* fallback, torch::jit::Graph& graph);
// The graphs inside of a differentiable graph of torch's autodiff become no such calls.
void leave_to_autodiff(const torch::jit::Node& differentiable);

}  // namespace tsfuser
