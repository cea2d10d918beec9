#include "group/runnable_graph.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <utility>

namespace tsfuser {
namespace {

bool& kept() {
  static thread_local bool value = false;
  return value;
}

}  // namespace

KeepErrorTypes::KeepErrorTypes() : before_(std::exchange(kept(), true)) {}
KeepErrorTypes::~KeepErrorTypes() { kept() = before_; }
bool KeepErrorTypes::any() { return kept(); }

RunnableGraph::RunnableGraph(const std::shared_ptr<torch::jit::Graph>& graph, const char* name)
    : steps_(StepList::of(*graph)) {
  if (steps_) {
    steps_->name_lines();
  } else {
    code_ = std::make_unique<torch::jit::Code>(graph, name);
  }
}

RunnableGraph::~RunnableGraph() = default;

void RunnableGraph::run(torch::jit::Stack& stack) const {
  if (steps_) {
    steps_->run(stack);
  } else {
    torch::jit::InterpreterState(*code_).run(stack);
  }
}

}  // namespace tsfuser
