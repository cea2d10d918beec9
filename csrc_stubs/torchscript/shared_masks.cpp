// Attentions that read one mask of bools read what is added to their scores instead, which is made once.
// Before:
//
//     %y1 : Tensor = aten::scaled_dot_product_attention(%q1, %k1, %v1, %mask, ...)
//     %y2 : Tensor = aten::scaled_dot_product_attention(%q2, %k2, %v2, %mask, ...)
//
// Each of them makes a tensor of zeros and of large negative numbers of the mask, by three kernels: one of
// the size of the mask and two that fill its numbers in. After:
//
//     %fill : float = tsfuser::fill_of_attention(%q1, %k1, %v1, ...)
//     %added : Tensor = tsfuser::additive_mask(%mask, %q1, %fill)
//     %m1 : Tensor = tsfuser::mask_of_attention(%q1, %k1, %v1, %mask, ..., %added, %fill)
//     %y1 : Tensor = aten::scaled_dot_product_attention(%q1, %k1, %v1, %m1, ...)
//     ...
//
// A group can take `additive_mask`, with what computes the mask: so what is filled in is asked before there
// is a mask, of an attention with another one. `mask_of_attention` gives %mask where the attention would do
// something else with %added than with %mask: where it chooses another implementation, and where that adds
// another number than %fill.
//
// The number is minus infinity, but for cuDNN torch 2.11 adds -65504: they differ in a row of which nothing
// is left. Each thread finds the number out once for each implementation: it computes an attention of a few
// numbers with a mask, and with each of the two. If it is none of them, each attention reads %mask.
//
// Only where nothing writes to the mask. It is a step of prepare.cpp.

#include "call/arguments.h"
#include "graph/memory.h"
#include "group/observe.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
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

constexpr std::array<double, 2> kFills = {-std::numeric_limits<double>::infinity(), -65504.0};

Tensor made_additive(const Tensor& mask, const Tensor& query, double fill) {
  const auto options = at::TensorOptions().dtype(query.scalar_type()).device(mask.device());
  return at::where(mask, 0.0, at::full({}, fill, options));
}

void additive_mask(Stack& stack) {
  const double fill = torch::jit::pop(stack).toDouble();
  const Tensor query = torch::jit::pop(stack).toTensor();
  Tensor mask = torch::jit::pop(stack).toTensor();
  const bool converts = mask.scalar_type() == at::kBool && !at::isIntegralType(query.scalar_type(), true);
  torch::jit::push(stack, converts ? made_additive(mask, query, fill) : std::move(mask));
}

