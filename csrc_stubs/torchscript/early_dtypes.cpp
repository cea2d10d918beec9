// What asks for the dtype or the device of a tensor asks what that follows from. Before:
//
//     %y = aten::mul(%scale, %x);  %p = aten::permute(%y, %dims)
//     %d : int = prim::dtype(%p);  %noise = aten::empty(%sizes, %d, ...);  ... aten::mul(%p, %noise)
//
// After:
//
//     %e : Tensor = tsfuser::promoted(%scale, %x);  %d : int = prim::dtype(%e)
//
// where %e is a tensor without elements. So what needs the answer, as the noise of a stochastic depth does,
// need not wait for the product, which is in one differentiable graph with what reads both. A tensor whose
// elements were only moved has the dtype and the device of the one that they come from, as has a join of
// parts of one tensor, and the result of an op that has those of its first operand, as a batch norm. A sum
// or a product has those that its operands promote to, of which autocast may have cast some. A step of
// prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

c10::Symbol promoted_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::promoted");
  return kind;
}

c10::Symbol widened_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::widened");
  return kind;
}

c10::Symbol narrowed_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::narrowed");
  return kind;
}

const Kinds& stand_ins() {
  static const Kinds kinds = {promoted_kind(), widened_kind(), narrowed_kind()};
  return kinds;
}

// A tensor without elements, of that dtype and device. Or one with one element and no dims, which promotes
// less.
at::Tensor stand_in(bool has_dims, at::ScalarType dtype, at::Device device) {
  static constexpr int64_t size = 0;
  return at::empty(at::IntArrayRef(&size, has_dims ? 1 : 0), at::TensorOptions(dtype).device(device));
}

// Whether the tensor stands for a number of the program, which promotes less.
bool is_wrapped(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

// Of the sum of both.
at::Tensor promoted(const at::Tensor& a, const at::Tensor& b) {
  const bool may_be_elsewhere = a.dim() == 0 && a.is_cpu();  // a number beside a tensor of a GPU
  const at::Device device = may_be_elsewhere ? b.device() : a.device();
  at::Tensor made = stand_in(a.dim() != 0 || b.dim() != 0, at::result_type(a, b), device);
  if (is_wrapped(a) && is_wrapped(b)) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

// Of what autocast makes of the tensor, where it casts `from` certain dtypes.
at::Tensor cast(const at::Tensor& a, bool cuda_enabled, bool cpu_enabled, bool from, at::ScalarType to) {
  const bool casts = from && ((a.is_cuda() && cuda_enabled) || (a.is_cpu() && cpu_enabled));
  return stand_in(a.dim() != 0, casts ? to : a.scalar_type(), a.device());
}

void widened(torch::jit::Stack& stack) {
  const bool cpu = torch::jit::pop(stack).toBool(), cuda = torch::jit::pop(stack).toBool();
  const at::Tensor a = torch::jit::pop(stack).toTensor();
  const bool is_narrow = a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  torch::jit::push(stack, cast(a, cuda, cpu, is_narrow, at::kFloat));
}

void narrowed(torch::jit::Stack& stack) {
  const auto of_cpu = torch::jit::pop(stack).toScalarType(), of_cuda = torch::jit::pop(stack).toScalarType();
  const bool cpu = torch::jit::pop(stack).toBool(), cuda = torch::jit::pop(stack).toBool();
  const at::Tensor a = torch::jit::pop(stack).toTensor();
  const bool is_wide = a.scalar_type() == at::kFloat;
  torch::jit::push(stack, cast(a, cuda, cpu, is_wide, a.is_cuda() ? of_cuda : of_cpu));
}

bool is_kind(const Kinds& kinds, const Node* node) { return kinds.count(node->kind()) != 0; }

bool asks_a_tensor(const Node* node) {
  return (node->kind() == c10::prim::dtype || node->kind() == c10::prim::device) &&
         is_tensor(node->input(0));
}

// Whether the maker of the value, which moves elements, gives dims where its operand has some, and none
// where that has none.
bool keeps_rank(const Node* maker) {
  static const Kinds kinds = {c10::Symbol::fromQualString("tsfuser::permuted_sizes"),
                              c10::Symbol::fromQualString("tsfuser::swapped_sizes"),
                              c10::Symbol::fromQualString("tsfuser::sliced_sizes")};
  const auto rule = op_facts().size_rules.find(maker->kind());
  return is_kind(op_facts().same_sizes, maker) ||
         (rule != op_facts().size_rules.end() && kinds.count(rule->second.kind) != 0);
}

bool promotes(const Node* maker) {
  return is_kind(op_facts().promoted, maker) && maker->inputs().size() > 1 && is_tensor(maker->input(0)) &&
         is_tensor(maker->input(1));
}

// The op that gives a stand-in for the result of the node; none where there is none.
std::optional<c10::Symbol> op_for(const Node* maker) {
  if (maker->kind() == c10::aten::_autocast_to_full_precision) {
    return widened_kind();
  }
  if (maker->kind() == c10::aten::_autocast_to_reduced_precision) {
    return narrowed_kind();
  }
  return promotes(maker) ? std::optional<c10::Symbol>(promoted_kind()) : std::nullopt;
}

// Whether the answer is only returned, as what autodiff keeps for a backward, perhaps in a tuple. Nothing
// waits for it then, and the group that computes the result says what dtype it has.
bool is_kept_only(const Node* question) {
  const auto& uses = question->output()->uses();
  return std::all_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
    return use.user->kind() == c10::prim::Return || use.user->kind() == c10::prim::TupleConstruct;
  });
}

