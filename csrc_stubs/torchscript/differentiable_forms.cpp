// Ops that TorchScript's autodiff knows no derivative of, written as ops that it knows one of, before torch
// profiles a graph (by the hook of in_place.cpp), and so before it differentiates it:
//
//     aten::to(%x, 6, 0, 0, None)            aten::to(%x, None, 6, 0, 0)          the overload with an
//     optional device aten::where(%c, %x, -1e4)              aten::where(%c, %x, {-1e4})          a tensor
//     that stands for a Python number aten::masked_fill(%x, %c, -1e4) aten::contiguous(aten::where(%c,
//     aten::type_as({-1e4}, %x), %x), 0)
//
// `plain_forms` writes them as they were, for passes and groups, and for all that is not differentiated.
//
// And a cast of autocast that several ops read, of a tensor that is not made by ops with derivatives,
// becomes one for each:
//
//     %c = aten::_autocast_to_full_precision(%x, 1, 0)    and    %d =
//     aten::_autocast_to_reduced_precision(%x, 0, 0, 1, 1)
//                                                                %e = aten::_autocast_to_full_precision(%d,
//                                                                1, 0)
//
// A cast may hand out its operand. Where readers are in several differentiable graphs, one of them would
// return the cast; torch lets none return what may be one of its inputs, and takes the cast out, with all
// that follows from it. %d is off, and gives %x back: by its last numbers, which differ from reader to
// reader, torch takes %c and %e for different. %e may stand far behind %c: autocast makes a cast for each
// reader, and torch has merged those of %x because nothing writes to it.

#include "torchscript/hooks.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/autodiff.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool is_false(const Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isBool() && !constant->toBool();
}

bool is_none(const Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isNone();
}

bool is_fractional(const Value* dtype) {
  const auto constant = torch::jit::toIValue(dtype);
  return constant && constant->isInt() && at::isFloatingType(static_cast<at::ScalarType>(constant->toInt()));
}

// The number, of the code and real, that a value is.
std::optional<at::Scalar> real_number(const Value* value) {
  const auto constant = torch::jit::toIValue(value);
  if (!constant || !(constant->isDouble() || constant->isInt() || constant->isBool())) {
    return std::nullopt;
  }
  return constant->toScalar();
}

// The number that a tensor constant, perhaps behind a profile node, stands for in type promotion.
std::optional<at::Scalar> number_of(const Value* value) {
  const auto constant = torch::jit::toIValue(behind_profile(value));
  if (!constant || !constant->isTensor() || !constant->toTensor().defined() ||
      !constant->toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    return std::nullopt;
  }
  return constant->toTensor().item();
}

// torch pools constants that are equal, and would take a tensor of no dims for a number of the same value.
bool has_such_tensor(const Block* block, const at::Tensor& like) {
  for (const Node* node : block->nodes()) {
    if (node->kind() == c10::prim::Constant && is_tensor(node->output())) {
      const auto other = torch::jit::toIValue(node->output());
      if (other && other->isTensor() && other->toTensor().defined() && other->toTensor().dim() == 0 &&
          other->toTensor().scalar_type() == like.scalar_type() &&
          !other->toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
        return true;
      }
    }
    for (const Block* inner : node->blocks()) {
      if (has_such_tensor(inner, like)) {
        return true;
      }
    }
  }
  return false;
}

// A tensor constant for the number, placed before `node`; null where that could be mistaken for another.
Value* tensor_of(at::Scalar number, Node* node) {
  Graph& graph = *node->owningGraph();
  at::Tensor tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (has_such_tensor(graph.block(), tensor)) {
    return nullptr;
  }
  const torch::jit::WithInsertPoint before(node);
  return graph.insertConstant(tensor);
}

// Has `made` take the place of `node`, which stays, without readers, since torch holds on to it. It runs
// while torch profiles, and raises the error of a number that does not fit into a dtype.
void replace(Node* node, Node* made) {
  made->copyMetadata(node);
  made->insertAfter(node);
  node->output()->replaceAllUsesWith(made->output());
}

