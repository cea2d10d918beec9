// Functions whose branches depend on the facts of a call (call_facts.h): on sizes, numbers, and attributes
// of modules. Before:
//
//     %shifted : bool = aten::gt(%sum, %zero)
//     %y = prim::If(%shifted) block0(): %r = aten::roll(%x, ...) -> (%r)  block1(): -> (%x)
//     ... nodes that read %y
//
// Groups and differentiable graphs end at such a branch. So the whole graph becomes one node that has it as
// `Subgraph`:
//
//     %out = tsfuser::settled(%self, %x)
//
// The first call with certain facts runs the graph as it is and notes which branches it takes. Later calls
// with equal facts take the same branches. They run a copy of the graph that has only these: a function of
// its own, which torch profiles and optimises, and whose nodes are in one block. Calls with other facts that
// take the same branches share it, so a new size compiles nothing. Calls that may record gradients have
// copies of their own, as torch optimises a function for what it profiled. In the graph `tsfuser::taken`
// notes a condition, and hands it on:
//
//     %c : bool = tsfuser::taken(%shifted, %zero);  %y = prim::If(%c) ...
#pragma once

#include "torchscript/call_facts.h"

#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace torch::jit {
struct Code;
struct Graph;
struct GraphFunction;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

// A function that runs in the place of a graph; `training`: in calls that may record gradients. The
// general function runs in all calls, and is listed twice.
struct SettledFunction {
  torch::jit::GraphFunction* function;
  bool training;
};

class SettledBranches {
 public:
  // Of a graph in which `tsfuser::taken` notes the branches.
  explicit SettledBranches(const std::shared_ptr<torch::jit::Graph>& graph);
  ~SettledBranches();
  SettledBranches(const SettledBranches&) = delete;
  SettledBranches& operator=(const SettledBranches&) = delete;

  // In the child of a fork of the process: no other thread of the parent holds a lock there.
  static void after_fork();
  // The state that the node has in common with its copies.
  static std::shared_ptr<SettledBranches> of(const torch::jit::Node* node);

  void run(torch::jit::Stack& stack);
  // Those that were made by now: for each choice of branches, and for new facts.
  std::vector<SettledFunction> functions() const;

 private:
  using Words = CallFacts::Words;
  using Branches = std::vector<int8_t>;  // 1: the first block ran, 0: the second one, -1: none
  struct Choice {                        // what a copy is made for
    bool training;
    Branches branches;
    bool operator<(const Choice& other) const {
      return std::tie(training, branches) < std::tie(other.training, other.branches);
    }
  };
  using Function = std::unique_ptr<torch::jit::GraphFunction>;
  struct Hash {
    size_t operator()(const Words& words) const;
  };

  bool may_record_gradients(at::ArrayRef<c10::IValue> arguments) const;
  torch::jit::GraphFunction* known(const Words& words) const;
  void remember(const Words& words, Choice choice);
  Function without_branches(const Branches& taken) const;
  void run_noting(torch::jit::Stack& stack);
  template <class Made, class Make>
  Made* made_once(std::unique_ptr<Made>& kept, const Make& make);

  const std::shared_ptr<torch::jit::Graph> graph_;
  const CallFacts facts_;
  size_t branches_ = 0;
  bool reads_tensors_ = false;        // of modules
  std::atomic<size_t> new_facts_{0};  // calls that had some
  mutable std::shared_mutex mutex_;   // of what follows
  std::unordered_map<Words, torch::jit::GraphFunction*, Hash> known_;
  std::map<Choice, Function> specialised_;
  Function general_;  // where facts are new again and again
  std::unique_ptr<torch::jit::Code> plain_;
};

// Whether the tensor, or one in the list or tuple, requires a gradient.
bool requires_gradient(const c10::IValue& value);

// `tsfuser::settled` and `tsfuser::taken`.
c10::Symbol settled_kind();
c10::Symbol taken_kind();
// The operators `tsfuser::settled` and `tsfuser::taken`; the latter hands its condition on.
void register_settled_branches();
// Whether branches are settled at all; returns the state before.
bool settle_branches(bool on);
// Has torch not merge what is settled into one result where the program has two (equal_ops.cpp).
void keep_results_apart(torch::jit::Graph& graph);
void register_unmerged();  // the operator that it makes nodes of
// The condition that is noted, or the value itself.
torch::jit::Value* before_note(torch::jit::Value* condition);
// The step of torchscript/prepare.cpp. Whether the graph is one node now, but for what torch has passed by,
// which has no readers.
bool settle_branches(torch::jit::Graph& graph, const torch::jit::Node* first);
// The functions that the node runs which stands for a graph with settled branches; none for other graphs.
std::optional<std::vector<SettledFunction>> settled_functions(torch::jit::Graph& graph);

// Branches of the graph, and of its copies, are not settled: those of autodiff's formulas in a part of a
// program, whose arguments say little of them.
void keep_branches(torch::jit::Graph& graph);

}  // namespace tsfuser
