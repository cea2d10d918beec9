// Ops without a formula in TorchScript's autodiff, rewritten in forms that have one.
// `write_differentiable_forms` is a step of prepare.cpp. `plain_forms` restores the ops of the program, for
// passes, for groups and for graphs that are not differentiated. `forms` is the table of both directions.
//
//     program                               autodiff
//     aten::to(%x, 6, 0, 0, None)           aten::to(%x, None, 6, 0, 0)        the overload with a device
//     aten::where(%c, %x, -1e4)             aten::where(%c, %x, {-1e4})        a tensor that stands for a
//                                                                              Python number
//     aten::masked_fill(%x, %c, -1e4)       aten::contiguous(aten::where(%c, aten::type_as({-1e4}, %x), %x),
//     0)
//
// Views, parts and joins become their twins (twins.h), which autodiff takes.
//
// Another rewrite is for a cast of autocast that several ops read, if no op with a derivative makes its
// operand. Each reader gets a cast of its own, after a cast that is off:
//
//     %c = aten::_autocast_to_full_precision(%x, 1, 0)
// and
//     %d = aten::_autocast_to_reduced_precision(%x, 0, 0, 1, 1)
//     %e = aten::_autocast_to_full_precision(%d, 1, 0)
//
// The reason: a cast may return its operand. If the readers are in several differentiable graphs, one of
// these would return the cast to the others. But torch lets no such graph return what may be one of its
// inputs: it moves the cast out of the graph, with all that depends on it. %d is off, so it returns %x; its
// last numbers differ from reader to reader, so torch does not merge %c and %e. %e may be far behind %c:
// autocast makes a cast for each reader, and torch merged those of %x because nothing writes to it.

#include "graph/memory.h"
#include "torchscript/kept_writes.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twins.h"
#include "torchscript/constants.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/autodiff.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool is_none(const Value* value) {
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isNone();
}

constexpr size_t kMostValues = 1000;  // that a cast is followed back through

// Whether ops that autodiff takes compute the value of one that `is_wanted`.
template <typename Predicate>
bool is_computed_of(const Value* value, const Predicate& is_wanted) {
  std::vector<const Value*> values = {behind_profile(value)};
  std::unordered_set<const Value*> seen(values.begin(), values.end());
  for (size_t i = 0; i < std::min(values.size(), kMostValues); ++i) {
    if (is_wanted(values[i])) {
      return true;
    }
    const Node* maker = values[i]->node();
    if (may_be_inside(maker) || maker->kind() == c10::prim::ListConstruct) {
      for (const Value* operand : maker->inputs()) {
        if (seen.insert(behind_profile(operand)).second) {
          values.push_back(behind_profile(operand));
        }
      }
    }
  }
  return false;
}

