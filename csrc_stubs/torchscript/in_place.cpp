// Makes in-place ops functional before torch profiles a graph, and so before it differentiates the graph:
// TorchScript's autodiff takes no in-place op. Before:
//
//     %y = aten::conv2d(...);  %z = aten::add_(%y, %o, %1);  ... readers of %y and %z
//
// After (`type_as` keeps the dtype, as the write to %y did; if both dtypes are equal it returns its
// operand):
//
//     %y = aten::conv2d(...);  %s = aten::add(%y, %o, %1);  %t = aten::type_as(%s, %y);  ... readers of %t
//
// This is a step of prepare.cpp, so no node may be destroyed. The in-place op stays, but writes to a tensor
// without elements that nobody reads; torch's dead code elimination drops it before autodiff.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Use;
using torch::jit::Value;

// Whether torch's peephole pass replaces the result by the operand once nothing writes to it, whatever the
// dtypes: `x * 1` of bools is a tensor of integers.
bool is_taken_for_operand(const Node& maker) {
  const bool adds = maker.kind() == c10::aten::add || maker.kind() == c10::aten::sub;
  if (!adds && maker.kind() != c10::aten::mul && maker.kind() != c10::aten::div) {
    return false;
  }
  const auto number = torch::jit::toIValue(maker.input(1));
  return number && number->isScalar() && number->toScalar().equal(adds ? 0 : 1);
}

// Whether the memory of the value is new, and reached through the value only.
bool is_fresh(const Value* value) {
  const Node* maker = value->node();
  if (is_taken_for_operand(*maker)) {
    return false;
  }
  if (maker->kind() == c10::aten::type_as) {  // hands its operand on: one that nothing else reads
    const Value* operand = behind_profile(maker->input(0));
    return operand->uses().size() == 1 && maker->input(0)->uses().size() == 1 && is_fresh(operand);
  }
  return op_facts().fresh.count(maker->kind()) != 0;
}

// Whether the node may switch gradients on or off. An op that writes while they are off leaves the tensor's
// history as it was; a functional op would cut it.
bool may_switch_gradients(const Node& node) {
  static const Kinds kinds = {
      c10::prim::Enter,      c10::prim::Exit,     c10::prim::CallFunction,
      c10::prim::CallMethod, c10::prim::PythonOp, c10::Symbol::fromQualString("aten::set_grad_enabled")};
  if (kinds.count(node.kind())) {
    return true;
  }
  for (const Block* block : node.blocks()) {
    for (const Node* inner : block->nodes()) {
      if (may_switch_gradients(*inner)) {
        return true;
      }
    }
  }
  return false;
}

constexpr int kFarthest = 1000;  // nodes between a tensor's maker and its writer

bool same_gradients(const Node* first, const Node* second) {
  int steps = 0;
  for (const Node* between = first->next(); between != second; between = between->next()) {
    if (++steps > kFarthest || may_switch_gradients(*between)) {
      return false;
    }
  }
  return true;
}

bool all_after(const std::vector<Use>& uses, const Node* node) {
  return std::all_of(uses.begin(), uses.end(),
                     [node](const Use& use) { return use.user == node || use.user->isAfter(node); });
}

bool has_other_tensor(const Node* node) { return node->inputs().size() > 1 && is_tensor(node->input(1)); }

