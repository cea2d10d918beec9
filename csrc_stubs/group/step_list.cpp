#include "group/step_list.h"
#include "group/group.h"
#include "group/guard_widening.h"

#include <ATen/core/List.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tsfuser {

namespace {

using torch::jit::Stack;

// Of the error that was thrown last on this thread. `number`: of the node among those of its graph; of a
// node in a block, that of the outermost node around it; -1: there is none.
struct Failure {
  std::optional<torch::jit::SourceRange> place;
  int64_t number = -1;
};

Failure& failure() {
  static thread_local Failure last;
  return last;
}

int64_t number_of(const torch::jit::Node* node) {
  while (node->owningBlock()->owningNode() != nullptr) {
    node = node->owningBlock()->owningNode();
  }
  const auto nodes = node->owningBlock()->nodes();
  return std::distance(nodes.begin(), std::find(nodes.begin(), nodes.end(), node));
}

// Programs share a group if its text is the same, so its nodes may stand for lines of another program. Those
// of this program's subgraph stand for its own.
void note_failure(const torch::jit::Node& node) {
  Failure& last = failure();
  const torch::jit::Node* failed = &node;
  if (node.kind() == c10::prim::CudaFusionGroup) {
    const auto nodes = node.g(c10::attr::Subgraph)->nodes();
    const bool known = last.number >= 0 && last.number < std::distance(nodes.begin(), nodes.end());
    failed = known ? *std::next(nodes.begin(), last.number) : nullptr;
  }
  last = {};
  if (failed != nullptr && failed->sourceRange().file_line_col()) {
    last.place = failed->sourceRange();
  }
  last.number = number_of(&node);
}

}  // namespace

struct StepList::Frame {
  Stack& stack;
  c10::SmallVector<c10::IValue, 40> registers;

  c10::IValue take(const Operand& operand, const std::vector<c10::IValue>& constants) {
    if (operand.constant) {
      return constants[operand.index];
    }
    c10::IValue& value = registers[operand.index];
    return operand.last ? std::move(value) : value;
  }
  template <class Operands>
  void push(const Operands& operands, const std::vector<c10::IValue>& constants) {
    for (const Operand& operand : operands) {
      stack.push_back(take(operand, constants));
    }
  }
  // What `push` has pushed.
  template <class Operands>
  void put_back(const Operands& operands) {
    for (size_t i = operands.size(); i-- > 0;) {
      if (operands[i].last) {
        registers[operands[i].index] = std::move(stack.back());
      }
      stack.pop_back();
    }
  }
  template <class Registers>
  void pop(const Registers& results) {
    for (size_t i = results.size(); i-- > 0;) {
      if (results[i] >= 0) {
        registers[results[i]] = std::move(stack.back());
      }
      stack.pop_back();
    }
  }
};

void StepList::run(Stack& stack) const {
  Frame frame{stack, {}};
  frame.registers.resize(registers_);
  const auto inputs = torch::jit::last(stack, inputs_);
  for (size_t i = 0; i < inputs_; ++i) {
    frame.registers[i] = std::move(const_cast<c10::IValue&>(inputs[i]));
  }
  torch::jit::drop(stack, inputs_);
  for (const int32_t input : unread_) {
    frame.registers[input] = {};
  }
  run_steps(body_.steps, frame);
  for (const Operand& result : body_.results) {
    stack.push_back(frame.take(result, constants_));
  }
}

std::optional<torch::jit::SourceRange> StepList::take_failed_place() {
  return std::exchange(failure(), {}).place;
}

void StepList::run_steps(const Steps& steps, Frame& frame) const {
  for (const Step& step : steps) {
    try {
      run_step(step, frame);
    } catch (...) {
      if (step.branches.empty()) {  // else one of the steps inside has noted it
        note_failure(*step.node);
      }
      throw;
    }
  }
}

void StepList::choose(const Step& step, bool holds, Frame& frame) const {
  const Branch& branch = step.branches[holds ? 0 : 1];
  for (const int32_t dropped : branch.dropped) {
    frame.registers[dropped] = {};
  }
  run_steps(branch.steps, frame);
  for (size_t i = 0; i < step.results.size(); ++i) {
    c10::IValue result = frame.take(branch.results[i], constants_);
    if (step.results[i] >= 0) {
      frame.registers[step.results[i]] = std::move(result);
    }
  }
}

