// The backward of a joint graph where gradients are missing, or not all are asked for: the part that such a
// call needs (tsfuser/joint/partial.py), made when the first one comes; and what that part is to find of
// what the forward has saved. In eager each op has a node of autograd, which unpacks and frees what it has
// saved; a joint graph has one node for all ops.
//
// In: which gradients are there, and which are asked for. Out: the graph to run, and the `Readers` that run:
// ops of the same gradients, of whose saved values the node is to know whether they are freed.
#pragma once

#include "group/step_list.h"

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace torch::jit {
struct Code;
struct Graph;
struct GraphExecutor;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

using Flags = c10::SmallVector<bool, 16>;

class PartialBackward {
 public:
  // `runs_again`: torch's interpreter runs it, so that autograd records what it does.
  PartialBackward(std::shared_ptr<torch::jit::Graph> graph, std::vector<size_t> places,
                  std::vector<size_t> zeros, bool runs_again);
  ~PartialBackward();

  // What the arguments are, by their places among those of the whole backward.
  const std::vector<size_t>& places() const { return places_; }
  // The missing gradients that have to be zeros.
  const std::vector<size_t>& zeros() const { return zeros_; }
  // From the arguments to a tuple.
  void run(torch::jit::Stack& stack) const;

 private:
  enum class State : uint8_t { Profiling, Ready, Never };

  void look_at_plan() const;

  const std::vector<size_t> places_, zeros_;
  std::unique_ptr<torch::jit::Code> code_;               // of one that runs again
  std::unique_ptr<torch::jit::GraphExecutor> executor_;  // of others
  mutable std::mutex mutex_;                             // of the change to Ready
  mutable std::atomic<State> state_{State::Profiling};
  mutable std::unique_ptr<const StepList> steps_;
};

class PartialBackwards {
 public:
  // Of the node of a joint graph.
  explicit PartialBackwards(const torch::jit::Node& node);

  struct Reader {
    // Of gradients and results, the places; of saved values those of tensors of which elements are read, and
    // of others, which are asked for their sizes or the like.
    std::vector<size_t> gradients, results, elements, others;
  };
  const std::vector<Reader>& readers() const { return readers_; }
  // By their numbers, whether they run.
  Flags running(const Flags& present, const Flags& asked) const;
  // All of the backward, with zeros for missing gradients, if Python could make no part.
  std::shared_ptr<const PartialBackward> find(bool again, const Flags& present, const Flags& asked) const;

 private:
  struct Known {
    bool again;
    Flags present, asked;
    std::shared_ptr<const PartialBackward> part;
  };

  std::shared_ptr<const PartialBackward> make(bool again, const Flags& present, const Flags& asked) const;

  std::vector<std::shared_ptr<torch::jit::Graph>> ways_;  // the backward, and that of second derivatives
  std::vector<Reader> readers_;
  mutable std::mutex mutex_;  // of what follows
  mutable std::vector<Known> known_;
};

// As torch's interpreter does, with the traceback that TorchScript programs get for an error of torch's.
void run_with_traceback(const StepList& steps, torch::jit::Stack& stack);

}  // namespace tsfuser
