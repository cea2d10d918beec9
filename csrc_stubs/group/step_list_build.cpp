// Makes the steps of a list from a graph.

#include "group/step_list.h"
#include "group/group.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// Whether the interpreter runs the node as an operator, without instructions of its own.
bool is_operator(const Node& node) {
  static const std::unordered_set<c10::Symbol> instructions = {
      c10::prim::GetAttr,        c10::prim::SetAttr,        c10::prim::Loop,
      c10::prim::CallMethod,     c10::prim::CallFunction,   c10::prim::PythonOp,
      c10::prim::DictConstruct,  c10::prim::ListUnpack,     c10::prim::ListConstruct,
      c10::prim::isinstance,     c10::prim::TupleSlice,     c10::prim::TupleIndex,
      c10::prim::TupleUnpack,    c10::prim::fork,           c10::prim::CreateObject,
      c10::prim::TupleConstruct, c10::prim::Enter,          c10::prim::Exit,
      c10::prim::Uninitialized,  c10::prim::TypeCheck,      c10::prim::BailOut,
      c10::prim::profile,        c10::prim::profile_ivalue, c10::prim::RaiseException,
      c10::prim::awaitable,      c10::aten::warn,           c10::aten::wait};
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

c10::Symbol loop_end() {  // which does nothing
  static const auto kind = c10::Symbol::fromQualString("tsfuser::loop_end");
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
class StepListBuilder {
 public:
  explicit StepListBuilder(StepList& list) : list_(list) {}

  bool build(Graph& graph) {
    for (const Value* input : graph.inputs()) {
      number(input);
    }
    list_.inputs_ = graph.inputs().size();
    Values live;
    const bool done = build(*graph.block(), list_.body_, live);
    list_.registers_ = numbers_.size();
    for (const Value* input : graph.inputs()) {
      if (live.count(input) == 0) {
        list_.unread_.push_back(number(input));
      }
    }
    return done;
  }

 private:
  using Step = StepList::Step;
  using Kind = StepList::Kind;
  using Operand = StepList::Operand;
  using Values = std::unordered_set<const Value*>;

  int32_t number(const Value* value) {
    return numbers_.emplace(value, static_cast<int32_t>(numbers_.size())).first->second;
  }

  Operand operand(const Value* value, Values& live) {
    if (value->node()->kind() == c10::prim::Constant) {
      const auto [found, added] = constants_.emplace(value, static_cast<int32_t>(list_.constants_.size()));
      if (added) {
        list_.constants_.push_back(*torch::jit::toIValue(value));
      }
      return {found->second, /*constant=*/true, /*last=*/false};
    }
    return {number(value), /*constant=*/false, live.insert(value).second};
  }

  template <class List>
  StepList::Operands operands(const List& values, Values& live) {
    StepList::Operands found(values.size());
    for (size_t i = values.size(); i-- > 0;) {
      found[i] = operand(values[i], live);
    }
    return found;
  }

  // `live`: what is read behind the block; in the end, what is read from the block on.
  bool build(const Block& block, StepList::Branch& branch, Values& live) {
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
      if (lists_.count(node) != 0 || node->kind() == loop_end()) {
        continue;
      }
      Step step;
      step.node = node;
      for (const Value* output : node->outputs()) {
        step.results.push_back(live.erase(output) ? number(output) : -1);
      }
      if (!build_any(*node, step, live)) {
        return false;
      }
      branch.steps.push_back(std::move(step));
    }
    std::reverse(branch.steps.begin(), branch.steps.end());
    merge_guards(branch.steps);
    return true;
  }

  // Makes one step of a guard and the If behind it that runs a group, or something else.
  void merge_guards(StepList::Steps& steps) {
    for (size_t i = 0; i + 1 < steps.size(); ++i) {
      Step &guard = steps[i], &choice = steps[i + 1];
      if (guard.guard != 0 && choice.kind == Kind::If && choice.operands[0].last &&
          choice.operands[0].index == guard.results[0] && is_guarded(choice.branches[0], guard) &&
          gives_results(choice)) {
        guard.kind = Kind::Guarded;
        guard.results = std::move(choice.results);
        guard.branches = std::move(choice.branches);
        guard.group = guard.branches[0].steps[0].group;
        steps.erase(steps.begin() + static_cast<int64_t>(i) + 1);
      }
    }
  }

  // Whether the branch only runs a group, which takes all that the guard looks at.
  static bool is_guarded(const StepList::Branch& branch, const Step& guard) {
    return branch.steps.size() == 1 && branch.steps[0].group != nullptr &&
           std::all_of(guard.operands.begin(), guard.operands.end(), [&branch](const Operand& seen) {
             const auto& taken = branch.steps[0].operands;
             return !seen.constant && std::any_of(taken.begin(), taken.end(), [&seen](const Operand& one) {
               return !one.constant && one.index == seen.index;
             });
           });
  }

  // Whether the results of the If are the group's, as they are; the group then gives them.
  static bool gives_results(Step& choice) {
    StepList::Branch& branch = choice.branches[0];
    auto& given = branch.steps[0].results;
    c10::SmallVector<int32_t, 6> results(given.size(), -1);
    for (size_t i = 0; i < branch.results.size(); ++i) {
      const Operand& result = branch.results[i];
      const auto found = std::find(given.begin(), given.end(), result.index);
      if (result.constant || !result.last || found == given.end()) {
        return false;
      }
      results[found - given.begin()] = choice.results[i];
    }
    given = results;
    return true;
  }

  bool build_any(const Node& node, Step& step, Values& live) {
    if (node.kind() == c10::prim::If) {
      return build_choice(node, step, live);
    }
    return node.kind() == c10::prim::Loop ? build_loop(node, step, live) : build_step(node, step, live);
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

  bool build_loop(const Node& node, Step& step, Values& live) {
    const Block& body = *node.blocks()[0];
    Values made, read;
    note_values(body, made, read);
    Values inside = live;  // what comes from outside is read again in the next turn
    for (const Value* value : read) {
      if (made.count(value) == 0) {
        inside.insert(value);
      }
    }
    const Values behind = std::exchange(live, inside);
    step.kind = Kind::Loop;
    step.branches.resize(1);
    if (!build(body, step.branches[0], inside)) {
      return false;
    }
    for (const Value* parameter : body.inputs()) {
      step.branches[0].parameters.push_back(inside.count(parameter) != 0 ? number(parameter) : -1);
    }
    for (const Value* value : live) {
      if (behind.count(value) == 0) {
        step.branches[0].dropped.push_back(number(value));
      }
    }
    step.operands = operands(node.inputs(), live);
    return true;
  }

  // What the block and those inside it make, and the values without constants that they read.
  static void note_values(const Block& block, Values& made, Values& read) {
    const auto note = [&read](at::ArrayRef<const Value*> values) {
      std::copy_if(values.begin(), values.end(), std::inserter(read, read.end()),
                   [](const Value* value) { return value->node()->kind() != c10::prim::Constant; });
    };
    made.insert(block.inputs().begin(), block.inputs().end());
    note(block.outputs());
    for (const Node* node : block.nodes()) {
      note(node->inputs());
      made.insert(node->outputs().begin(), node->outputs().end());
      for (const Block* inner : node->blocks()) {
        note_values(*inner, made, read);
      }
    }
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
    if (node.kind() == c10::prim::ListUnpack) {
      step.kind = Kind::ListUnpack;
      list_.has_tensor_ops_ |= gives_tensors(node);
      return true;
    }
    if (node.kind() == c10::prim::ListConstruct) {
      step.kind = Kind::ListConstruct;
      step.items = node.output()->type()->expectRef<c10::ListType>().getElementType();
      list_.has_tensor_ops_ |= gives_tensors(node);
      return true;
    }
    if (!is_operator(node)) {
      return false;
    }
    const auto& op = node.getOperator();
    step.counted = op.hasOperation() && op.schema().is_vararg();
    step.op = node.getOperation();
    static const auto batch = c10::Symbol::attr("batch");
    const bool alone = node.kind() == c10::prim::CudaFusionGroup && !node.hasAttribute(batch);
    step.is_group = node.kind() == c10::prim::CudaFusionGroup;
    step.group = alone ? group_of(&node) : nullptr;
    step.guard = node.kind() == c10::prim::CudaFusionGuard ? new_call_key() : 0;
    list_.has_tensor_ops_ |= node.kind() != c10::prim::CudaFusionGroup && gives_tensors(node);
    return true;
  }

  StepList& list_;
  std::unordered_map<const Value*, int32_t> numbers_, constants_;
  std::unordered_set<const Node*> lists_;  // that are part of a step behind them
};

std::unique_ptr<StepList> StepList::of(Graph& graph, const std::vector<size_t>& left_out) {
  std::unique_ptr<StepList> list(new StepList);
  list->graph_ = graph.copy();
  for (auto number = left_out.rbegin(); number != left_out.rend(); ++number) {
    list->graph_->eraseOutput(*number);
  }
  if (!StepListBuilder(*list).build(*list->graph_)) {
    return nullptr;
  }
  return list;
}

}  // namespace tsfuser
