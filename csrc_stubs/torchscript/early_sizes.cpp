// Sizes of the results of ops that groups run are computed from the sizes of these ops' operands. Before:
//
//     %y = aten::layer_norm(%x, ...);  %p = aten::pad(%y, [0, %n]);  %s = aten::size(%p)
//
// After: %s = tsfuser::padded_sizes(aten::size(%x), [0, %n])
//
// What asks for the rank, as each norm does, is answered from the ranks, or from the sizes.
//
// So what needs the sizes, as a view by them, is in one differentiable graph with what computes the tensor:
// the sizes are known before it. Examples are the shuffle of channels that were joined, windows of an image
// that was normalised and padded, the noise of a stochastic depth behind a norm or behind windows. The rules
// are those of the op table (tsfuser/grouping/size_rules.py). A step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <ATen/core/stack.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;
using Sizes = std::vector<int64_t>;

// Dims out of range, and sizes that do not fit, are ignored: the op itself raises the error.
void joined_sizes(Stack& stack) {
  int64_t dim = torch::jit::pop(stack).toInt();
  const Sizes other = torch::jit::pop(stack).toIntVector();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto is_nothing = [](const Sizes& of) { return of.size() == 1 && of[0] == 0; };
  if (is_nothing(sizes) || is_nothing(other)) {  // may stand beside tensors of any rank
    torch::jit::push(stack, is_nothing(sizes) ? other : sizes);
    return;
  }
  const auto rank = static_cast<int64_t>(sizes.size());
  dim += dim < 0 ? rank : 0;
  if (0 <= dim && dim < rank && sizes.size() == other.size()) {
    sizes[dim] += other[dim];
  }
  torch::jit::push(stack, std::move(sizes));
}

// Of one of so many chunks along `dim`.
void chunk_sizes(Stack& stack) {
  const int64_t index = torch::jit::pop(stack).toInt();
  int64_t dim = torch::jit::pop(stack).toInt();
  const int64_t chunks = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  dim += dim < 0 ? rank : 0;
  if (0 <= dim && dim < rank && chunks > 0) {
    const int64_t each = (sizes[dim] + chunks - 1) / chunks;
    sizes[dim] = std::max<int64_t>(0, std::min(each, sizes[dim] - index * each));
  }
  torch::jit::push(stack, std::move(sizes));
}

// Of tensors of these ranks: where they differ, it is that of those that are not nothing.
void joined_dim(Stack& stack) {
  const int64_t count = torch::jit::pop(stack).toInt();  // the interpreter says how many operands
  int64_t most = 0;
  for (const c10::IValue& dim : torch::jit::last(stack, count)) {
    most = std::max(most, dim.toInt());
  }
  torch::jit::drop(stack, count);
  torch::jit::push(stack, most);
}

// As aten::size of a tensor with these sizes, whose error it raises.
void size_at(Stack& stack) {
  const int64_t dim = torch::jit::pop(stack).toInt();
  const c10::List<int64_t> sizes = torch::jit::pop(stack).toIntList();
  const auto rank = static_cast<int64_t>(sizes.size());
  torch::jit::push(stack, sizes.get(c10::maybe_wrap_dim(dim, rank, /*wrap_scalar=*/false)));
}

bool asks_for_sizes(const Node* node) {
  return (node->kind() == c10::aten::size || node->kind() == c10::aten::dim) && is_tensor(node->input(0));
}

// Whether all that reads the list are ops that only read, and give no list.
bool is_list_only_read(const Value* list) {
  return std::all_of(list->uses().begin(), list->uses().end(), [](const torch::jit::Use& use) {
    const auto* schema = use.user->maybeSchema();
    if (use.user->kind() == c10::prim::ListUnpack || use.user->kind() == c10::aten::format) {
      return true;
    }
    if (!schema || schema->is_vararg() || use.offset >= schema->arguments().size()) {
      return false;
    }
    const auto* alias = schema->arguments()[use.offset].alias_info();
    const auto outputs = use.user->outputs();
    return !alias ||
           (!alias->isWrite() && std::all_of(outputs.begin(), outputs.end(), [](const Value* made) {
             return made->type()->kind() == c10::TypeKind::IntType;
           }));
  });
}