void cast(Node* node) {  // aten::to(Tensor, int dtype, bool non_blocking, bool copy, int? memory_format)
  const bool plain = node->inputs().size() == 5 && is_fractional(node->input(1)) &&
                     is_false(node->input(2)) && is_false(node->input(3)) && is_none(node->input(4));
  if (!plain || !is_only_read(node->output())) {  // its memory may be that of its operand
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  Value* anywhere = graph.insertConstant(c10::IValue());
  replace(node, graph.create(c10::aten::to,
                             {node->input(0), anywhere, node->input(1), node->input(2), node->input(3)}, 1));
}

void where(Node* node) {  // aten::where(Tensor condition, Tensor or number, Tensor or number)
  for (const size_t k : {1, 2}) {
    if (const auto number = real_number(node->input(k)); number && is_tensor(node->input(3 - k))) {
      if (Value* tensor = tensor_of(*number, node)) {
        Node* made = node->owningGraph()->create(c10::aten::where, node->inputs(), 1);
        made->replaceInput(k, tensor);
        replace(node, made);
      }
      return;
    }
  }
}

void masked_fill(Node* node) {  // aten::masked_fill(Tensor, Tensor mask, Tensor or number)
  const auto number = real_number(node->input(2));
  Value* tensor = number && is_only_read(node->output()) ? tensor_of(*number, node) : nullptr;
  if (!tensor) {
    return;
  }
  Graph& graph = *node->owningGraph();
  const auto put = [&](c10::Symbol kind, at::ArrayRef<Value*> inputs, Node* before) {
    Node* made = graph.create(kind, inputs, 1);
    made->copyMetadata(node);
    return made->insertAfter(before);
  };
  Node* value = put(c10::aten::type_as, {tensor, node->input(0)}, node);
  Node* chosen = put(c10::aten::where, {node->input(1), value->output(), node->input(0)}, value);
  const torch::jit::WithInsertPoint behind(chosen->next());
  Value* row_major = graph.insertConstant(static_cast<int64_t>(at::MemoryFormat::Contiguous));
  Node* made = put(c10::aten::contiguous, {chosen->output(), row_major}, row_major->node());
  node->output()->replaceAllUsesWith(made->output());
}

bool is_cast(const Node* node) {  // that autocast makes
  return node->kind() == c10::aten::_autocast_to_full_precision ||
         node->kind() == c10::aten::_autocast_to_reduced_precision;
}

bool is_idle_cast(const Node* node) {
  return is_cast(node) && is_false(node->input(1)) && is_false(node->input(2));
}

bool may_be_inside(const Node* node) {  // of a differentiable graph
  return torch::jit::isDifferentiable(node) && op_facts().excluded.count(node->kind()) == 0;
}

constexpr size_t kReaders = 8;  // that get a cast of their own, at most: there are more scalar types

// aten::_autocast_to_*_precision(Tensor, bool, ...). Readers before `here` stay: torch has put profile nodes
// before them, and will put none before what is new there, without which it makes no differentiable graph.
void own_cast_each(Node* node, const Node* here) {
  if (may_be_inside(behind_profile(node->input(0))->node())) {
    return;
  }
  std::vector<torch::jit::Use> uses = node->output()->uses();
  uses.erase(std::remove_if(uses.begin(), uses.end(),
                            [](const torch::jit::Use& use) { return !may_be_inside(use.user); }),
             uses.end());
  Graph& graph = *node->owningGraph();
  for (size_t i = 1; i < std::min(uses.size(), kReaders); ++i) {  // the first keeps what is there
    Node* reader = uses[i].user;
    if (reader->isBefore(here)) {
      continue;
    }
    const torch::jit::WithInsertPoint before(reader);
    Value* off = graph.insertConstant(false);
    Value* differs = graph.insertConstant(static_cast<int64_t>(i));
    Value* given = const_cast<Value*>(behind_profile(node->input(0)));
    Node* same = graph.insertNode(
        graph.create(c10::aten::_autocast_to_reduced_precision, {given, off, off, differs, differs}, 1));
    Node* own = graph.insertNode(graph.createClone(node, [](Value* value) { return value; }));
    own->replaceInput(0, same->output());
    reader->replaceInput(uses[i].offset, own->output());
  }
}

void own_casts_in(Block* block, const Node* here) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) {
      own_casts_in(inner, here);
    }
    if (is_cast(node)) {
      own_cast_each(node, here);
    }
  }
}

// aten::where(%c, %x, {-1e4})  ->  aten::where(%c, %x, -1e4)
void number_again(Node* node) {
  for (const size_t k : {1, 2}) {
    if (const auto number = number_of(node->input(k))) {
      const torch::jit::WithInsertPoint before(node);
      node->replaceInput(k, node->owningGraph()->insertConstant(*number));
    }
  }
}

// aten::to(%x, None, 6, 0, 0)  ->  aten::to(%x, 6, 0, 0, None)
void overload_again(Node* node) {
  if (node->inputs().size() != 5 || !is_none(node->input(1)) || is_none(node->input(2))) {
    return;
  }
  Node* made = node->owningGraph()->create(
      c10::aten::to, {node->input(0), node->input(2), node->input(3), node->input(4), node->input(1)}, 1);
  made->output()->setType(node->output()->type());
  made->copyMetadata(node);
  made->insertBefore(node);
  node->output()->replaceAllUsesWith(made->output());
  node->destroy();
}