// Whether the value is made of a list of tensors (aten::cat): torch does not ask whether these require a
// gradient before it runs a differentiable graph, whose results do require one. Alone, as before an op in
// place, the op is in none.
bool is_made_of_list(const Value* value) {
  const auto inputs = behind_profile(value)->node()->inputs();
  return std::any_of(inputs.begin(), inputs.end(), [](const Value* input) {
    return input->type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

// Whether nobody can tell the tensor that the node writes to from a new one: it was made in this block,
// under the same gradient mode, and the node is the first to read it.
bool may_rewrite(const Node* node) {
  if (node->inputs().empty() || node->outputs().size() != 1 || !is_tensor(node->input(0))) {
    return false;
  }
  const Value* target = node->input(0);
  if (is_made_of_list(target) || (has_other_tensor(node) && is_made_of_list(node->input(1)))) {
    return false;
  }
  return target->node()->owningBlock() == node->owningBlock() && is_fresh(target) &&
         all_after(target->uses(), node) && same_gradients(target->node(), node);
}

bool writes_to(const Use& use) {
  return use.offset == 0 && op_facts().in_place.count(use.user->kind()) != 0;
}

// The readers of a node's target, from the node on: those of the tensor and of the result.
std::vector<Use> later_readers(const Node* node, std::vector<Use> uses) {
  const auto& more = node->output()->uses();
  uses.insert(uses.end(), more.begin(), more.end());
  uses.erase(std::remove_if(uses.begin(), uses.end(), [node](const Use& use) { return use.user == node; }),
             uses.end());
  return uses;
}

// The reader that changes the tensor before any other reads it, and that will be rewritten in its turn.
Node* next_writer(const Node* node, const std::vector<Use>& readers) {
  for (const Use& use : readers) {
    if (writes_to(use) && use.user->owningBlock() == node->owningBlock() && all_after(readers, use.user)) {
      return same_gradients(node, use.user) ? use.user : nullptr;
    }
  }
  return nullptr;
}

// Whether what the node makes is only read by ops that make new tensors of it, or numbers, perhaps behind
// casts of autocast, which may hand it on. Else something may write to it: torch would refuse to run the
// backward of the cast that `keep_dtype` adds.
bool stays_as_it_is(const Node* node) {
  std::vector<Use> readers = node->input(0)->uses();
  for (;;) {
    readers = later_readers(node, std::move(readers));
    node = next_writer(node, readers);
    if (!node) {
      break;
    }
    if (!has_other_tensor(node)) {
      return true;  // a new tensor takes over
    }
  }
  return std::all_of(readers.begin(), readers.end(), [](const Use& use) {
    return only_reads(*use.user) || (use.offset > 0 && op_facts().in_place.count(use.user->kind()));
  });
}

// `aten::add` for `aten::add_`, placed behind the node; null where there is no such op.
Node* functional(Node* node) {
  std::string name = node->kind().toQualString();
  name.pop_back();
  Node* made = node->owningGraph()->create(c10::Symbol::fromQualString(name), node->inputs(), 1);
  made->copyMetadata(node);
  made->insertAfter(node);
  if (!made->maybeSchema()) {
    made->destroy();
    return nullptr;
  }
  return made;
}

// The relu behind a value: one that alone reads it, or that changes it before any other reads it.
Node* relu_behind(const Value* value) {
  const auto& readers = value->uses();
  if (readers.size() == 1 && readers[0].user->kind() == c10::aten::relu &&
      readers[0].user->owningBlock() == value->node()->owningBlock()) {
    return readers[0].user;
  }
  Node* writer = next_writer(value->node(), readers);
  return writer && writer->kind() == c10::aten::relu_ ? writer : nullptr;
}

// Puts a cast to `like`'s dtype between the node's result and its readers: in-place ops keep the dtype of
// their tensor, while others promote. Autodiff keeps the operand of a cast for its backward, as it keeps
// the result of a relu. So that no more than that is kept, the cast goes behind a relu, with which it may
// change places.
void keep_dtype(Node* made, Value* like) {
  Node* relu = relu_behind(made->output());
  Value* result = (relu ? relu : made)->output();
  const std::vector<Use> readers = relu ? later_readers(relu, made->output()->uses()) : result->uses();
  Node* cast = made->owningGraph()->create(c10::aten::type_as, {result, like}, 1);
  cast->copyMetadata(made);
  cast->insertAfter(result->node());
  for (const Use& use : readers) {
    use.user->replaceInput(use.offset, cast->output());
  }
}

void rewrite(Node* node) {
  Value* target = node->input(0);
  const std::vector<Use> readers = later_readers(node, target->uses());
  Node* made = functional(node);
  if (!made) {
    return;
  }
  for (const Use& use : readers) {
    use.user->replaceInput(use.offset, made->output());
  }
  if (has_other_tensor(node)) {
    keep_dtype(made, target);
    keep_dtype_of_gradient(made, 0);
    keep_dtype_of_gradient(made, 1);
  } else {
    mark_written(made);
  }
  disarm(node);
}

}  // namespace

void keep_dtype_of_gradient(Node* made, size_t operand) {
  Graph& graph = *made->owningGraph();
  const torch::jit::WithInsertPoint before(made);
  Value* off = graph.insertConstant(false);
  Node* cast = graph.create(c10::aten::_autocast_to_full_precision, {made->input(operand), off, off}, 1);
  cast->copyMetadata(made);
  cast->insertBefore(made);
  made->replaceInput(operand, cast->output());
}

void disarm(Node* node) {
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  Value* size = graph.insertConstant(std::vector<int64_t>{0});
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    if (is_tensor(node->input(i))) {
      node->replaceInput(i, graph.insert(c10::aten::new_empty, {node->input(i), size}));
    }
  }
}

bool only_reads(const Node& reader) {
  static const Kinds casts = {c10::aten::_autocast_to_full_precision,
                              c10::aten::_autocast_to_reduced_precision,
                              c10::Symbol::fromQualString("tsfuser::full_precision"),
                              c10::Symbol::fromQualString("tsfuser::reduced_precision")};
  return is_profile(&reader) || casts.count(reader.kind()) != 0  // which may hand their operand on
             ? is_only_read(reader.output())
             : op_facts().fresh.count(reader.kind()) != 0 || reader.kind() == c10::aten::size ||
                   asks_for_type(&reader);
}

bool is_only_read(const Value* value) {
  return std::all_of(value->uses().begin(), value->uses().end(),
                     [](const Use& use) { return only_reads(*use.user); });
}

void make_functional(Graph& graph, const Node*) {
  for (Node* node : all_nodes(graph)) {
    if (op_facts().in_place.count(node->kind()) && may_rewrite(node) &&
        (!has_other_tensor(node) || stays_as_it_is(node))) {
      rewrite(node);
    }
  }
}

}  // namespace tsfuser
