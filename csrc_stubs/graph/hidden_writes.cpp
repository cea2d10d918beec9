// Writes that torch's analysis does not see (memory.h): they are found block by block, with the values that
// are there before each writer, by the sets of those that may be one tensor. Torch is told by an operator
// that says in its schema what the op does: `shared(%v, %a)` is %v, and may be %a.

#include "graph/memory.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

const auto kShared = c10::Symbol::fromQualString("tsfuser::shared");

bool is_tensor(const Value* value) { return value->type()->isSubtypeOf(*c10::TensorType::get()); }

}  // namespace

void Memory::find_hidden(Node* writer, size_t operand, VisibleOfSets& visible,
                         std::vector<HiddenWrite>& found) const {
  Value* written = writer->input(operand);
  HiddenWrite write{writer, operand, {}, {}};
  Values known = {written};
  for (const size_t set : sets_of(written)) {
    Visible& of_set = visible[set];
    if (of_set.covered > 0) {
      write.earlier.push_back(of_set.write);
    }
    for (size_t i = of_set.covered; i < of_set.values.size(); ++i) {
      Value* value = of_set.values[i];
      if (std::none_of(known.begin(), known.end(),
                       [&](Value* other) { return aliases_.mayContainAlias(other, value); })) {
        known.push_back(value);
      }
    }
  }
  write.values.assign(known.begin() + 1, known.end());
  if (write.values.empty() && write.earlier.empty()) {
    return;
  }
  for (const size_t set : is_tensor(written) ? sets_of(written) : Sets()) {  // a list is shown with none
    Visible& of_set = visible[set];
    of_set.covered = of_set.values.size();
    of_set.write = found.size();
  }
  found.push_back(std::move(write));
}

void Memory::find_hidden(Block* block, VisibleOfSets& visible, std::vector<HiddenWrite>& found) const {
  const auto show = [&](const auto& values) {
    for (Value* value : values) {
      for (const size_t set : sets_of(value)) {
        visible[set].values.push_back(value);
      }
    }
  };
  show(block->inputs());
  for (Node* node : block->nodes()) {
    for (const size_t place : written_operands(node)) {
      find_hidden(node, place, visible, found);
    }
    for (Block* inner : node->blocks()) {
      VisibleOfSets inside = visible;  // which nothing behind the block sees
      find_hidden(inner, inside, found);
    }
    show(node->outputs());
  }
}

std::vector<Memory::HiddenWrite> Memory::hidden_writes() const {
  std::vector<HiddenWrite> found;
  VisibleOfSets visible;
  if (!ends_.empty()) {
    find_hidden(graph_->block(), visible, found);
  }
  return found;
}

void show_hidden_writes(const std::shared_ptr<Graph>& graph,
                        const std::unordered_set<c10::Symbol>& hidden_views) {
  std::vector<Value*> shown;  // what each write writes to then
  for (const Memory::HiddenWrite& write : Memory(graph, hidden_views).hidden_writes()) {
    Value* written = write.writer->input(write.operand);
    auto others = write.values;
    for (const size_t earlier : write.earlier) {
      others.push_back(shown[earlier]);
    }
    for (Value* value : others) {
      if (is_tensor(written)) {
        Node* shared = graph->create(kShared, {written, value}, 1)->insertBefore(write.writer);
        shared->copyMetadata(write.writer);
        shared->output()->setType(written->type());
        written = shared->output();
      }
    }
    write.writer->replaceInput(write.operand, written);
    shown.push_back(written);
  }
}

void register_shared_memory() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::shared(Tensor(a) value, t(b) other) -> Tensor(a|b)",
      [](torch::jit::Stack& stack) { stack.pop_back(); }, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
