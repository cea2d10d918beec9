#include "group/runnable_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

namespace tsfuser {

RunnableGraph::RunnableGraph(const std::shared_ptr<torch::jit::Graph>& graph, const char* name)
    : name_(name), steps_(StepList::of(*graph)) {
  if (steps_) {
    steps_->keep_error_types();
  } else {
    code_ = std::make_unique<torch::jit::Code>(graph, name);
  }
}

RunnableGraph::~RunnableGraph() = default;

void RunnableGraph::run(torch::jit::Stack& stack) const {
  if (steps_) {
    RECORD_TORCHSCRIPT_FUNCTION(name_, c10::ArrayRef<const c10::IValue>());
    steps_->run(stack);
  } else {
    torch::jit::InterpreterState(*code_).run(stack);
  }
}

}  // namespace tsfuser
