// A graph that can be called: as a list of steps or, where a node cannot be one, by torch's interpreter.
//
// In: the stack of a call. Out: the results in place of the inputs. Steps raise what the ops raise, an
// IndexError as an IndexError. Torch's interpreter makes a RuntimeError of nearly all errors.
#pragma once

#include "group/step_list.h"

#include <memory>
#include <string>

namespace torch::jit {
struct Code;
}  // namespace torch::jit

namespace tsfuser {

class RunnableGraph {
 public:
  // `name`: what the profiler, and errors of the interpreter, call it.
  RunnableGraph(const std::shared_ptr<torch::jit::Graph>& graph, const char* name);
  ~RunnableGraph();

  void run(torch::jit::Stack& stack) const;
  bool is_list_of_steps() const { return steps_ != nullptr; }

 private:
  const std::string name_;
  std::unique_ptr<StepList> steps_;
  std::unique_ptr<torch::jit::Code> code_;  // where there are no steps
};

}  // namespace tsfuser
