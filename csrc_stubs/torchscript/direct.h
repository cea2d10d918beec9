// A prim::DifferentiableGraph with an autograd node of ours.
//
// Torch's operator runs an executor's plan in an interpreter, forward and backward, on detached copies of
// its operands. Our operator does the same with the same executors: it saves the same values in the same
// order, makes the same edges, and raises the same errors. Two things differ. Once both executors have
// optimised their graphs, and if both can be `StepList`s, these run, without executors and interpreters.
// And an input that no gradient reaches gets none, as in eager; torch's operator makes zeros for it.
//
// Torch's operator stays in the program's code, where tools look at its graphs. So the check before the
// differentiable graph (differentiable.cpp) sends a call to the fallback, as it does if the graph may not
// run, and notes that the call has to run directly. A call that needs a graph of the backward (double
// backward) runs torch's executor.
//
// Torch's executor of a backward takes what an op gives for a gradient: it puts an addition in the place of
// one that knows undefined tensors. But a batch norm without weights gives an undefined gradient for an
// empty batch. Then the backward as autodiff has made it runs, which asks each gradient whether it is
// defined, and undefined results become zeros, as eager has them.
//
// The node of a joint graph keeps to what eager's nodes do, of which there is one for each op: it unpacks
// and frees what those unpack that run (partial_backward.h).
#pragma once

#include "group/step_list.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace torch::jit {
struct Code;
struct GraphExecutor;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

class PartialBackwards;
class UncheckedGraph;

class DirectGraph : public std::enable_shared_from_this<DirectGraph> {
 public:
  DirectGraph();
  ~DirectGraph();

  // For the differentiable graph behind the check, where the fallback takes and gives the same; else null.
  // Marks the node of the graph.
  static std::shared_ptr<DirectGraph> behind(const torch::jit::Node& check);
  // The one that the node is marked with; else null.
  static std::shared_ptr<DirectGraph> marked(torch::jit::Node& node);
  // Copies of `operation`, that torch has made of the node, are made of copies of the node that `program_of`
  // makes.
  static const torch::jit::Operation* being_copied();

  // A program of the node alone, with the operation that torch has made of it: it tells the executors.
  static std::shared_ptr<torch::jit::Code> program_of(const torch::jit::Node& node,
                                                      const torch::jit::Operation& operation);
  // Takes hold of the executors in the program, which is of the node. `plain`, which may be null, runs the
  // calls that it takes.
  void take(const torch::jit::Node& node, std::shared_ptr<torch::jit::Code> program,
            std::shared_ptr<const UncheckedGraph> plain);
  // Whether calls may run here. Finds out whether they may do so without executors by now.
  bool takes_calls();
  // From the inputs to the results of the differentiable graph.
  void run(torch::jit::Stack& stack) const;

 private:
  friend class DirectBackward;
  enum class State : uint8_t { Profiling, Ready, Never };

  void look_at_plans();
  void note_what_is_saved(const torch::jit::Node& node);
  void run_forward(torch::jit::Stack& stack) const;
  // Whether an op may have given no gradient where eager gives zeros.
  bool run_backward(torch::jit::Stack& stack) const;

  std::atomic<State> state_{State::Profiling};
  std::mutex mutex_;                        // of the change to Ready
  std::shared_ptr<torch::jit::Code> code_;  // holds the executors
  std::shared_ptr<const UncheckedGraph> plain_;
  torch::jit::GraphExecutor* forward_executor_ = nullptr;
  torch::jit::GraphExecutor* backward_executor_ = nullptr;
  std::unique_ptr<const StepList> forward_, backward_;
  std::unique_ptr<const PartialBackwards> partials_;  // of a joint graph
  std::unique_ptr<torch::jit::Code> plain_backward_;  // for empty batches; may be null
  size_t inputs_ = 0, results_ = 0;                   // of the differentiable graph
  // The forward gives the results and what is saved for the backward. Some of the latter it is given: these
  // are left out, and the inputs themselves are saved.
  size_t outputs_ = 0;                   // of the forward, but for those that are left out
  std::vector<size_t> given_;            // outputs that are left out
  std::vector<int64_t> gradients_;       // outputs that gradients come for; -1: is left out
  size_t result_gradients_ = 0;          // those of results, which come first
  std::vector<int64_t> differentiated_;  // inputs that get a gradient
  struct Saved {
    int64_t index;    // of an input, or of an output that is not left out
    size_t position;  // among the arguments of the backward that are no gradients
  };
  std::vector<Saved> saved_inputs_, saved_outputs_;
};

// Set by a check, for the fallback that runs next on this thread.
const DirectGraph*& next_direct();

}  // namespace tsfuser
