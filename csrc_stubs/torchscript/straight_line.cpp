#include "torchscript/straight_line.h"
#include "torchscript/nodes.h"

#include <ATen/core/List.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

// Whether the interpreter runs the node as an operator, without instructions of its own.
bool is_operator(const Node& node) {
  static const std::unordered_set<c10::Symbol> instructions = {
      c10::prim::GetAttr,       c10::prim::SetAttr,    c10::prim::Loop,          c10::prim::CallMethod,
      c10::prim::CallFunction,  c10::prim::PythonOp,   c10::prim::DictConstruct, c10::prim::ListUnpack,
      c10::prim::ListConstruct, c10::prim::isinstance, c10::prim::TupleSlice,    c10::prim::TupleIndex,
      c10::prim::TupleUnpack,   c10::prim::fork,       c10::prim::CreateObject,  c10::prim::TupleConstruct,
      c10::prim::Enter,         c10::prim::Exit,       c10::prim::Uninitialized, c10::prim::TypeCheck,
      c10::prim::BailOut,       c10::prim::profile,    c10::prim::profile_ivalue};
  return node.blocks().empty() && instructions.count(node.kind()) == 0 && node.maybeOperator() != nullptr;
}

bool may_be_tensor(const Value* value) {
  const auto& type = value->type();
  return type->isSubtypeOf(*c10::TensorType::get()) || !type->containedTypes().empty() ||
         type->kind() == c10::TypeKind::AnyType;
}

bool is_list_of_numbers(const Value* value) {
  const auto type = value->type()->cast<c10::ListType>();
  const auto kind = type ? type->getElementType()->kind() : c10::TypeKind::AnyType;
  return kind == c10::TypeKind::IntType || kind == c10::TypeKind::BoolType ||
         kind == c10::TypeKind::FloatType;
}

// Whether a result may be a tensor of the operands' memory, or a new one. Lists of numbers hold none.
bool gives_tensors(const Node& node) {
  return std::any_of(node.outputs().begin(), node.outputs().end(), [](const Value* value) {
    const auto type = value->type()->cast<c10::OptionalType>();
    const bool numbers = type && type->getElementType()->kind() == c10::TypeKind::ListType;
    return may_be_tensor(value) && !is_list_of_numbers(value) && !numbers;
  });
}

c10::Symbol all_defined() {
  static const auto kind = c10::Symbol::fromQualString("prim::AutogradAllNonZero");
  return kind;
}

c10::Symbol none_defined() {
  static const auto kind = c10::Symbol::fromQualString("prim::AutogradAllZero");
  return kind;
}

// aten::all(prim::ListConstruct(%a, %b...)), of a list that nobody else reads
bool is_all_of_list(const Node& node) {
  static const auto all = c10::Symbol::fromQualString("aten::all");
  return node.kind() == all && node.inputs().size() == 1 && node.outputs().size() == 1 &&
         node.input(0)->node()->kind() == c10::prim::ListConstruct && node.input(0)->uses().size() == 1 &&
         node.input(0)->node()->owningBlock() == node.owningBlock() && is_list_of_numbers(node.input(0)) &&
         std::all_of(node.input(0)->node()->inputs().begin(), node.input(0)->node()->inputs().end(),
                     [](const Value* item) { return item->type()->kind() == c10::TypeKind::BoolType; });
}

}  // namespace

// Goes backward through a graph, so that the first reader that it meets of a value is the last one.
class StraightLineBuilder {
 public:
  explicit StraightLineBuilder(StraightLine& line) : line_(line) {}

  bool build(Graph& graph) {
    for (const Value* input : graph.inputs()) {
      number(input);
    }
    line_.inputs_ = graph.inputs().size();
    Values live;
    const bool done = build(*graph.block(), line_.body_, live);
    line_.registers_ = numbers_.size();
    return done;
  }

 private:
  using Step = StraightLine::Step;
  using Kind = StraightLine::Kind;
  using Operand = StraightLine::Operand;
  using Values = std::unordered_set<const Value*>;

  int32_t number(const Value* value) {
    return numbers_.emplace(value, static_cast<int32_t>(numbers_.size())).first->second;
  }

  Operand operand(const Value* value, Values& live) {
    if (value->node()->kind() == c10::prim::Constant) {
      const auto [found, added] = constants_.emplace(value, static_cast<int32_t>(line_.constants_.size()));
      if (added) {
        line_.constants_.push_back(*torch::jit::toIValue(value));
      }
      return {found->second, /*constant=*/true, /*last=*/false};
    }
    return {number(value), /*constant=*/false, live.insert(value).second};
  }

  template <class List>
  StraightLine::Operands operands(const List& values, Values& live) {
    StraightLine::Operands found(values.size());
    for (size_t i = values.size(); i-- > 0;) {
      found[i] = operand(values[i], live);
    }
    return found;
  }

  // `live`: what is read behind the block; in the end, what is read from the block on.
  bool build(const Block& block, StraightLine::Branch& branch, Values& live) {
    branch.results = operands(block.outputs(), live);
    const auto nodes = block.nodes().reverse();
    for (const Node* node : nodes) {
      if (node->kind() == c10::prim::Constant) {
        const auto constant = torch::jit::toIValue(node->output());
        if (!constant && node->output()->type()->kind() != c10::TypeKind::FunctionType) {
          return false;
        }
        continue;
      }
      if (lists_.count(node) != 0) {
        continue;
      }
      Step step;
      for (const Value* output : node->outputs()) {
        step.results.push_back(live.erase(output) ? number(output) : -1);
      }
      if (!(node->kind() == c10::prim::If ? build_choice(*node, step, live)
                                          : build_step(*node, step, live))) {
        return false;
      }
      branch.steps.push_back(std::move(step));
    }
    std::reverse(branch.steps.begin(), branch.steps.end());
    return true;
  }