// Whether nothing reads the value, perhaps behind profile nodes, but `reader`, and what asks for its size.
bool is_read_by(const Value* value, const Node* reader) {
  return std::all_of(value->uses().begin(), value->uses().end(), [reader](const torch::jit::Use& use) {
    const Node* user = use.user;
    return user == reader || user->kind() == c10::aten::size ||
           (is_profile(user) && is_read_by(user->output(), reader));
  });
}

// aten::contiguous(aten::where(%c, aten::type_as({-1e4}, %x), %x), 0)  ->  aten::masked_fill(%x, %c, -1e4)
void masked_fill_again(Node* node) {
  Node* chosen = const_cast<Node*>(behind_profile(node->input(0))->node());
  if (chosen->kind() != c10::aten::where || chosen->inputs().size() != 3 ||
      !is_read_by(chosen->output(), node)) {
    return;
  }
  const Node* cast = behind_profile(chosen->input(1))->node();
  const auto number = cast->kind() == c10::aten::type_as ? number_of(cast->input(0)) : std::nullopt;
  if (!number) {  // a program of torch's own does not cast such constants
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(chosen);
  Node* made = graph.create(c10::aten::masked_fill,
                            {chosen->input(2), chosen->input(0), graph.insertConstant(*number)}, 1);
  made->output()->setType(node->output()->type());
  made->copyMetadata(node);
  made->insertAfter(chosen);
  chosen->output()->replaceAllUsesWith(made->output());
  node->output()->replaceAllUsesWith(made->output());
}

bool are_equal(const Node* cast, const Node* other) {
  if (cast->kind() != other->kind() || cast->inputs().size() != other->inputs().size()) {
    return false;
  }
  for (size_t i = 1; i < cast->inputs().size(); ++i) {
    const auto number = torch::jit::toIValue(cast->input(i));
    const auto same = torch::jit::toIValue(other->input(i));
    if (!number || !same || *number != *same) {
      return false;
    }
  }
  return true;
}

// A cast of idle casts of %x  ->  the cast of %x that there is; autodiff may have put either first
void one_cast_again(Node* node) {
  const auto behind = [](Value* value) { return const_cast<Value*>(behind_profile(value)); };
  Value* given = node->input(0);
  while (is_idle_cast(behind(given)->node())) {
    given = behind(given)->node()->input(0);
  }
  if (given == node->input(0)) {
    return;
  }
  node->replaceInput(0, given);
  std::vector<torch::jit::Use> uses = behind(given)->uses();
  for (size_t i = 0; i < uses.size(); ++i) {
    Node* other = uses[i].user;
    if (is_profile(other)) {
      const auto more = other->output()->uses();
      uses.insert(uses.end(), more.begin(), more.end());
    } else if (other != node && is_cast(other) && other->owningBlock() == node->owningBlock() &&
               are_equal(other, node)) {
      const bool first = other->isBefore(node);
      (first ? node : other)->output()->replaceAllUsesWith((first ? other : node)->output());
    }
  }
}

void plain_forms_in(Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) {
      plain_forms_in(inner);
    }
    if (node->kind() == c10::aten::where) {
      number_again(node);
    } else if (node->kind() == c10::aten::to) {
      overload_again(node);
    } else if (node->kind() == c10::aten::contiguous) {
      masked_fill_again(node);
    } else if (is_cast(node)) {
      one_cast_again(node);
    }
  }
}

void drop_idle_casts(Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) {
      drop_idle_casts(inner);
    }
    if (is_idle_cast(node)) {
      node->output()->replaceAllUsesWith(node->input(0));
      node->destroy();
    }
  }
}

}  // namespace

void make_differentiable(Node* node) {
  if (node->outputs().size() != 1 || node->output()->uses().empty()) {
    return;
  }
  if (node->kind() == c10::aten::to) {
    cast(node);
  } else if (node->kind() == c10::aten::where && node->inputs().size() == 3) {
    where(node);
  } else if (node->kind() == c10::aten::masked_fill) {
    masked_fill(node);
  }
}

void own_casts(Graph& graph, const Node* here) { own_casts_in(graph.block(), here); }

void plain_forms(Graph& graph) { plain_forms_in(graph.block()); }

void eager_forms(Graph& graph) {
  plain_forms_in(graph.block());
  drop_idle_casts(graph.block());
}

}  // namespace tsfuser