bool makes_list(const Node* maker) {
  return maker->kind() == c10::prim::ListConstruct || maker->kind() == c10::aten::size;
}

// Whether the node may write to a list that the graph has not made, as to an attribute of a module.
bool may_write_to_given_list(Node* node) {
  const auto* schema = node->maybeSchema();
  if (!schema) {
    return !node->kind().is_prim() || node->kind() == c10::prim::CallFunction ||
           node->kind() == c10::prim::CallMethod || node->kind() == c10::prim::PythonOp ||
           node->kind() == c10::prim::fork;
  }
  for (size_t k = 0; k < node->inputs().size() && k < schema->arguments().size(); ++k) {
    const auto* alias = schema->arguments()[k].alias_info();
    const bool is_list = node->input(k)->type()->kind() == c10::TypeKind::ListType;
    if (is_list && alias && alias->isWrite() && !makes_list(node->input(k)->node()) &&
        node->input(k)->node()->kind() != c10::aten::copy) {
      return true;
    }
  }
  return false;
}

// The tensors that the node joins; none where it does not.
std::vector<Value*> joined_by(Node* node) {
  if (node->kind() != c10::aten::cat) {
    return {};
  }
  Node* list = node->input(0)->node();
  const bool known = list->kind() == c10::prim::ListConstruct &&
                     list->inputs().size() <= op_facts().most_joined_in_memory &&
                     is_left_as_made(node->input(0));
  return known ? list->inputs().vec() : std::vector<Value*>();
}

// How the sizes of a value follow from those of others.
struct Origin {
  enum How { kUnknown, kBase, kSame, kBroadcast, kJoined, kChunk, kRule } how = kUnknown;
  std::vector<Value*> tensors;
};

bool is_of_groups(c10::Symbol kind) {
  return op_facts().computed.count(kind) != 0 || op_facts().handed_on.count(kind) != 0;
}

// The argument of that name; null where the overload has none.
Value* argument_of(Node& node, const std::string& name) {
  const auto place = node.schema().argumentIndexWithName(name);
  return place ? node.inputs()[*place] : nullptr;
}

Origin origin_of(Value* value) {
  static const auto checked = c10::Symbol::fromQualString("tsfuser::checked_batch");
  Node& maker = *value->node();
  const auto kind = maker.kind();
  if (is_profile(&maker) || kind == checked) {
    return {Origin::kSame, {maker.inputs()[0]}};
  }
  if (kind == c10::prim::ConstantChunk) {
    return {Origin::kChunk, {maker.inputs()[0]}};
  }
  if (!is_of_groups(kind)) {
    return {Origin::kBase, {}};
  }
  const auto inputs = maker.inputs();
  if (value->offset() != 0 || inputs.empty()) {
    return {};
  }
  if (const auto joined = joined_by(&maker); !joined.empty()) {
    return {Origin::kJoined, joined};
  }
  if (op_facts().broadcast.count(kind) != 0) {
    Origin origin{Origin::kBroadcast, {}};
    std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(origin.tensors), is_tensor);
    const bool known = std::none_of(inputs.begin(), inputs.end(), is_optional_tensor);
    return known && !origin.tensors.empty() ? origin : Origin();
  }
  if (!is_tensor(inputs[0])) {
    return {};
  }
  if (op_facts().same_sizes.count(kind) != 0) {
    return {Origin::kSame, {inputs[0]}};
  }
  return op_facts().size_rules.count(kind) != 0 ? Origin{Origin::kRule, {inputs[0]}} : Origin();
}

// Asks right behind what makes the value, which need not live until the answer is read.
Value* ask(Graph& graph, c10::Symbol question, Value* value) {
  Node* maker = value->node();
  const torch::jit::WithInsertPoint behind(
      maker->kind() == c10::prim::Param ? *maker->owningBlock()->nodes().begin() : maker->next());
  return graph.insert(question, {value});
}

// Answers questions about sizes; each answer is computed once in a block.
class EarlySizes {
 public:
  explicit EarlySizes(Graph& graph) : graph_(graph) {}