// Answers questions; what stands for a value is computed once.
class EarlyDtypes {
 public:
  explicit EarlyDtypes(Graph& graph) : graph_(graph) {}

  void answer(Node* question) {
    Value* tensor = question->input(0);
    if (!is_read(behind_profile(tensor))) {
      return;
    }
    Value* origin = origin_of(tensor, /*same_rank=*/false);
    if (promotes(origin->node()) && !is_kept_only(question) && may_stand_for(origin)) {
      origin = stand_in_for(origin);
    }
    if (origin == behind_profile(tensor)) {
      return;
    }
    Node* maker = origin->node();
    // Right behind what makes the origin, which need not live until the answer is read.
    const torch::jit::WithInsertPoint behind(
        maker->kind() == c10::prim::Param ? *maker->owningBlock()->nodes().begin() : maker->next());
    question->output()->replaceAllUsesWith(graph_.insert(question->kind(), {origin}));
  }

 private:
  // The value whose dtype and device the value has, whatever they are. `same_rank`: and that has dims if the
  // value has some.
  Value* origin_of(Value* value, bool same_rank) {
    const auto found = origins_[same_rank].find(value);
    return found != origins_[same_rank].end() ? found->second
                                              : origins_[same_rank][value] = find_origin(value, same_rank);
  }

  Value* find_origin(Value* value, bool same_rank) {
    Node* maker = value->node();
    if (is_profile(maker)) {
      return origin_of(maker->input(), same_rank);
    }
    if (value->offset() != 0) {
      return value;
    }
    if (Value* shared = origin_of_join(maker, same_rank)) {
      return shared;
    }
    const bool moves = is_kind(op_facts().moved, maker) && (!same_rank || keeps_rank(maker));
    const bool has_type = moves || is_kind(op_facts().like_first, maker);
    return has_type ? origin_of(maker->inputs()[0], same_rank) : value;
  }

  // That of all tensors that the node joins, as of the halves of a rotary embedding; null if they have none
  // in common.
  Value* origin_of_join(Node* node, bool same_rank) {
    const bool joins = node->kind() == c10::aten::cat || (node->kind() == c10::aten::stack && !same_rank);
    if (!joins || node->input(0)->node()->kind() != c10::prim::ListConstruct ||
        !is_left_as_made(node->input(0))) {
      return nullptr;
    }
    Value* shared = nullptr;
    for (Value* joined : node->input(0)->node()->inputs()) {
      Value* origin = origin_of(joined, same_rank);
      if (shared && origin != shared) {
        return nullptr;
      }
      shared = origin;
    }
    return shared;
  }

