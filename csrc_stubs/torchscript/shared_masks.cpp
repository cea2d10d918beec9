// Attentions that read one mask of bools read what is added to their scores instead, which is made once.
// Before:
//
//     %y1 : Tensor = aten::scaled_dot_product_attention(%q1, %k1, %v1, %mask, ...)
//     %y2 : Tensor = aten::scaled_dot_product_attention(%q2, %k2, %v2, %mask, ...)
//
// Each of them makes a tensor of zeros and minus infinities of the mask, by three kernels: one of the size
// of the mask and two that fill its numbers in. After:
//
//     %added : Tensor = tsfuser::additive_mask(%mask, %q1)
//     %m1 : Tensor = tsfuser::mask_of_attention(%q1, %k1, %v1, %mask, ..., %added)
//     %y1 : Tensor = aten::scaled_dot_product_attention(%q1, %k1, %v1, %m1, ...)
//     ...
//
// A group can take the first op, with what computes the mask. The second gives %mask where the attention
// would do something else with %added than with %mask: where it chooses another implementation, and where
// torch does not add minus infinity in this one (for cuDNN some versions add a large number, and a row of
// which nothing is left differs). The latter is found out once for each implementation: by an attention of
// a few numbers that is computed both ways.
//
// Only where nothing writes to the mask. It is a step of prepare.cpp.

#include "call/arguments.h"
#include "group/observe.h"
#include "torchscript/nodes.h"
#include "torchscript/prepare.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using at::Tensor;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

constexpr size_t kMask = 3;       // the operand of an attention
constexpr size_t kOperands = 8;   // of an attention, in each torch that we know
constexpr size_t kFewest = 2;     // readers of a mask
constexpr int64_t kTinyRows = 8;  // of the attention that is computed both ways

// ---- the operators

Tensor made_additive(const Tensor& mask, const Tensor& query) {
  const double fill = -std::numeric_limits<double>::infinity();
  const auto options = at::TensorOptions().dtype(query.scalar_type()).device(mask.device());
  return at::where(mask, 0.0, at::full({}, fill, options));
}

void additive_mask(Stack& stack) {
  const Tensor query = torch::jit::pop(stack).toTensor();
  Tensor mask = torch::jit::pop(stack).toTensor();
  const bool converts = mask.scalar_type() == at::kBool && !at::isIntegralType(query.scalar_type(), true);
  torch::jit::push(stack, converts ? made_additive(mask, query) : std::move(mask));
}

// What an attention is called with, but for its mask.
struct Attention {
  Tensor query, key, value;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool grouped;

  int64_t implementation(const Tensor& mask) const {
    return at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped);
  }

  Tensor run(const Tensor& mask) const {
    return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
  }
};

// A few rows of numbers between -1 and 1: random ones would change the state of a generator.
Tensor tiny(const Tensor& like, double first) {
  const int64_t width = like.size(-1);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(like.device());
  const Tensor places = at::arange(kTinyRows * width, options);
  return (places + first).sin().to(like.scalar_type()).view({1, 1, kTinyRows, width});
}

// Whether an attention of the same dtype and implementation adds minus infinity where its mask is false.
bool adds_infinity(const Attention& like, int64_t implementation) {
  const at::NoGradGuard no_gradients;
  const Attention attention{
      tiny(like.query, 1), tiny(like.key, 2), tiny(like.value, 3), 0, false, std::nullopt, false};
  Tensor mask = at::ones({1, 1, kTinyRows, kTinyRows}, like.query.options().dtype(at::kBool)).tril();
  mask.select(-2, 0).fill_(false);  // a row of which nothing is left
  const Tensor added = made_additive(mask, like.query);
  if (attention.implementation(mask) != implementation ||
      attention.implementation(added) != implementation) {
    return false;
  }
  const Tensor by_mask = attention.run(mask), by_added = attention.run(added);
  const Tensor equal = (by_mask == by_added) | ((by_mask != by_mask) & (by_added != by_added));
  return equal.all().item<bool>();
}

bool is_known_to_add_infinity(const Attention& like, int64_t implementation) {
  using Key = std::tuple<c10::Device, at::ScalarType, int64_t>;
  struct Order {
    bool operator()(const Key& a, const Key& b) const {
      const auto ordered = [](const Key& key) {
        const auto& [device, dtype, which] = key;
        return std::make_tuple(device.type(), device.index(), dtype, which);
      };
      return ordered(a) < ordered(b);
    }
  };
  static auto* known = new std::map<Key, bool, Order>;
  static auto* mutex = new std::mutex;
  const Key key{like.query.device(), like.query.scalar_type(), implementation};
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    if (const auto found = known->find(key); found != known->end()) {
      return found->second;
    }
  }
  if (being_captured({like.query})) {  // looking at a result would end the capture
    return false;
  }
  const bool found = adds_infinity(like, implementation);
  const std::lock_guard<std::mutex> lock(*mutex);
  known->emplace(key, found);
  return found;
}