  void answer(Node* question) {
    Value* tensor = question->input(0);
    // A list that is written to, or returned, is no other question's.
    const bool is_own = question->inputs().size() == 1 && question->kind() == c10::aten::size &&
                        !is_list_only_read(question->output());
    if (is_own || origin_of(tensor).how == Origin::kBase || !is_read(behind_profile(tensor)) ||
        !follow(tensor)) {
      return;
    }
    const torch::jit::WithInsertPoint behind(question->next());
    if (question->owningBlock() != block_) {
      block_ = question->owningBlock();
      sizes_.clear();
      ranks_.clear();
    }
    question->output()->replaceAllUsesWith(answer_to(*question));
  }

 private:
  Value* answer_to(Node& question) {
    static const auto kind = c10::Symbol::fromQualString("tsfuser::size_at");
    if (question.kind() == c10::aten::dim) {
      return rank_of(question.inputs()[0]);
    }
    Value* sizes = sizes_of(question.inputs()[0]);
    return question.inputs().size() == 1 ? sizes : graph_.insert(kind, {sizes, question.inputs()[1]});
  }

  // Whether the list has what was in it when the op read it wherever it is read.
  bool stays(const Value* list) {
    const Node* maker = list->node();
    if (maker->kind() == c10::prim::GetAttr || maker == graph_.param_node()) {
      if (!given_lists_stay_) {
        const auto nodes = all_nodes(graph_);
        given_lists_stay_ = std::none_of(nodes.begin(), nodes.end(), may_write_to_given_list);
      }
      return *given_lists_stay_;
    }
    return maker->kind() == c10::prim::Constant || (makes_list(maker) && is_list_only_read(list));
  }

  // Whether the arguments that the rule of the op takes are numbers, with the same values wherever they are
  // read. An overload may lack them where they have a default, or there are no others.
  bool has_fixed_arguments(Node& node) {
    static const auto numbers = c10::OptionalType::create(c10::ListType::ofInts());
    static const auto number = c10::OptionalType::create(c10::IntType::get());
    const SizeRule& rule = op_facts().size_rules.at(node.kind());
    bool any = rule.takes_lists || node.inputs().size() == 1;
    for (const std::string& name : rule.arguments) {
      const Value* argument = argument_of(node, name);
      if (!argument) {
        continue;
      }
      any = true;
      const auto& type = argument->type();
      const bool is_plain =
          type->kind() == c10::TypeKind::BoolType || type->kind() == c10::TypeKind::IntType;
      if (!is_plain && ((!type->isSubtypeOf(*numbers) && !type->isSubtypeOf(*number)) || !stays(argument))) {
        return false;
      }
    }
    return any;
  }

  // Whether the sizes of the value follow from those of bases, and nothing changes any of them.
  bool follow(Value* value) {
    const auto [place, is_new] = following_.emplace(value, false);
    if (!is_new) {
      return place->second;
    }
    const Origin origin = origin_of(value);
    const bool known =
        origin.how != Origin::kUnknown && keeps_its_sizes(value) &&
        (origin.how != Origin::kRule || has_fixed_arguments(*value->node())) &&
        std::all_of(origin.tensors.begin(), origin.tensors.end(), [this](Value* v) { return follow(v); });
    return following_[value] = known;
  }

  Value* sizes_of(Value* value) {
    Value*& found = sizes_[value];
    return found ? found : found = computed_sizes(value);
  }

  Value* computed_sizes(Value* value) {
    const Origin origin = origin_of(value);
    std::vector<Value*> sizes;
    sizes.reserve(origin.tensors.size());
    for (Value* tensor : origin.tensors) {
      sizes.push_back(sizes_of(tensor));
    }
    switch (origin.how) {
      case Origin::kBase: return asked(c10::aten::size, value);
      case Origin::kBroadcast: return broadcast(sizes);
      case Origin::kJoined: return joined(sizes, value->node()->input(1));
      case Origin::kChunk: return chunk(*value, sizes[0]);
      case Origin::kRule: return by_rule(*value->node(), sizes[0]);
      default: return sizes[0];
    }
  }

