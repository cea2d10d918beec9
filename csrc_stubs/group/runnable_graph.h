// A graph that can be called: as a list of steps or, where a node cannot be one, by torch's interpreter.
//
// In: the stack of a call. Out: the results in place of the inputs. Steps raise what the ops raise, an
// IndexError as an IndexError, and name the line of the program. Torch's interpreter makes a RuntimeError of
// all errors.
#pragma once

#include "group/step_list.h"

#include <ATen/core/stack.h>

#include <memory>

namespace torch::jit {
struct Code;
}  // namespace torch::jit

namespace tsfuser {

class RunnableGraph {
 public:
  // Keeps the graph, which nobody may change from now on. `name`: what errors of the interpreter call it.
  RunnableGraph(const std::shared_ptr<torch::jit::Graph>& graph, const char* name);
  ~RunnableGraph();

  void run(torch::jit::Stack& stack) const;
  bool is_list_of_steps() const { return steps_ != nullptr; }

 private:
  std::unique_ptr<StepList> steps_;
  std::unique_ptr<torch::jit::Code> code_;  // where there are no steps
};

// While there is one on this thread, what a group raises has the type that its ops raise: no TorchScript
// program runs the group, which would get an error with a traceback of torch's interpreter.
class KeepErrorTypes {
 public:
  KeepErrorTypes();
  ~KeepErrorTypes();
  KeepErrorTypes(const KeepErrorTypes&) = delete;
  KeepErrorTypes& operator=(const KeepErrorTypes&) = delete;

  static bool any();

 private:
  const bool before_;
};

}  // namespace tsfuser
