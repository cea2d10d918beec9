// A program that reads a list of tensors between appends to it reads no such list any more. Before:
//
//     %list = prim::ListConstruct(%a);  %1 = aten::append(%list, %b);  %x = aten::cat(%list, 1)
//     %2 = aten::append(%list, %c);     %y = aten::cat(%list, 1);      %n = aten::len(%list)
//     %t = aten::__getitem__(%list, %i);  %r = prim::requires_grad(%t)
//
// After:
//
//     %k = prim::ListConstruct(%a, %b);      %x = aten::cat(%k, 1)
//     %l = prim::ListConstruct(%a, %b, %c);  %y = aten::cat(%l, 1);    %n = 3
//     %t = tsfuser::asked_item(%a, %b, %c, %i);  %r = prim::requires_grad(%t)
//
// Groups and autodiff take joins of tensors that they see. And for torch's alias analysis a tensor in a list
// that more than one join reads may be any other tensor of the program. DenseNet appends the result of each
// layer to a list, which the next layer joins, and asks each item whether it requires a gradient. It is a
// step of prepare.cpp, so no node may be destroyed: torch's dead code elimination drops the appends, to
// lists that nobody reads.

#include "torchscript/nodes.h"
#include "torchscript/prepare.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Use;
using torch::jit::Value;

constexpr size_t kMostAppends = 64;  // each reader gets all items: a square of their number in all

bool is_join(const Node* node) { return node->kind() == c10::aten::cat || node->kind() == c10::aten::stack; }

// In the list's own block, so that it is known what was appended when a reader comes.
bool is_append(const Use& use, const Node* list) {
  return use.user->kind() == c10::aten::append && use.offset == 0 && !use.user->hasUses() &&
         use.user->owningBlock() == list->owningBlock();
}

// Whether all that the program does with the tensor is to ask a fact of it.
bool is_asked_only(const Value* tensor) {
  static const std::unordered_set<c10::Symbol> questions = {
      c10::prim::requires_grad, c10::prim::dtype, c10::prim::device, c10::aten::dim, c10::aten::size};
  return std::all_of(tensor->uses().begin(), tensor->uses().end(),
                     [](const Use& use) { return questions.count(use.user->kind()) != 0; });
}

bool is_reader(const Use& use) {
  const auto kind = use.user->kind();
  return is_join(use.user) || kind == c10::aten::len ||
         (kind == c10::aten::__getitem__ && use.offset == 0 && is_asked_only(use.user->output()));
}

// Whether the list is made, appended to and read where all of it is seen; what torch has passed must stay.
bool only_grows(const Node* list, const Node* first) {
  size_t appends = 0;
  for (const Use& use : list->output()->uses()) {
    if (is_append(use, list)) {
      ++appends;
    } else if (!is_reader(use) || !use.user->isAfter(first)) {
      return false;
    }
  }
  return appends > 0 && appends <= kMostAppends;
}

// The items that the list has when the program comes to the reader, which may be in an inner block.
std::vector<Value*> items_at(Node* list, const std::vector<Node*>& appends, const Node* reader) {
  std::vector<Value*> items = list->inputs().vec();
  for (Node* append : appends) {
    if (append->isBefore(reader)) {
      items.push_back(append->input(1));
    }
  }
  return items;
}

Value* list_before(Node* place, at::ArrayRef<Value*> items) {
  return place->owningGraph()->createList(c10::TensorType::get(), items)->insertBefore(place)->output();
}

// Has the reader read the items.
void read(Node* reader, std::vector<Value*> items) {
  static const auto asked_item = c10::Symbol::fromQualString("tsfuser::asked_item");
  Graph& graph = *reader->owningGraph();
  const torch::jit::WithInsertPoint here(reader);
  if (is_join(reader)) {
    reader->replaceInput(0, list_before(reader, items));
    return;
  }
  if (reader->kind() == c10::aten::len) {
    reader->output()->replaceAllUsesWith(graph.insertConstant(static_cast<int64_t>(items.size())));
    reader->replaceInput(0, list_before(reader, {}));
    return;
  }
  items.push_back(reader->input(1));
  Node* asked = graph.insertNode(graph.create(asked_item, items, 1));
  asked->copyMetadata(reader);
  reader->output()->replaceAllUsesWith(asked->output());
  // The first run still has it, without readers: it must find an item.
  reader->replaceInput(0, list_before(reader, {asked->output()}));
  reader->replaceInput(1, graph.insertConstant(0));
}

void part(Node* list) {
  std::vector<Node*> readers, appends;
  for (const Use& use : list->output()->uses()) {
    (is_append(use, list) ? appends : readers).push_back(use.user);
  }
  std::sort(appends.begin(), appends.end(), [](const Node* a, const Node* b) { return a->isBefore(b); });
  for (Node* reader : readers) {
    read(reader, items_at(list, appends, reader));
  }
  for (Node* append : appends) {
    append->replaceInput(0, list_before(append, {}));
    disarm(append);  // what it still appends is no tensor of the program
  }
}

// Raises what TorchScript's own op does.
void asked_item(Stack& stack) {
  const int64_t count = torch::jit::pop(stack).toInt() - 1;  // the interpreter says how many operands
  int64_t index = torch::jit::pop(stack).toInt();
  const auto items = torch::jit::last(stack, count);
  index += index < 0 ? count : 0;
  if (index < 0 || index >= count) {
    throw std::out_of_range("list index out of range");
  }
  c10::IValue item = items[index];
  torch::jit::drop(stack, count);
  torch::jit::push(stack, std::move(item));
}

}  // namespace

void part_grown_lists(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::prim::ListConstruct && *node->output()->type() == *c10::ListType::ofTensors() &&
        only_grows(node, first)) {
      part(node);
    }
  }
}

void register_grown_lists() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::asked_item(...) -> Tensor", asked_item, c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace tsfuser