void StepList::loop(const Step& step, Frame& frame) const {
  const Branch& body = step.branches[0];
  const int64_t most = frame.take(step.operands[0], constants_).toInt();
  bool goes_on = frame.take(step.operands[1], constants_).toBool();
  c10::SmallVector<c10::IValue, 4> handed_on;
  for (size_t i = 2; i < step.operands.size(); ++i) {
    handed_on.push_back(frame.take(step.operands[i], constants_));
  }
  for (int64_t turn = 0; turn < most && goes_on; ++turn) {
    if (body.parameters[0] >= 0) {
      frame.registers[body.parameters[0]] = turn;
    }
    for (size_t i = 0; i < handed_on.size(); ++i) {
      if (body.parameters[i + 1] >= 0) {
        frame.registers[body.parameters[i + 1]] = std::move(handed_on[i]);
      }
      handed_on[i] = {};  // a tensor that the body does not read is not kept
    }
    run_steps(body.steps, frame);
    goes_on = frame.take(body.results[0], constants_).toBool();
    for (size_t i = 0; i < handed_on.size(); ++i) {
      handed_on[i] = frame.take(body.results[i + 1], constants_);
    }
  }
  for (const int32_t dropped : body.dropped) {
    frame.registers[dropped] = {};
  }
  for (size_t i = 0; i < handed_on.size(); ++i) {
    if (step.results[i] >= 0) {
      frame.registers[step.results[i]] = std::move(handed_on[i]);
    }
  }
}

bool StepList::holds(const Step& step, Frame& frame) const {
  bool all = true;
  for (const Operand& operand : step.operands) {
    const c10::IValue& value = operand.constant ? constants_[operand.index] : frame.registers[operand.index];
    if (step.kind == Kind::AllOf) {
      all = all && value.toBool();
    } else {
      all = all && value.toTensor().defined() == (step.kind == Kind::AllDefined);
    }
    if (operand.last) {
      frame.registers[operand.index] = {};
    }
  }
  return all;
}

void StepList::run_step(const Step& step, Frame& frame) const {
  Stack& stack = frame.stack;
  if (step.kind == Kind::If) {
    return choose(step, frame.take(step.operands[0], constants_).toBool(), frame);
  }
  if (step.kind == Kind::Loop) {
    return loop(step, frame);
  }
  if (step.kind == Kind::Guarded) {
    return run_guarded(step, frame);
  }
  if (step.kind >= Kind::AllOf) {
    const bool all = holds(step, frame);
    if (step.results[0] >= 0) {
      frame.registers[step.results[0]] = all;
    }
    return;
  }
  frame.push(step.operands, constants_);
  switch (step.kind) {
    case Kind::Op:
      if (step.counted) {
        stack.emplace_back(static_cast<int64_t>(step.operands.size()));
      }
      if (step.is_group && keeps_error_types_) {
        const EagerErrors wanted;
        const_cast<torch::jit::Operation&>(step.op)(stack);
      } else {
        const_cast<torch::jit::Operation&>(step.op)(stack);
      }
      break;
    case Kind::Call: step.function->run(stack); break;
    case Kind::ListConstruct: {
      c10::impl::GenericList list(step.items);
      list.reserve(step.operands.size());
      for (const c10::IValue& item : torch::jit::last(stack, step.operands.size())) {
        list.push_back(item);
      }
      torch::jit::drop(stack, step.operands.size());
      stack.emplace_back(std::move(list));
      break;
    }
    case Kind::ListUnpack: {
      const auto list = torch::jit::pop(stack).toList();
      TORCH_CHECK(list.size() == step.results.size(), "Expected ", step.results.size(),
                  " elements in a list but found ", list.size());
      stack.insert(stack.end(), list.begin(), list.end());
      break;
    }
    case Kind::TupleConstruct: {
      std::vector<c10::IValue> items = torch::jit::pop(stack, step.operands.size());
      stack.emplace_back(c10::ivalue::Tuple::create(std::move(items)));
      break;
    }
    default: {
      const auto tuple = torch::jit::pop(stack).toTuple();
      stack.insert(stack.end(), tuple->elements().begin(), tuple->elements().end());
    }
  }
  frame.pop(step.results);
}

// Where the guard would agree, it is not asked.
void StepList::run_guarded(const Step& step, Frame& frame) const {
  Stack& stack = frame.stack;
  const Branch& fused = step.branches[0];
  const Step& group = fused.steps[0];
  const size_t operands = group.operands.size();
  frame.push(group.operands, constants_);
  if (!step.group->run_remembered(step.guard, stack, operands)) {
    frame.put_back(group.operands);
    frame.push(step.operands, constants_);
    const_cast<torch::jit::Operation&>(step.op)(stack);
    if (!torch::jit::pop(stack).toBool()) {
      return choose(step, false, frame);
    }
    frame.push(group.operands, constants_);
    step.group->run(stack, operands, last_admission().agreed ? step.guard : 0);
  }
  frame.pop(group.results);
  for (const int32_t dropped : fused.dropped) {
    frame.registers[dropped] = {};
  }
}

}  // namespace tsfuser
