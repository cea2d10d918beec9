// Parts of a row-major copy become copies of the parts. Before:
//
//     %c = aten::contiguous(%x, 0)
//     %q = aten::select(%c, 0, 0);  %k = aten::select(%c, 0, 1);  %v = aten::select(%c, 0, 2)
//
// as `nn.MultiheadAttention` takes its packed projection apart. Autodiff lets no differentiable graph return
// views that share memory. So the parts stay outside, and autograd fills, copies and adds a tensor of the
// size of %c for the gradient of each. After:
//
//     %p = aten::select(%x, 0, 0);  %q = aten::clone(%p, 0)   and so on
//
// Each part has its own memory, with the same strides, so a group writes them, and one group puts their
// gradients together. What asks for the last size of a product's operand behind the product, as unflatten
// does there, asks its weight: else the parts were in another graph than the operand. Only where nothing can
// tell: nothing writes to the parts or to %x, which an op of the program has made, the graph does not return
// them, and %x was transposed, so that `contiguous` copies, if not of single elements. A step of
// prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Use;
using torch::jit::Value;

// Whether the value is a view, with other sizes of 1 at most, of a tensor whose dims have changed places.
bool is_transposed(const Value* value) {
  static const Kinds moves = {c10::aten::transpose, c10::aten::permute, c10::aten::t,
                              c10::Symbol::fromQualString("aten::movedim")};
  const Node* maker = behind_profile(value)->node();
  if (maker->kind() == c10::aten::squeeze || maker->kind() == c10::aten::unsqueeze) {
    return is_transposed(maker->input(0));
  }
  return moves.count(maker->kind()) != 0;
}

// Whether all that reads the copy are parts along its first dim, which nothing writes to.
bool is_taken_apart(const Node* copy, const Node* first) {
  const auto& uses = copy->output()->uses();
  return uses.size() > 1 && std::all_of(uses.begin(), uses.end(), [&](const Use& use) {
           const Node* part = use.user;
           return part->kind() == c10::aten::select && use.offset == 0 && known_int(part->input(1)) == 0 &&
                  part->owningBlock() == copy->owningBlock() && part->isAfter(first) &&
                  is_never_written(part->output());
         });
}

void copy_parts(Node* copy) {
  Graph& graph = *copy->owningGraph();
  const std::vector<Use> uses = copy->output()->uses();
  for (const Use& use : uses) {
    Node* part = use.user;
    const torch::jit::WithInsertPoint behind(part->next());
    Node* own = graph.insertNode(graph.create(c10::aten::clone, {part->output(), copy->input(1)}, 1));
    own->copyMetadata(copy);
    part->output()->replaceAllUsesWith(own->output());
    own->replaceInput(0, part->output());
    part->replaceInput(0, copy->input(0));
  }
}

bool is_cast_of_first(const Node* node) {
  return node->kind() == c10::aten::to || node->kind() == c10::aten::_autocast_to_reduced_precision ||
         node->kind() == c10::aten::_autocast_to_full_precision || is_profile(node);
}

// What casts were made of.
Value* before_casts(Value* value) {
  while (is_cast_of_first(value->node())) {
    value = value->node()->input(0);
  }
  return value;
}

// The linear op that reads the value, perhaps its cast, in that block; else null.
Node* linear_of(const Value* value, const torch::jit::Block* block) {
  for (const Use& use : value->uses()) {
    Node* reader = use.user;
    if (reader->kind() == c10::aten::linear && use.offset == 0 && reader->owningBlock() == block) {
      return reader;
    }
    const bool cast = is_cast_of_first(reader) && use.offset == 0;
    if (Node* found = cast ? linear_of(reader->output(), block) : nullptr) {
      return found;
    }
  }
  return nullptr;
}

// aten::size(%x, -1)  ->  aten::size(%w, -1), where it is read behind aten::linear(%x, %w)
void ask_weight(Node* size, const Node* first) {
  Node* linear = linear_of(size->input(0), size->owningBlock());
  if (!linear || !linear->isAfter(first)) {
    return;
  }
  Graph& graph = *size->owningGraph();
  const torch::jit::WithInsertPoint behind(linear->next());
  Node* asked = graph.create(c10::aten::size, {before_casts(linear->input(1)), size->input(1)}, 1);
  asked->output()->setType(c10::IntType::get());
  graph.insertNode(asked);
  const std::vector<Use> uses = size->output()->uses();
  for (const Use& use : uses) {
    if (use.user->owningBlock() == linear->owningBlock() && use.user->isAfter(asked)) {
      use.user->replaceInput(use.offset, asked->output());
    }
  }
}

}  // namespace

void copy_parts_alone(Graph& graph, const Node* first) {
  constexpr auto row_major = static_cast<int64_t>(at::MemoryFormat::Contiguous);
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::aten::contiguous && node->isAfter(first) &&
        known_int(node->input(1)) == row_major && is_transposed(node->input(0)) &&
        is_own_and_stays(node->input(0)) && is_taken_apart(node, first)) {
      copy_parts(node);
    } else if (node->kind() == c10::aten::size && node->inputs().size() == 2 &&
               known_int(node->input(1)) == -1) {
      ask_weight(node, first);
    }
  }
}

}  // namespace tsfuser