  // The tensors that the result is promoted, or cast, of. A sum has a factor behind them.
  static at::ArrayRef<Value*> operands_of(Node* maker) {
    return promotes(maker) ? maker->inputs().slice(0, 2) : maker->inputs();
  }

  // Whether no operand gets dims, or loses all, before it is promoted: a stand-in is made as early as the
  // operand is.
  bool may_stand_for(Value* result) {
    const auto [place, is_new] = may_stand_for_.emplace(result, false);
    if (!is_new) {
      return place->second;
    }
    const auto operands = operands_of(result->node());
    return may_stand_for_[result] = std::all_of(operands.begin(), operands.end(), [this](Value* operand) {
             return !is_tensor(operand) || keeps_its_rank(operand);
           });
  }

  bool keeps_its_rank(Value* operand) {
    Value* origin = origin_of(operand, /*same_rank=*/true);
    for (const Value* v = operand; v != origin; v = v->node()->input(0)) {
      if (!keeps_its_sizes(v)) {
        return false;
      }
    }
    return keeps_its_sizes(origin) && (!op_for(origin->node()) || may_stand_for(origin));
  }

  Value* stand_in_for(Value* result) {
    Value*& found = stand_ins_[result];
    if (!found) {
      Node* maker = result->node();
      std::vector<torch::jit::NamedValue> operands;
      for (Value* operand : operands_of(maker)) {
        operands.emplace_back(is_tensor(operand) ? reduced(operand) : operand);
      }
      const torch::jit::WithInsertPoint before(maker);
      found = graph_.insert(*op_for(maker), operands);
    }
    return found;
  }

  Value* reduced(Value* operand) {
    Value* origin = origin_of(operand, /*same_rank=*/true);
    return op_for(origin->node()) ? stand_in_for(origin) : origin;
  }

  Graph& graph_;
  std::unordered_map<const Value*, Value*> origins_[2], stand_ins_;  // origins by `same_rank`
  std::unordered_map<const Value*, bool> may_stand_for_;
};

}  // namespace

bool asks_for_type(const Node* node) { return asks_a_tensor(node) || stand_ins().count(node->kind()) != 0; }

std::vector<const Value*> parts_of_type(const Value* tensor) {
  std::vector<const Value*> parts = {tensor};
  std::unordered_set<const Value*> seen(parts.begin(), parts.end());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!is_kind(stand_ins(), parts[i]->node())) {
      continue;
    }
    for (const Value* operand : parts[i]->node()->inputs()) {
      if (is_tensor(operand) && seen.insert(behind_profile(operand)).second) {
        parts.push_back(behind_profile(operand));
      }
    }
  }
  return parts;
}

void ask_dtypes_early(Graph& graph, const Node*) {
  EarlyDtypes dtypes(graph);
  for (Node* node : all_nodes(graph)) {
    if (asks_a_tensor(node)) {
      dtypes.answer(node);
    }
  }
}

void register_early_dtypes() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator(
           "tsfuser::promoted(Tensor a, Tensor b) -> Tensor",
           [](torch::jit::Stack& stack) {
             const at::Tensor b = torch::jit::pop(stack).toTensor();
             const at::Tensor a = torch::jit::pop(stack).toTensor();
             torch::jit::push(stack, promoted(a, b));
           },
           kind),
       torch::jit::Operator("tsfuser::widened(Tensor a, bool cuda_enabled, bool cpu_enabled) -> Tensor",
                            widened, kind),
       torch::jit::Operator("tsfuser::narrowed(Tensor a, bool cuda_enabled, bool cpu_enabled, "
                            "ScalarType cuda_dtype, ScalarType cpu_dtype) -> Tensor",
                            narrowed, kind)});
}

}  // namespace tsfuser
