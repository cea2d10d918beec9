// One op for a loop that multiplies the items of a list of sizes. Before:
//
//     %n = aten::len(%sizes);  %m = aten::sub(%n, 2)
//     %p = prim::Loop(%m, True, %start)
//       block0(%i, %product):
//         %j = aten::add(%i, 2);  %s = aten::__getitem__(%sizes, %j);  %q = aten::mul(%product, %s)
//         -> (True, %q)
//
// After: %p = tsfuser::product_from(%sizes, 2, %start). Each batch norm of a scripted network has such a
// loop, which counts the values of a channel. Torch unrolls it eight times, and adds a second loop for the
// rest. This is a step of prepare.cpp, so no node may be destroyed: the loop stays, but nobody reads its
// result.

#include "torchscript/nodes.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

#include <optional>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool is_call(const Node* node, c10::Symbol kind, size_t inputs) {
  return node->kind() == kind && node->inputs().size() == inputs && node->outputs().size() == 1;
}

struct Product {
  Value* sizes;
  Value* first;
};

// The list that the loop multiplies the items of, and the constant that it starts at.
std::optional<Product> product_of(const Node* loop) {
  if (loop->kind() != c10::prim::Loop || loop->outputs().size() != 1 || known_bool(loop->input(1)) != true) {
    return std::nullopt;
  }
  const Block* body = loop->blocks()[0];
  const Value* number = body->inputs()[0];
  const Value* before = body->inputs()[1];
  const Node* product = body->outputs()[1]->node();
  if (known_bool(body->outputs()[0]) != true || !is_call(product, c10::aten::mul, 2)) {
    return std::nullopt;
  }
  const size_t other = product->input(0) == before ? 1 : 0;
  const Node* item = product->input(other)->node();
  if (product->input(1 - other) != before || !is_call(item, c10::aten::__getitem__, 2)) {
    return std::nullopt;
  }
  Value* sizes = const_cast<Value*>(item->input(0));
  const Node* index = item->input(1)->node();
  if (*sizes->type() != *c10::ListType::ofInts() || !is_call(index, c10::aten::add, 2) ||
      index->input(0) != number) {
    return std::nullopt;
  }
  Value* first = const_cast<Value*>(index->input(1));
  const Node* count = loop->input(0)->node();
  const auto from = known_int(first);
  if (!from || *from < 0 || !is_call(count, c10::aten::sub, 2) || known_int(count->input(1)) != from ||
      !is_call(count->input(0)->node(), c10::aten::len, 1) || count->input(0)->node()->input() != sizes) {
    return std::nullopt;
  }
  return Product{sizes, first};
}

// What the program may change between the loop's count and its end: `aten::size`, or a sum of lists, has
// made the list, for readers only.
bool has_only_readers(const Value* sizes) {
  const auto maker = sizes->node()->kind();
  if (maker != c10::aten::size && maker != c10::aten::add) {
    return false;
  }
  for (const torch::jit::Use& use : sizes->uses()) {
    const auto* schema = use.user->maybeSchema();
    if (!schema || schema->is_mutable()) {
      return false;
    }
  }
  return true;
}

}  // namespace

void fold_products(Graph& graph, const Node*) {
  static const auto folded = c10::Symbol::fromQualString("tsfuser::product_from");
  for (Node* node : all_nodes(graph)) {
    const auto product = product_of(node);
    if (product && has_only_readers(product->sizes)) {
      Node* made = graph.create(folded, {product->sizes, product->first, node->input(2)}, 1);
      made->output()->setType(c10::IntType::get());
      made->copyMetadata(node);
      made->insertBefore(node);
      node->output()->replaceAllUsesWith(made->output());
      const torch::jit::WithInsertPoint before(made);
      node->replaceInput(0, graph.insertConstant(0));
    }
  }
}

}  // namespace tsfuser
