// Functions whose branches depend on the facts of a call (call_facts.h): on sizes, numbers, and attributes
// of modules. Before:
//
//     %shifted : bool = aten::gt(%sum, %zero)
//     %y = prim::If(%shifted) block0(): %r = aten::roll(%x, ...) -> (%r)  block1(): -> (%x)
//     ... nodes that read %y
//
// Groups and differentiable graphs end at such a branch. So the whole graph becomes one call of a function
// of ours, which holds it:
//
//     %out = prim::CallFunction(%settled, %self, %x)
//
// The first call with certain facts runs the graph as it is and notes which branches it takes. Later calls
// with equal facts take the same branches. They run a copy of the graph that has only these: a function of
// its own, which torch profiles and optimises, and whose nodes are in one block. Calls with other facts that
// take the same branches share it, so a new size compiles nothing. Calls that may record gradients have
// copies of their own, as torch optimises a function for what it profiled. In the graph `tsfuser::taken`
// notes a condition, and hands it on; `%note` is None but where branches are noted:
//
//     %c : bool = tsfuser::taken(%shifted, %zero, %note);  %y = prim::If(%c) ...
//
// All of them run as functions do that a program calls: in a frame of the interpreter that has called, under
// the name of the program's function. So an exception of the program is as it is without us.
#pragma once

#include "torchscript/call_facts.h"

#include <ATen/core/function.h>
#include <ATen/core/qualified_name.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
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

class SettledBranches final : public torch::jit::Function {
 public:
  using Run = c10::function_ref<void(const torch::jit::Code&)>;
  using Words = CallFacts::Words;

  // Of a graph in which `tsfuser::taken` notes the branches.
  explicit SettledBranches(const std::shared_ptr<torch::jit::Graph>& graph);
  ~SettledBranches() override;
  SettledBranches(const SettledBranches&) = delete;
  SettledBranches& operator=(const SettledBranches&) = delete;

  // In the child of a fork of the process: no other thread of the parent holds a lock there.
  static void after_fork();
  // That which the node calls; null for other nodes. Lives as long as the node or a copy of it.
  static SettledBranches* of(const torch::jit::Node* node);
  // A call of a new one, of that graph, not yet in `graph`.
  static torch::jit::Node* call_of(const std::shared_ptr<torch::jit::Graph>& settled,
                                   torch::jit::Graph& graph);

  // Those that were made by now: for each choice of branches, and for new facts.
  std::vector<SettledFunction> functions() const;
  // That which calls with such arguments run; null where none was made for their facts.
  torch::jit::GraphFunction* function_for(at::ArrayRef<c10::IValue> arguments) const;
  // That which ran last; null where the graph ran as it is.
  torch::jit::GraphFunction* last() const { return last_.load(std::memory_order_relaxed); }
  // After a call with these facts that took these branches.
  void remember(const Words& facts, bool training, std::vector<int8_t> branches);

  // As a function that is called.
  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out, Run run) override;
  using Function::call;
  void run(torch::jit::Stack& stack) override;
  size_t num_inputs() const override;
  const c10::QualifiedName& qualname() const override;
  const c10::FunctionSchema& getSchema() const override;
  void ensure_defined() override {}
  Function& setSchema(c10::FunctionSchema) override { return *this; }

 private:
  using Branches = std::vector<int8_t>;  // 1: the first block ran, 0: the second one, -1: none
  struct Choice {                        // what a copy is made for
    bool training;
    Branches branches;
    bool operator<(const Choice& other) const {
      return std::tie(training, branches) < std::tie(other.training, other.branches);
    }
  };
  using MadeFunction = std::unique_ptr<torch::jit::GraphFunction>;
  struct Hash {
    size_t operator()(const Words& words) const;
  };

  bool may_record_gradients(at::ArrayRef<c10::IValue> arguments) const;
  // Whether the arguments have facts; these and whether the call may record gradients are the words.
  bool describe(at::ArrayRef<c10::IValue> arguments, Words& words) const;
  torch::jit::GraphFunction* known(const Words& words) const;
  void make_known(const Words& words, Choice choice);
  MadeFunction without_branches(const Branches& branches) const;
  std::shared_ptr<torch::jit::Graph> noting_graph() const;
  MadeFunction function_of(std::shared_ptr<torch::jit::Graph> graph) const;
  void run_noting(torch::jit::Stack& stack, Run run);
  template <class Made, class Make>
  Made* made_once(std::unique_ptr<Made>& kept, const Make& make);
  void note_name();

  const std::shared_ptr<torch::jit::Graph> graph_;
  const CallFacts facts_;
  size_t branches_ = 0;
  bool reads_tensors_ = false;        // of modules
  std::atomic<size_t> new_facts_{0};  // calls that had some
  std::atomic<torch::jit::GraphFunction*> last_{nullptr};
  std::atomic<bool> gave_up_{false};  // a copy could not be made: the graph runs as it is
  mutable std::shared_mutex mutex_;   // of what follows
  std::unordered_map<Words, torch::jit::GraphFunction*, Hash> known_;
  std::map<Choice, MadeFunction> specialised_;
  MadeFunction general_;  // where facts are new again and again
  std::unique_ptr<torch::jit::Code> plain_;
  std::string name_;  // of the function that calls; empty until it has
};

// Whether the tensor, or one in the list or tuple, requires a gradient.
bool requires_gradient(const c10::IValue& value);

// `tsfuser::taken`
c10::Symbol taken_kind();
// The operators `tsfuser::taken`, which hands its condition on, and `tsfuser::noted`.
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
// Whether a graph may become one call, in the first call of which what torch has passed by runs twice.
bool may_become_call(torch::jit::Graph& graph, const torch::jit::Node* first);
// Has the graph be that call, of a new function with the graph's inputs. All other nodes are gone, but for
// what torch has passed by.
void become_call(torch::jit::Graph& graph, const torch::jit::Node* first, torch::jit::Node* call);
// What the graph calls if its branches were settled; else null.
SettledBranches* settled_branches_of(torch::jit::Graph& graph);
// The functions that it runs; none for other graphs.
std::optional<std::vector<SettledFunction>> settled_functions(torch::jit::Graph& graph);

// Branches of the graph, and of its copies, are not settled: those of autodiff's formulas in a part of a
// program, whose arguments say little of them.
void keep_branches(torch::jit::Graph& graph);

}  // namespace tsfuser
