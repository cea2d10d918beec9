// What convolutions alone read of a row-major copy is copied as they read it. Before, a shuffle of channels:
//
//     %c = aten::contiguous(%x, 0);  %v = aten::view(%c, ...)
//     %p, %q = prim::ConstantChunk[chunks=2, dim=1](%v);  %y = aten::conv2d(%q, %w, ...)
//
// The convolution copies %q into the memory format of its weight, and its derivative does so once more.
// After:
//
//     %p, %r = prim::ConstantChunk[chunks=2, dim=1](%v)
//     %f = tsfuser::memory_format(tsfuser::is_channels_last(%w, aten::dim(%r)))
//     %q = aten::clone(%r, %f);  %y = aten::conv2d(%q, %w, ...)
//
// A group makes the copy, and the derivative reads it. Only where nothing can tell: nothing writes to what
// is copied or to %x, which an op of the program has made, and the graph does not return them. The result of
// a convolution has the format of its weight where the operand is row-major; so all that read the copy have
// to agree. A step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Use;
using torch::jit::Value;

// Whether a convolution by the weight reads a row-major operand of so many dims in this format
// (ATen/native/ConvUtils.h).
void is_channels_last(Stack& stack) {
  const int64_t dim = torch::jit::pop(stack).toInt();
  const at::Tensor weight = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, dim == 4 && weight.dim() == 4 && weight.layout() == at::kStrided &&
                              weight.scalar_type() != at::kDouble &&
                              weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast);
}

void memory_format(Stack& stack) {
  const bool channels_last = torch::jit::pop(stack).toBool();
  const auto format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  torch::jit::push(stack, static_cast<int64_t>(format));
}

// Whether the node hands its operand on, cast by autocast perhaps.
bool may_cast(const Node* node) {
  return is_profile(node) || node->kind() == c10::aten::_autocast_to_reduced_precision ||
         node->kind() == c10::aten::_autocast_to_full_precision;
}

Value* before_autocast(Value* value) {
  while (may_cast(value->node())) {
    value = value->node()->input(0);
  }
  return value;
}

// Whether the value is a view of a row-major copy that the graph makes, or, if `itself`, that copy. A copy
// of one channel may be channels last, too, and what is cut from it then is; a view of it has strides that
// are row-major only.
bool is_row_major_copy(const Value* value, bool itself) {
  const Node* maker = behind_profile(value)->node();
  if (maker->kind() == c10::aten::view) {
    return is_row_major_copy(maker->input(0), true);
  }
  if (!itself) {
    return false;
  }
  return maker->kind() == c10::aten::contiguous &&
         known_int(maker->input(1)) == static_cast<int64_t>(at::MemoryFormat::Contiguous);
}

bool is_2d_convolution(const Node* node) {
  if (node->kind() == c10::aten::conv2d) {
    return true;
  }
  if (node->kind() != c10::aten::_convolution) {
    return false;
  }
  const auto strides = known_ints(node->input(3));
  return strides && strides->size() == 2 && known_bool(node->input(6)) == false;
}

bool reads_sizes_only(const Node* node) {
  return node->kind() == c10::aten::size || node->kind() == c10::aten::dim;
}

// The 2d convolutions, of that block and behind `first`, that read the value, perhaps its cast; none where
// something else reads more than its sizes.
std::vector<Node*> convolutions_of(const Value* value, const Node* first) {
  std::vector<Node*> found;
  for (const Use& use : value->uses()) {
    Node* reader = use.user;
    if (reads_sizes_only(reader)) {
      continue;
    }
    if (reader->owningBlock() != value->node()->owningBlock() || !reader->isAfter(first) ||
        use.offset != 0) {
      return {};
    }
    if (is_2d_convolution(reader)) {
      found.push_back(reader);
      continue;
    }
    const auto behind = may_cast(reader) ? convolutions_of(reader->output(), first) : std::vector<Node*>();
    if (behind.empty()) {
      return {};
    }
    found.insert(found.end(), behind.begin(), behind.end());
  }
  return found;
}

// Gives the readers of the value a copy of it.
void copy_for_readers(Value* value, Value* format, Node* before) {
  Graph& graph = *value->owningGraph();
  Node* copy = graph.create(c10::aten::clone, {value, format}, 1)->insertBefore(before);
  copy->copyMetadata(value->node());
  const std::vector<Use> uses = value->uses();
  for (const Use& use : uses) {
    if (use.user != copy && use.user->isAfter(copy)) {
      use.user->replaceInput(use.offset, copy->output());
    }
  }
}

// The first node that reads more of the value than its sizes.
Node* first_reader(const Value* value) {
  Node* found = nullptr;
  for (const Use& use : value->uses()) {
    found = !reads_sizes_only(use.user) && (!found || use.user->isBefore(found)) ? use.user : found;
  }
  return found;
}

// The weights of the convolutions, each once, as the program has them; none where one is made too late to be
// asked about before `reader`.
std::vector<Value*> weights_before(const std::vector<Node*>& convolutions, const Node* reader) {
  std::vector<Value*> weights;
  for (const Node* convolution : convolutions) {
    Value* weight = before_autocast(convolution->input(1));
    if (weight->node()->kind() != c10::prim::Param && !weight->node()->isBefore(reader)) {
      return {};
    }
    if (std::find(weights.begin(), weights.end(), weight) == weights.end()) {
      weights.push_back(weight);
    }
  }
  return weights;
}

// Copies the value as the convolutions, which are all that read it, do. Where these differ, it stays
// row-major: the result of a convolution would get another format from a copy that is channels last.
void copy_as_read(Value* value, const std::vector<Node*>& convolutions) {
  static const auto asked = c10::Symbol::fromQualString("tsfuser::is_channels_last");
  static const auto format = c10::Symbol::fromQualString("tsfuser::memory_format");
  Graph& graph = *value->owningGraph();
  Node* reader = first_reader(value);
  const torch::jit::WithInsertPoint before(reader);
  Value* channels_last = nullptr;
  for (Value* weight : weights_before(convolutions, reader)) {
    Value* one = graph.insert(asked, {weight, graph.insert(c10::aten::dim, {value})});
    channels_last = channels_last ? graph.insert(c10::aten::__and__, {channels_last, one}) : one;
  }
  if (channels_last) {
    copy_for_readers(value, graph.insert(format, {channels_last}), reader);
  }
}

}  // namespace

void copy_as_convolutions_read(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    const bool chunks = node->kind() == c10::prim::ConstantChunk;
    if ((!chunks && node->kind() != c10::aten::view) || !node->isAfter(first) ||
        !is_row_major_copy(node->input(0), !chunks) || !is_own_and_stays(node->input(0))) {
      continue;
    }
    for (Value* part : node->outputs()) {
      const auto convolutions = is_never_written(part) ? convolutions_of(part, first) : std::vector<Node*>();
      if (!convolutions.empty()) {
        copy_as_read(part, convolutions);
      }
    }
  }
}

void register_convolution_operands() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::is_channels_last(Tensor weight, int dim) -> bool", is_channels_last,
                            kind),
       torch::jit::Operator("tsfuser::memory_format(bool channels_last) -> int", memory_format, kind)});
}

}  // namespace tsfuser