// Whether the dtype of a cast is fractional, or that of a tensor of which the operand is computed, as where
// a norm is cast back: such a tensor is in the differentiable graph, and torch notes its dtype while it
// profiles. Each call is asked for it, too (open_dtypes.h).
bool may_be_fractional(const Value* dtype, const Value* operand) {
  if (torch::jit::toIValue(dtype)) {
    const auto known = known_int(dtype);
    return known && at::isFloatingType(static_cast<at::ScalarType>(*known));
  }
  if (dtype->node()->kind() != c10::prim::dtype || !is_tensor(dtype->node()->input())) {
    return false;
  }
  const auto parts = parts_of_type(behind_profile(dtype->node()->input()));
  return is_computed_of(operand, [&parts](const Value* value) {
    return std::find(parts.begin(), parts.end(), value) != parts.end();
  });
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
Value* tensor_of(const at::Scalar& number, Node* node) {
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

bool is_cast(const Node* node) {  // that autocast makes
  return node->kind() == c10::aten::_autocast_to_full_precision ||
         node->kind() == c10::aten::_autocast_to_reduced_precision;
}

// aten::to(%x, 6, 0, 0, None)  ->  aten::to(%x, None, 6, 0, 0)
void write_cast(Node* node, const Node*) {
  if (is_read_cast(node)) {
    replace_cast(node, c10::aten::to);
  }
}

void restore_cast(Node* node, Walk& walk) {
  if (node->inputs().size() != 5 || !is_none(node->input(1)) || is_none(node->input(2))) {
    return;
  }
  Node* made = node->owningGraph()->create(
      c10::aten::to, {node->input(0), node->input(2), node->input(3), node->input(4), node->input(1)}, 1);
  made->output()->setType(node->output()->type());
  made->copyMetadata(node);
  made->insertBefore(node);
  node->output()->replaceAllUsesWith(made->output());
  walk.destroy(node);
}

// aten::where(%c, %x, -1e4)  ->  aten::where(%c, %x, {-1e4})
void write_where(Node* node, const Node*) {
  if (node->inputs().size() != 3) {
    return;
  }
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

void restore_where(Node* node, Walk&) {
  if (node->inputs().size() != 3) {  // which finds places
    return;
  }
  for (const size_t k : {1, 2}) {
    if (const auto number = number_of(node->input(k))) {
      const torch::jit::WithInsertPoint before(node);
      node->replaceInput(k, node->owningGraph()->insertConstant(*number));
    }
  }
}

// aten::masked_fill(%x, %c, -1e4)  ->  aten::contiguous(aten::where(%c, aten::type_as({-1e4}, %x), %x), 0)
void write_masked_fill(Node* node, const Node*) {
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

// Whether nothing reads the value, perhaps behind profile nodes, but `reader`, and what asks for its size.
bool is_read_by(const Value* value, const Node* reader) {
  return std::all_of(value->uses().begin(), value->uses().end(), [reader](const torch::jit::Use& use) {
    const Node* user = use.user;
    return user == reader || user->kind() == c10::aten::size ||
           (is_profile(user) && is_read_by(user->output(), reader));
  });
}

void restore_masked_fill(Node* node, Walk&) {
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

constexpr size_t kReaders = 8;  // that get a cast of their own, at most: there are more scalar types

// aten::_autocast_to_*_precision(Tensor, bool, ...). Readers before `first` stay: torch has put profile
// nodes before them, and will put none before what is new there, without which it makes no differentiable
// graph.
void write_own_casts(Node* node, const Node* first) {
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
    if (reader->isBefore(first)) {
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

// Whether a node between two of a block may write to the value.
bool is_written_between(const Value* value, const Node* first, const Node* last) {
  while ((first = first->next()) != last) {
    if (writes(first)) {
      Graph* graph = const_cast<Node*>(first)->owningGraph();
      return Memory(graph->shared_from_this(), op_facts().hidden_views).is_written(value);
    }
  }
  return false;
}

// A cast of idle casts of %x  ->  the cast of %x that there is; autodiff may have put either first
void restore_one_cast(Node* node, Walk&) {
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
      if (is_written_between(given, first ? other : node, first ? node : other)) {
        continue;
      }
      (first ? node : other)->output()->replaceAllUsesWith((first ? other : node)->output());
    }
  }
}

// A form that autodiff knows, and its inverse.
struct Form {
  const char* name;
  c10::Symbol kind;                              // of the program's node
  void (*write)(Node* node, const Node* first);  // gives the node's readers the other form
  c10::Symbol made;                              // the kind by which the inverse finds it
  void (*restore)(Node* node, Walk& walk);
};

const std::vector<Form>& forms() {
  static const auto* table = new std::vector<Form>{
      {"cast", c10::aten::to, write_cast, c10::aten::to, restore_cast},
      {"where with a number", c10::aten::where, write_where, c10::aten::where, restore_where},
      {"masked_fill", c10::aten::masked_fill, write_masked_fill, c10::aten::contiguous, restore_masked_fill},
      // behind the others, whose readers of casts are what autodiff takes by then
      {"full precision for each reader", c10::aten::_autocast_to_full_precision, write_own_casts,
       c10::aten::_autocast_to_full_precision, restore_one_cast},
      {"reduced precision for each reader", c10::aten::_autocast_to_reduced_precision, write_own_casts,
       c10::aten::_autocast_to_reduced_precision, restore_one_cast},
  };
  return *table;
}

// The inverse of in_place.cpp's `keep_dtype_of_gradient`, and of `write_own_casts`: readers of
// a cast that is off read its operand, which it gives back.
void drop_idle_casts(Graph& graph) {
  Walk walk(graph);
  for (Node* node : walk) {
    if (is_idle_cast(node)) {
      node->output()->replaceAllUsesWith(node->input(0));
      walk.destroy(node);
    }
  }
}

}  // namespace

bool is_idle_cast(const Node* node) {
  return is_cast(node) && known_bool(node->input(1)) == false && known_bool(node->input(2)) == false;
}

bool is_read_cast(const Node* node) {
  return node->kind() == c10::aten::to && node->inputs().size() == 5 &&
         may_be_fractional(node->input(1), node->input(0)) && known_bool(node->input(2)) == false &&
         known_bool(node->input(3)) == false && is_none(node->input(4)) &&
         is_only_read(node->output());  // its memory may be that of its operand
}

void replace_cast(Node* node, c10::Symbol kind) {
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  Value* anywhere = graph.insertConstant(c10::IValue());
  replace(node,
          graph.create(kind, {node->input(0), anywhere, node->input(1), node->input(2), node->input(3)}, 1));
}

bool may_be_inside(const Node* node) {
  return torch::jit::isDifferentiable(node) && op_facts().excluded.count(node->kind()) == 0;
}

void write_differentiable_forms(Graph& graph, const Node* first) {
  write_twins(graph);
  for (const Form& form : forms()) {
    for (Node* node : all_nodes(graph)) {
      if (node->kind() == form.kind && node->outputs().size() == 1 && node->hasUses()) {
        form.write(node, first);
      }
    }
  }
}

void plain_forms(Graph& graph) {
  check_written(graph);  // first: it looks for casts that are off
  forget_order(graph);
  restore_twins(graph);
  for (auto form = forms().rbegin(); form != forms().rend(); ++form) {
    Walk walk(graph);
    for (Node* node : walk) {
      if (node->kind() == form->made) {
        form->restore(node, walk);
      }
    }
  }
}

void eager_forms(Graph& graph) {
  plain_forms(graph);
  drop_idle_casts(graph);
}

std::vector<std::string> differentiable_forms() {
  std::vector<std::string> names;
  for (const Form& form : forms()) {
    names.emplace_back(form.name);
  }
  return names;
}

}  // namespace tsfuser
