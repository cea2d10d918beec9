// Whether torch has optimised a scripted function yet, and whether the result has groups. Torch optimises a
// function once: if fusion was off at that time, the function has no groups and will get none. In: a
// function, a method or a module type's method. Out: "", "fused" or "unfused".

#include "torchscript/optimised.h"
#include "torchscript/hooks.h"
#include "torchscript/joint_program.h"
#include "torchscript/settled_branches.h"

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/method.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::GraphExecutor;

// What a graph holds, in all its blocks.
struct Contents {
  bool groups = false;
  bool differentiable = false;
  std::vector<GraphExecutor*> fallbacks;  // of the graphs that run where a check of the arguments fails
};

void look(Block* block, Contents& found) {
  static const auto group = c10::Symbol::fromQualString("prim::CudaFusionGroup");
  static const auto fallback = c10::Symbol::attr("fallback");
  for (torch::jit::Node* node : block->nodes()) {
    found.groups |= node->kind() == group;
    found.differentiable |= node->kind() == c10::prim::DifferentiableGraph;
    if (node->kind() == c10::prim::Constant && node->hasAttribute(fallback)) {
      const auto type = node->output()->type()->cast<c10::FunctionType>();
      auto* function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr;
      if (function != nullptr) {
        found.fallbacks.push_back(&function->get_executor());
      }
    }
    for (Block* inner : node->blocks()) {
      look(inner, found);
    }
  }
}

const char* state(GraphExecutor& executor, bool training);

std::vector<GraphExecutor*> executors_of(const std::vector<torch::jit::GraphFunction*>& functions) {
  std::vector<GraphExecutor*> executors;
  executors.reserve(functions.size());
  for (torch::jit::GraphFunction* function : functions) {
    executors.push_back(&function->get_executor());
  }
  return executors;
}

// What a call that reaches all of them finds: groups, else something that is still to be optimised, else
// neither.
const char* state(const std::vector<GraphExecutor*>& executors, bool training) {
  const char* result = "unfused";
  for (GraphExecutor* executor : executors) {
    const std::string one = state(*executor, training);
    if (one == "fused") {
      return "fused";
    }
    result = one.empty() ? "" : result;
  }
  return result;
}

// `training`: whether autodiff has a part in the call. One without passes by what was optimised for
// training, to its fallback.
const char* state(GraphExecutor& executor, bool training) {
  if (!executor.isOptimized()) {
    return "";
  }
  const torch::jit::GraphExecutorState debug = executor.getDebugState();
  if (debug.execution_plans.empty()) {
    return "";
  }
  torch::jit::ExecutionPlan plan = debug.execution_plans.begin()->second;
  if (const auto settled = settled_functions(*plan.graph)) {
    std::vector<GraphExecutor*> executors;
    for (const auto& [function, trains] : *settled) {
      if (trains == training) {
        executors.push_back(&function->get_executor());
      }
    }
    return executors.empty() ? "" : state(executors, training);
  }
  const JointProgram* program = joint_program_of(*plan.graph);
  if (program && !training) {
    return program->plain() ? state(program->plain()->get_executor(), false) : "";
  }
  if (program && program->packed().empty()) {
    return state(executors_of(program->plain_functions()), training);
  }
  Contents found;
  look(plan.graph->block(), found);
  if (training != found.differentiable && !found.fallbacks.empty()) {
    return state(found.fallbacks, training);
  }
  std::vector<GraphExecutor*> forwards, backwards;
  for (const auto& [forward, backward] : differentiable_executors(plan.code)) {
    forwards.push_back(forward);
    backwards.push_back(backward);
  }
  const bool fused = found.groups || state(backwards, false) == std::string("fused");
  return fused ? "fused" : state(forwards, false);
}

std::string optimised(torch::jit::Function& function, bool training) {
  const py::gil_scoped_release released;  // another thread may hold the executor's lock, and wait for Python
  auto* graph = torch::jit::tryToGraphFunction(function);
  return graph == nullptr ? "" : state(graph->get_executor(), training);
}

}  // namespace

void bind_optimised(py::module_& m) {
  constexpr const char* doc =
      "What torch has made of the function: '' where it is still to be optimised, else 'fused' or "
      "'unfused'.";
  m.def(
      "optimised",
      [](const torch::jit::StrongFunctionPtr& f, bool training) {
        return optimised(*f.function_, training);
      },
      doc);
  m.def("optimised", [](const torch::jit::Method& method, bool training) {
    return optimised(method.function(), training);
  });
}

}  // namespace tsfuser
