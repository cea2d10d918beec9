// A number that is written to a part of a tensor is filled in. TorchScript makes of `mask[:2, 1:] = 3`
//
//     %part : Tensor = aten::slice(%mask, ...);  %d : int = prim::dtype(%part);  %e = prim::device(%part)
//     %number : Tensor = aten::tensor(3, %d, %e, False)
//     %w : Tensor = aten::copy_(%part, %number, False)
//
// which on a GPU copies the number from the host and launches a kernel. Eager Python fills, as this does:
//
//     %number : Tensor = aten::tensor(3, %d, "cpu", False)
//     %w : Tensor = aten::fill_(%part, %number)
//
// The number becomes one of the part's dtype as before: `fill_` with the number itself would raise for 300
// in a tensor of bytes. What is written to parts of new zeros, one after another, is not even filled in
// (filled_parts.cpp). It is a step of prepare.cpp.

#include "torchscript/number_writes.h"
#include "torchscript/nodes.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool asks(const Value* value, c10::Symbol what, const Value* of) {
  const Node* node = value->node();
  return node->kind() == what && behind_profile(node->input(0)) == of;
}

// Whether the value is a number, as a tensor of the dtype and on the device of `part`.
bool is_number_for(const Value* value, const Value* part) {
  const Node* node = value->node();
  if (node->kind() != c10::aten::tensor || node->inputs().size() != 4) {
    return false;
  }
  const auto kind = node->input(0)->type()->kind();
  return (kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType ||
          kind == c10::TypeKind::BoolType) &&
         asks(node->input(1), c10::prim::dtype, part) && asks(node->input(2), c10::prim::device, part) &&
         known_bool(node->input(3)) == false;
}

void fill(Node* write) {
  Graph& graph = *write->owningGraph();
  const torch::jit::WithInsertPoint here(write);
  const Node* number = behind_profile(write->input(1))->node();
  Value* host = graph.insertConstant(c10::Device(c10::kCPU));
  Node* made = graph.insertNode(
      graph.create(c10::aten::tensor, {number->input(0), number->input(1), host, number->input(3)}, 1));
  Node* filled = graph.insertNode(graph.create(c10::aten::fill_, {write->input(0), made->output()}, 1));
  filled->copyMetadata(write);
  write->output()->replaceAllUsesWith(filled->output());
  disarm(write);
}

}  // namespace

// Parts only: what is written as a whole may become functional, by other passes.
bool writes_number(const Node* node) {
  if (node->kind() != c10::aten::copy_ || node->inputs().size() != 3) {
    return false;
  }
  const Value* part = behind_profile(node->input(0));
  const auto maker = part->node()->kind();
  return (maker == c10::aten::slice || maker == c10::aten::select) &&
         is_number_for(behind_profile(node->input(1)), part);
}

const Value* number_written(const Node* write) { return behind_profile(write->input(1))->node()->input(0); }

void fill_numbers(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    if (writes_number(node) && is_passed_later(node, first)) {
      fill(node);
    }
  }
}

}  // namespace tsfuser
