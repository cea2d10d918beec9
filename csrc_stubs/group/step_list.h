// A graph as a list of steps, which run without torch's interpreter. For each call the interpreter sets up a
// state, registers and a frame, which takes longer than the work of a small graph.
//
// In: a graph (that one of torch's executors has optimised, of torch.compile, or of an unfused group), and
// the stack of a call. Out: the same stack with the graph's results in place of its inputs, as the
// interpreter leaves it. Errors are those of the ops, with their types. Example: of
//
//     %ok = prim::CudaFusionGuard(%x);  %y = prim::If(%ok) block0(): group  block1(): fallback
//
// the steps are an op, and a choice between two lists of one step each. In the end both are merged into one
// step. It asks the guard only if the guard has not yet accepted such arguments on this thread. A loop is a
// step that runs a list of steps again and again.
#pragma once

#include "call/exact_cache.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type_base.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/frontend/source_range.h>

#include <memory>
#include <optional>
#include <vector>

namespace torch::jit {
struct Graph;
struct GraphFunction;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

class Group;

class StepList {
 public:
  // Of the graph without the outputs of the numbers `left_out`, in order. Null where it has nodes that only
  // the interpreter knows (attributes, methods, dicts).
  static std::unique_ptr<StepList> of(torch::jit::Graph& graph, const std::vector<size_t>& left_out = {});

  // Groups that run unfused raise from now on what their ops raise (`EagerErrors`, group.h).
  void keep_error_types() { keeps_error_types_ = true; }
  void run(torch::jit::Stack& stack) const;
  // Once `run` has thrown: the line of the program that the step which failed comes from, where it is known.
  // It is told once.
  static std::optional<torch::jit::SourceRange> take_failed_place();
  // Whether an op other than a group makes tensors, or hands its operands on.
  bool has_tensor_ops() const { return has_tensor_ops_; }
  size_t outputs() const { return body_.results.size(); }

 private:
  friend class StepListBuilder;

  // Where a step finds a value: a register, or a constant. `last`: no later step reads that register.
  struct Operand {
    int32_t index = 0;
    bool constant = false;
    bool last = false;
  };
  // Inside of their steps, for usual numbers: between two runs a network has used up the cache.
  using Operands = c10::SmallVector<Operand, 10>;
  struct Step;
  using Steps = std::vector<Step>;
  // A block of an If or Loop: what it runs, what it gives, and the registers that nobody reads any more once
  // the branch is taken, or the loop is done. `parameters`: registers for the number of the turn, and for
  // what the last turn hands on; -1: nobody reads it.
  struct Branch {
    Steps steps;
    Operands results;
    std::vector<int32_t> dropped, parameters;
  };
  enum class Kind : uint8_t {
    Op,
    If,
    Loop,
    Guarded,  // operands and op of a guard, results and branches of the If behind it
    Call,
    TupleConstruct,
    TupleUnpack,
    ListConstruct,
    ListUnpack,
    AllOf,
    AllDefined,
    NoneDefined
  };
  struct Step {
    Kind kind = Kind::Op;
    bool counted = false;   // the op takes the number of its operands from the stack
    bool is_group = false;  // that the op runs
    Operands operands;
    c10::SmallVector<int32_t, 6> results;  // registers; -1: nobody reads it
    torch::jit::Operation op{nullptr};
    torch::jit::GraphFunction* function = nullptr;
    c10::TypePtr items;            // of a list
    std::vector<Branch> branches;  // where the condition holds, and where not; or the body of a loop
    Group* group = nullptr;        // that the step, or the first branch of a guarded one, runs
    CallKey guard = 0;             // of a guarded one
    const torch::jit::Node* node = nullptr;  // for the place of an error
  };
  struct Frame;

  void run_steps(const Steps& steps, Frame& frame) const;
  void choose(const Step& step, bool holds, Frame& frame) const;
  void loop(const Step& step, Frame& frame) const;
  void run_guarded(const Step& step, Frame& frame) const;
  bool holds(const Step& step, Frame& frame) const;  // of AllOf, AllDefined and NoneDefined
  void run_step(const Step& step, Frame& frame) const;

  std::shared_ptr<torch::jit::Graph> graph_;  // which the operations may point to
  Branch body_;
  std::vector<c10::IValue> constants_;
  std::vector<int32_t> unread_;  // inputs
  size_t inputs_ = 0, registers_ = 0;
  bool has_tensor_ops_ = false, keeps_error_types_ = false;
};

}  // namespace tsfuser