bool may_read_added(const Attention& attention, const Tensor& mask, const Tensor& added) {
  const Tensor& query = attention.query;
  if (mask.scalar_type() != at::kBool || added.scalar_type() != query.scalar_type() ||
      !at::isFloatingType(query.scalar_type()) ||
      mask.device() != query.device() || query.dim() < 2 || attention.key.dim() < 2 ||
      attention.value.dim() < 2 || at::autocast::is_autocast_enabled(query.device().type()) ||
      refuse_mode() || refuse_tensor(query) || refuse_tensor(attention.key) ||
      refuse_tensor(attention.value) || refuse_tensor(mask)) {
    return false;
  }
  const int64_t implementation = attention.implementation(mask);
  return attention.implementation(added) == implementation &&
         is_known_to_add_infinity(attention, implementation);
}

void mask_of_attention(Stack& stack) {
  Tensor added = torch::jit::pop(stack).toTensor();
  Attention attention;
  attention.grouped = torch::jit::pop(stack).toBool();
  attention.scale = torch::jit::pop(stack).toOptional<double>();
  attention.causal = torch::jit::pop(stack).toBool();
  attention.dropout = torch::jit::pop(stack).toDouble();
  Tensor mask = torch::jit::pop(stack).toTensor();
  attention.value = torch::jit::pop(stack).toTensor();
  attention.key = torch::jit::pop(stack).toTensor();
  attention.query = torch::jit::pop(stack).toTensor();
  const bool reads_added = may_read_added(attention, mask, added);
  torch::jit::push(stack, std::move(reads_added ? added : mask));
}

// ---- the step

Value* mask_of(const Node* attention) { return const_cast<Value*>(behind_profile(attention->input(kMask))); }

// The attentions behind `first` that read a tensor as their mask, by mask and block, in order.
std::vector<std::vector<Node*>> sharing(Graph& graph, const Node* first) {
  std::vector<std::vector<Node*>> found;
  std::map<std::pair<const Value*, const torch::jit::Block*>, size_t> places;
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::aten::scaled_dot_product_attention && node->inputs().size() == kOperands &&
        is_tensor(node->input(kMask)) && (node == first || node->isAfter(first))) {
      const auto [place, is_new] =
          places.emplace(std::pair{mask_of(node), node->owningBlock()}, found.size());
      if (is_new) {
        found.emplace_back();
      }
      found[place->second].push_back(node);
    }
  }
  return found;
}

// Whether a node of the graph may change the mask: what Python has defined may do anything.
bool may_be_written(Value* mask, Graph& graph) {
  const torch::jit::AliasDb aliases(graph.shared_from_this());
  const auto nodes = all_nodes(graph);
  return std::any_of(nodes.begin(), nodes.end(), [&](Node* node) {
    return (node->kind() != c10::prim::GetAttr && !is_known(node)) ||
           (node->blocks().empty() && aliases.writesToAlias(node, {mask}));
  });
}

Value* insert(Node* before, const char* kind, at::ArrayRef<Value*> operands) {
  Graph& graph = *before->owningGraph();
  Node* made = graph.create(c10::Symbol::fromQualString(kind), operands, 1)->insertBefore(before);
  made->copyMetadata(before);
  return made->output();
}

}  // namespace

void share_masks(Graph& graph, const Node* first) {
  for (const std::vector<Node*>& attentions : sharing(graph, first)) {
    Value* mask = mask_of(attentions[0]);
    if (attentions.size() < kFewest || may_be_written(mask, graph)) {
      continue;
    }
    Value* added = insert(attentions[0], "tsfuser::additive_mask", {mask, attentions[0]->input(0)});
    for (Node* attention : attentions) {
      std::vector<Value*> operands(attention->inputs().begin(), attention->inputs().end());
      operands[kMask] = mask;
      operands.push_back(added);
      attention->replaceInput(kMask, insert(attention, "tsfuser::mask_of_attention", operands));
    }
  }
}

void register_shared_masks() {
  constexpr auto kFromSchema = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::additive_mask(Tensor(a) mask, Tensor query) -> Tensor(a)",
                            additive_mask, kFromSchema),
       torch::jit::Operator("tsfuser::mask_of_attention(Tensor query, Tensor key, Tensor value, "
                            "Tensor(a) attn_mask, float dropout_p, bool is_causal, float? scale, "
                            "bool enable_gqa, Tensor(a) added) -> Tensor(a)",
                            mask_of_attention, kFromSchema)});
}

}  // namespace tsfuser