// What an attention is called with, but for its mask.
struct Attention {
  Tensor query, key, value;
  double dropout = 0;
  bool causal = false;
  std::optional<double> scale;
  bool grouped = false;

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

// What an attention of the same dtype and implementation adds where its mask is false; NaN if that is none
// of `kFills`.
double found_fill(const Attention& like, int64_t implementation) {
  const at::NoGradGuard no_gradients;
  const Attention attention{
      tiny(like.query, 1), tiny(like.key, 2), tiny(like.value, 3), 0, false, std::nullopt, false};
  Tensor mask = at::ones({1, 1, kTinyRows, kTinyRows}, like.query.options().dtype(at::kBool)).tril();
  mask.select(-2, 0).fill_(false);  // a row of which nothing is left
  if (attention.implementation(mask) == implementation) {
    const Tensor by_mask = attention.run(mask);
    for (const double fill : kFills) {
      const Tensor added = made_additive(mask, like.query, fill);
      if (attention.implementation(added) == implementation) {
        const Tensor found = attention.run(added);
        const Tensor equal = (by_mask == found) | (by_mask.isnan() & found.isnan());
        if (equal.all().item<bool>()) {
          return fill;
        }
      }
    }
  }
  return std::numeric_limits<double>::quiet_NaN();
}

double fill_of(const Attention& attention, int64_t implementation) {
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType, int64_t>;
  static thread_local std::map<Key, double> known;  // of each thread: no call waits for another
  const Tensor& query = attention.query;
  const Key key{query.device().type(), query.device().index(), query.scalar_type(), implementation};
  if (const auto found = known.find(key); found != known.end()) {
    return found->second;
  }
  if (being_captured({query})) {  // looking at a result would end the capture
    return std::numeric_limits<double>::quiet_NaN();
  }
  return known[key] = found_fill(attention, implementation);
}

// Whether the attention is one whose choice of an implementation we can ask for.
bool is_plain(const Attention& attention) {
  const Tensor& query = attention.query;
  const auto has_rows = [](const Tensor& tensor) { return !refuse_tensor(tensor) && tensor.dim() >= 2; };
  // First what keeps other devices than CPU and CUDA out: autocast raises for some.
  return !refuse_mode() && has_rows(query) && has_rows(attention.key) && has_rows(attention.value) &&
         at::isFloatingType(query.scalar_type()) &&
         !at::autocast::is_autocast_enabled(query.device().type());
}

bool may_read_added(const Attention& attention, const Tensor& mask, const Tensor& added, double fill) {
  const Tensor& query = attention.query;
  if (!is_plain(attention) || refuse_tensor(mask) || mask.scalar_type() != at::kBool ||
      mask.device() != query.device() || added.scalar_type() != query.scalar_type()) {
    return false;
  }
  const int64_t implementation = attention.implementation(mask);
  return attention.implementation(added) == implementation && fill_of(attention, implementation) == fill;
}

// `mask` becomes what an attention has behind its value; null: there is none.
Attention pop_attention(Stack& stack, Tensor* mask) {
  Attention attention;
  attention.grouped = torch::jit::pop(stack).toBool();
  attention.scale = torch::jit::pop(stack).toOptional<double>();
  attention.causal = torch::jit::pop(stack).toBool();
  attention.dropout = torch::jit::pop(stack).toDouble();
  if (mask) {
    *mask = torch::jit::pop(stack).toTensor();
  }
  attention.value = torch::jit::pop(stack).toTensor();
  attention.key = torch::jit::pop(stack).toTensor();
  attention.query = torch::jit::pop(stack).toTensor();
  return attention;
}

void fill_of_attention(Stack& stack) {
  const Attention attention = pop_attention(stack, nullptr);
  double fill = std::numeric_limits<double>::quiet_NaN();
  if (is_plain(attention)) {
    const auto options = attention.query.options().dtype(at::kBool).requires_grad(false);
    const Tensor mask = at::empty({attention.query.size(-2), attention.key.size(-2)}, options);
    fill = fill_of(attention, attention.implementation(mask));
  }
  torch::jit::push(stack, fill);
}

void mask_of_attention(Stack& stack) {
  const double fill = torch::jit::pop(stack).toDouble();
  Tensor added = torch::jit::pop(stack).toTensor(), mask;
  const Attention attention = pop_attention(stack, &mask);
  const bool reads_added = may_read_added(attention, mask, added, fill);
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
  const Memory memory(graph.shared_from_this(), op_facts().hidden_views);
  const auto nodes = all_nodes(graph);
  return std::any_of(nodes.begin(), nodes.end(), [&](Node* node) {
    return (node->kind() != c10::prim::GetAttr && !is_known(node)) ||
           (node->blocks().empty() && memory.writes_to(node, {mask}));
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
    const auto operands = [](Node* attention) {
      return std::vector<Value*>(attention->inputs().begin(), attention->inputs().end());
    };
    Node* begin = attentions[0];
    std::vector<Value*> others = operands(begin);
    others.erase(others.begin() + kMask);
    Value* fill = insert(begin, "tsfuser::fill_of_attention", others);
    fill->setType(c10::FloatType::get());
    Value* added = insert(begin, "tsfuser::additive_mask", {mask, begin->input(0), fill});
    for (Node* attention : attentions) {
      std::vector<Value*> given = operands(attention);
      given[kMask] = mask;
      given.insert(given.end(), {added, fill});
      attention->replaceInput(kMask, insert(attention, "tsfuser::mask_of_attention", given));
    }
  }
}

void register_shared_masks() {
  constexpr auto kFromSchema = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::fill_of_attention(Tensor query, Tensor key, Tensor value, "
                            "float dropout_p, bool is_causal, float? scale, bool enable_gqa) -> float",
                            fill_of_attention, kFromSchema),
       torch::jit::Operator("tsfuser::additive_mask(Tensor(a) mask, Tensor query, float fill) -> Tensor(a)",
                            additive_mask, kFromSchema),
       torch::jit::Operator("tsfuser::mask_of_attention(Tensor query, Tensor key, Tensor value, "
                            "Tensor(a) attn_mask, float dropout_p, bool is_causal, float? scale, "
                            "bool enable_gqa, Tensor(a) added, float fill) -> Tensor(a)",
                            mask_of_attention, kFromSchema)});
}

}  // namespace tsfuser