  bool build_choice(const Node& node, Step& step, Values& live) {
    step.kind = Kind::If;
    step.branches.resize(2);
    Values before[2] = {live, live};
    for (size_t k = 0; k < 2; ++k) {
      if (!build(*node.blocks()[k], step.branches[k], before[k])) {
        return false;
      }
    }
    for (size_t k = 0; k < 2; ++k) {
      for (const Value* value : before[1 - k]) {
        if (before[k].count(value) == 0) {
          step.branches[k].dropped.push_back(number(value));
        }
      }
    }
    live.insert(before[0].begin(), before[0].end());
    live.insert(before[1].begin(), before[1].end());
    step.operands = {operand(node.input(0), live)};
    return true;
  }

  bool build_step(const Node& node, Step& step, Values& live) {
    at::ArrayRef<const Value*> inputs(const_cast<const Value* const*>(node.inputs().data()),
                                      node.inputs().size());
    if (is_all_of_list(node)) {
      const Node* list = node.input(0)->node();
      lists_.insert(list);
      step.kind = Kind::AllOf;
      step.operands = operands(list->inputs(), live);
      return true;
    }
    if (node.kind() == all_defined() || node.kind() == none_defined()) {
      step.kind = node.kind() == all_defined() ? Kind::AllDefined : Kind::NoneDefined;
      step.operands = operands(inputs, live);
      return true;
    }
    if (node.kind() == c10::prim::CallFunction) {
      const auto type = node.input(0)->type()->cast<c10::FunctionType>();
      step.kind = Kind::Call;
      step.function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr;
      step.operands = operands(inputs.slice(1), live);
      return step.function != nullptr;
    }
    step.operands = operands(inputs, live);
    if (node.kind() == c10::prim::TupleConstruct || node.kind() == c10::prim::TupleUnpack) {
      const bool made = node.kind() == c10::prim::TupleConstruct;
      step.kind = made ? Kind::TupleConstruct : Kind::TupleUnpack;
      return !made || !node.output()->type()->expectRef<c10::TupleType>().name();
    }
    if (node.kind() == c10::prim::ListConstruct && is_list_of_numbers(node.output())) {
      step.kind = Kind::ListConstruct;
      step.items = node.output()->type()->expectRef<c10::ListType>().getElementType();
      return true;
    }
    if (!is_operator(node)) {
      return false;
    }
    const auto& op = node.getOperator();
    step.counted = op.hasOperation() && op.schema().is_vararg();
    step.op = node.getOperation();
    line_.has_tensor_ops_ |= node.kind() != c10::prim::CudaFusionGroup && gives_tensors(node);
    return true;
  }

  StraightLine& line_;
  std::unordered_map<const Value*, int32_t> numbers_, constants_;
  std::unordered_set<const Node*> lists_;  // that are part of a step behind them
};

struct StraightLine::Frame {
  Stack& stack;
  c10::SmallVector<c10::IValue, 40> registers;

  c10::IValue take(const Operand& operand, const std::vector<c10::IValue>& constants) {
    if (operand.constant) {
      return constants[operand.index];
    }
    c10::IValue& value = registers[operand.index];
    return operand.last ? std::move(value) : value;
  }
};

std::unique_ptr<const StraightLine> StraightLine::of(Graph& graph, const std::vector<size_t>& left_out) {
  std::unique_ptr<StraightLine> line(new StraightLine);
  line->graph_ = graph.copy();
  for (auto number = left_out.rbegin(); number != left_out.rend(); ++number) {
    line->graph_->eraseOutput(*number);
  }
  if (!StraightLineBuilder(*line).build(*line->graph_)) {
    return nullptr;
  }
  return line;
}

void StraightLine::run(Stack& stack) const {
  Frame frame{stack, {}};
  frame.registers.resize(registers_);
  const auto inputs = torch::jit::last(stack, inputs_);
  for (size_t i = 0; i < inputs_; ++i) {
    frame.registers[i] = std::move(const_cast<c10::IValue&>(inputs[i]));
  }
  torch::jit::drop(stack, inputs_);
  run_steps(body_.steps, frame);
  for (const Operand& result : body_.results) {
    stack.push_back(frame.take(result, constants_));
  }
}

void StraightLine::run_steps(const Steps& steps, Frame& frame) const {
  for (const Step& step : steps) {
    run_step(step, frame);
  }
}

void StraightLine::choose(const Step& step, Frame& frame) const {
  const Branch& branch = step.branches[frame.take(step.operands[0], constants_).toBool() ? 0 : 1];
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

bool StraightLine::holds(const Step& step, Frame& frame) const {
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

void StraightLine::run_step(const Step& step, Frame& frame) const {
  Stack& stack = frame.stack;
  if (step.kind == Kind::If) {
    return choose(step, frame);
  }
  if (step.kind >= Kind::AllOf) {
    const bool all = holds(step, frame);
    if (step.results[0] >= 0) {
      frame.registers[step.results[0]] = all;
    }
    return;
  }
  for (const Operand& operand : step.operands) {
    stack.push_back(frame.take(operand, constants_));
  }
  switch (step.kind) {
    case Kind::Op:
      if (step.counted) {
        stack.emplace_back(static_cast<int64_t>(step.operands.size()));
      }
      const_cast<torch::jit::Operation&>(step.op)(stack);
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
  for (size_t i = step.results.size(); i-- > 0;) {
    if (step.results[i] >= 0) {
      frame.registers[step.results[i]] = std::move(stack.back());
    }
    stack.pop_back();
  }
}

}  // namespace tsfuser