  Value* broadcast(const std::vector<Value*>& sizes) {
    std::vector<Value*> distinct;
    for (Value* each : sizes) {
      if (std::find(distinct.begin(), distinct.end(), each) == distinct.end()) {
        distinct.push_back(each);
      }
    }
    return distinct.size() == 1 ? distinct[0]
                                : inserted(c10::prim::BroadcastSizes, distinct, c10::ListType::ofInts());
  }

  Value* joined(const std::vector<Value*>& sizes, Value* dim) {
    static const auto kind = c10::Symbol::fromQualString("tsfuser::joined_sizes");
    Value* all = sizes[0];
    for (size_t k = 1; k < sizes.size(); ++k) {
      all = graph_.insert(kind, {all, sizes[k], dim});
    }
    return all;
  }

  Value* chunk(const Value& value, Value* sizes) {
    static const auto kind = c10::Symbol::fromQualString("tsfuser::chunk_sizes");
    const Node& maker = *value.node();
    return graph_.insert(kind, {sizes, maker.i(c10::attr::chunks), maker.i(c10::attr::dim),
                                static_cast<int64_t>(value.offset())});
  }

  Value* by_rule(Node& maker, Value* sizes) {
    const SizeRule& rule = op_facts().size_rules.at(maker.kind());
    std::vector<torch::jit::NamedValue> operands = {sizes};
    for (const std::string& name : rule.arguments) {
      Value* argument = argument_of(maker, name);
      const bool single = rule.takes_lists && argument && argument->type()->kind() == c10::TypeKind::IntType;
      if (!argument) {
        argument = graph_.insertConstant(name == "keepdim" ? c10::IValue(false) : c10::IValue());
      }
      operands.emplace_back(single ? inserted(c10::prim::ListConstruct, {argument}, c10::ListType::ofInts())
                                   : argument);
    }
    return graph_.insert(rule.kind, operands);
  }

  Value* rank_of(Value* value) {
    Value*& found = ranks_[value];
    return found ? found : found = computed_rank(value);
  }

  Value* computed_rank(Value* value) {
    static const auto kind = c10::Symbol::fromQualString("tsfuser::joined_dim");
    const Origin origin = origin_of(value);
    if (origin.how == Origin::kBase) {
      return asked(c10::aten::dim, value);
    }
    if (origin.how == Origin::kRule) {
      return graph_.insert(c10::aten::len, {sizes_of(value)});
    }
    std::vector<Value*> ranks;
    for (Value* tensor : origin.tensors) {
      Value* rank = rank_of(tensor);
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
        ranks.push_back(rank);
      }
    }
    return ranks.size() == 1 ? ranks[0] : inserted(kind, ranks, c10::IntType::get());
  }

  Value* asked(c10::Symbol question, Value* value) { return ask(graph_, question, value); }

  Value* inserted(c10::Symbol kind, at::ArrayRef<Value*> operands, c10::TypePtr type) {
    return graph_.insertNode(graph_.create(kind, operands, 1))->output()->setType(std::move(type));
  }

  Graph& graph_;
  const torch::jit::Block* block_ = nullptr;
  std::optional<bool> given_lists_stay_;
  std::unordered_map<const Value*, bool> following_;
  std::unordered_map<const Value*, Value*> sizes_, ranks_;
};

}  // namespace

bool is_read(const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    return is_profile(use.user) ? is_read(use.user->output())
                                : !asks_for_sizes(use.user) && !asks_for_type(use.user);
  });
}

void ask_sizes_early(Graph& graph, const Node*) {
  EarlySizes sizes(graph);
  for (Node* node : all_nodes(graph)) {
    if (asks_for_sizes(node)) {
      sizes.answer(node);
    }
  }
}

void register_early_sizes() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::joined_sizes(int[] sizes, int[] other, int dim) -> int[]",
                            joined_sizes, kind),
       torch::jit::Operator("tsfuser::size_at(int[] sizes, int dim) -> int", size_at, kind),
       torch::jit::Operator("tsfuser::chunk_sizes(int[] sizes, int chunks, int dim, int index) -> int[]",
                            chunk_sizes, kind),
       torch::jit::Operator("tsfuser::joined_dim(...) -> int", joined_dim,
                            c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace tsfuser
