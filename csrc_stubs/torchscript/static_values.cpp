#include "torchscript/static_values.h"
#include "torchscript/call_facts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <string>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

template <class Values>
bool any_tensors(const Values& values) {
  return std::any_of(values.begin(), values.end(),
                     [](const Value* value) { return may_hold_tensors(value->type()); });
}

// Nodes without a schema, whose results are their operands, together or apart.
bool only_arranges(const Node* node) {
  static const Kinds kinds = {c10::prim::ListConstruct,  c10::prim::ListUnpack,
                              c10::prim::TupleConstruct, c10::prim::TupleUnpack,
                              c10::prim::TupleIndex,     c10::prim::TupleSlice,
                              c10::prim::unchecked_cast, c10::prim::unchecked_unwrap_optional,
                              c10::prim::Uninitialized,  c10::prim::Constant,
                              c10::prim::profile,        c10::Symbol::prim("ConstantChunk")};
  return kinds.count(node->kind()) != 0;
}

// Ops whose results are functions of their operands, where none of them is a tensor.
bool computes_numbers(const Node* node) {
  static const Kinds kinds = symbols({"aten::add",
                                      "aten::sub",
                                      "aten::mul",
                                      "aten::div",
                                      "aten::floordiv",
                                      "aten::remainder",
                                      "aten::neg",
                                      "aten::eq",
                                      "aten::ne",
                                      "aten::lt",
                                      "aten::le",
                                      "aten::gt",
                                      "aten::ge",
                                      "aten::__not__",
                                      "aten::__and__",
                                      "aten::__or__",
                                      "aten::__xor__",
                                      "aten::__contains__",
                                      "aten::floor",
                                      "aten::ceil",
                                      "aten::round",
                                      "aten::abs",
                                      "aten::pow",
                                      "aten::sqrt",
                                      "aten::sum",
                                      "aten::any",
                                      "aten::all",
                                      "aten::len",
                                      "aten::copy",
                                      "aten::list",
                                      "aten::__getitem__",
                                      "aten::slice",
                                      "aten::index",
                                      "aten::count",
                                      "aten::Bool",
                                      "aten::Int",
                                      "aten::Float",
                                      "aten::str",
                                      "aten::format",
                                      "aten::sorted",
                                      "aten::__range_length",
                                      "aten::__derive_index",
                                      "prim::min",
                                      "prim::max",
                                      "prim::abs"});
  return kinds.count(node->kind()) != 0;
}

// Ops that write to a list in a way that follows from their operands.
bool writes_numbers(const Node* node) {
  static const Kinds kinds =
      symbols({"aten::_set_item", "aten::append", "aten::extend", "aten::insert", "aten::pop", "aten::clear",
               "aten::reverse", "aten::sort", "aten::add_"});
  return kinds.count(node->kind()) != 0;
}

// Questions about tensors that their sizes answer.
bool asks_sizes(const Node* node) {
  static const Kinds kinds = {c10::aten::size, c10::aten::dim, c10::aten::len, c10::Symbol::aten("numel")};
  return kinds.count(node->kind()) != 0;
}

// Whether the operand is the dtype or the device of the result, and the sizes of that do not depend on it. A
// range of whole numbers, `arange(0, 2.5, 1)`, has fewer elements than one of fractions.
bool is_no_matter_of_sizes(const Node* node, size_t operand) {
  static const Kinds ranges = {c10::Symbol::aten("arange"), c10::Symbol::aten("range")};
  const auto* schema = node->maybeSchema();
  if (!schema || operand >= schema->arguments().size() || ranges.count(node->kind()) != 0) {
    return false;
  }
  const std::string& name = schema->arguments()[operand].name();
  const auto asks = node->input(operand)->node()->kind();
  return (asks == c10::prim::dtype && name == "dtype") || (asks == c10::prim::device && name == "device");
}

bool has_tag(const Node* node, at::Tag tag) {
  const auto& schema = node->schema();
  const auto found = c10::Dispatcher::singleton().findSchema({schema.name(), schema.overload_name()});
  return found && found->hasTag(tag);
}

const c10::FunctionSchema* schema_of(const Node* node) {
  const auto* schema = node->maybeSchema();
  return schema && node->kind().is_aten() ? schema : nullptr;
}

bool writes_to(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// `add_`: a write to the first operand, which keeps its sizes. `_resize_output_` lacks the tag.
bool is_in_place(const Node* node, const c10::FunctionSchema& schema) {
  return !schema.arguments().empty() && writes_to(schema.arguments()[0]) && schema.name().back() == '_' &&
         is_tensor(node->input(0)) && !has_tag(node, at::Tag::inplace_view) &&
         schema.name().find("resize") == std::string::npos;
}

// Whether the sizes of the results follow from those of the operands, and from numbers.
bool sizes_follow(const Node* node) {
  if (!indices_of(node).empty()) {
    return true;
  }
  const auto* schema = schema_of(node);
  if (!schema || has_tag(node, at::Tag::dynamic_output_shape) ||
      (node->kind() == c10::aten::where && node->inputs().size() == 1) ||  // finds places, as nonzero does
      (node->kind() == c10::aten::view && schema->overload_name() == "dtype")) {  // as many bytes
    return false;
  }
  const OpFacts& facts = op_facts();
  const bool known = facts.sized.count(node->kind()) != 0 || is_in_place(node, *schema);
  const auto outputs = node->outputs();
  return known && std::all_of(outputs.begin(), outputs.end(),
                              [](const Value* value) { return may_hold_tensors(value->type()); });
}

// Whether the list is new: no argument of the call, nor a part of one, is the same list.
bool is_new_list(const Value* list) {
  static const Kinds kinds = {c10::prim::ListConstruct, c10::aten::copy,  c10::aten::list, c10::aten::size,
                              c10::aten::add,           c10::aten::slice, c10::aten::mul};
  return kinds.count(list->node()->kind()) != 0;
}

}  // namespace

// Whether a value is None. Whether two values are one object, no fact tells.
bool asks_for_none(const Node* node) {
  const bool compares = node->kind() == c10::aten::__is__ || node->kind() == c10::aten::__isnot__;
  return compares && std::any_of(node->inputs().begin(), node->inputs().end(), [](const Value* input) {
           return input->type()->kind() == c10::TypeKind::NoneType;
         });
}

// Queries that the facts of an argument answer, but not the sizes of computed tensors.
bool asks_type(const Node* node) {
  static const Kinds kinds = {c10::prim::dtype, c10::prim::device, c10::Symbol::prim("is_cuda"),
                              c10::Symbol::prim("is_cpu")};
  return kinds.count(node->kind()) != 0;
}

bool writes_in_place(const Node* node) {
  const auto* schema = schema_of(node);
  return schema && is_in_place(node, *schema);
}

StaticValues::StaticValues(torch::jit::Graph& graph) {
  for (const Node* node : all_nodes(graph)) {
    if (node->kind() == c10::prim::SetAttr) {
      set_attributes_.insert(node->s(c10::attr::name));
    }
  }
  for (const Value* input : graph.inputs()) {
    if (!has_facts(input->type()) && input->type()->kind() != c10::TypeKind::ClassType) {
      leave_out(input);
    }
  }
  do {  // a loop hands on what it computes
    grew_ = false;
    visit(graph.block(), /*certain=*/true);
  } while (grew_ && knows_all_);
}

bool StaticValues::follows(const Value* value) const {
  return unknown_.count(value) == 0 && !(containers_change_ && is_container(value->type())) &&
         !(sizes_change_ && may_hold_tensors(value->type()));
}

void StaticValues::leave_out(const Value* value) { grew_ |= unknown_.insert(value).second; }

// `certain`: whether the block runs follows from the facts, and how often.
void StaticValues::visit(Block* block, bool certain) {
  for (Node* node : block->nodes()) {
    if (node->kind() == c10::prim::If) {
      visit_if(node, certain);
    } else if (node->kind() == c10::prim::Loop) {
      visit_loop(node, certain);
    } else if (node->blocks().empty()) {
      visit_writes(node, certain);
      if (!outputs_follow(node)) {
        std::for_each(node->outputs().begin(), node->outputs().end(),
                      [this](const Value* output) { leave_out(output); });
      }
    } else {
      knows_all_ = false;
    }
  }
}

void StaticValues::visit_if(Node* node, bool certain) {
  const bool known = follows(node->input());
  for (Block* block : node->blocks()) {
    visit(block, certain && known);
  }
  for (size_t i = 0; i < node->outputs().size(); ++i) {
    if (!known || !follows(node->blocks()[0]->outputs()[i]) || !follows(node->blocks()[1]->outputs()[i])) {
      leave_out(node->output(i));
    }
  }
}

// prim::Loop(trips, condition, carried...) of a block (trip, carried...) -> (condition, carried...)
void StaticValues::visit_loop(Node* node, bool certain) {
  Block* body = node->blocks()[0];
  const bool known = follows(node->input(0)) && follows(node->input(1)) && follows(body->outputs()[0]);
  if (!known) {
    leave_out(body->inputs()[0]);
  }
  for (size_t i = 0; i < node->outputs().size(); ++i) {
    if (!known || !follows(node->input(i + 2)) || !follows(body->outputs()[i + 1])) {
      leave_out(body->inputs()[i + 1]);
      leave_out(node->output(i));
    }
  }
  visit(body, certain && known);
}

void StaticValues::visit_writes(const Node* node, bool certain) {
  if (node->kind() == c10::aten::wait) {  // in a function of its own it would hold on to its thread
    knows_all_ = false;
  }
  const auto* schema = node->maybeSchema();
  if (!schema) {
    static const Kinds kinds = {c10::prim::GetAttr, c10::prim::SetAttr, c10::prim::DictConstruct,
                                c10::prim::RaiseException};
    knows_all_ &= only_arranges(node) || kinds.count(node->kind()) != 0;
    return;
  }
  const bool ours = node->kind().is_aten() || node->kind().is_prim();
  for (size_t i = 0; i < schema->arguments().size() && i < node->inputs().size(); ++i) {
    if (!writes_to(schema->arguments()[i])) {
      continue;
    }
    const auto changes = [this](bool& what) { grew_ |= !std::exchange(what, true); };
    if (!is_container(node->input(i)->type())) {
      if (!(ours && i == 0 && is_in_place(node, *schema))) {
        changes(sizes_change_);
      }
    } else if (!writes_numbers(node)) {  // perhaps to the tensors in it
      changes(containers_change_);
      changes(sizes_change_);
    } else if (!(is_new_list(node->input(i)) && certain && inputs_follow(node))) {
      changes(containers_change_);
    }
  }
}

// `for_sizes`: only the sizes of the results are asked for.
bool StaticValues::inputs_follow(const Node* node, bool for_sizes) const {
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    if (!follows(node->input(i)) && !(for_sizes && is_no_matter_of_sizes(node, i))) {
      return false;
    }
  }
  return true;
}

bool StaticValues::outputs_follow(const Node* node) const {
  if (node->kind() == c10::prim::GetAttr) {
    const auto type = node->output()->type();
    return set_attributes_.count(node->s(c10::attr::name)) == 0 && follows(node->input()) &&
           path_of(node->output()) && (has_facts(type) || type->kind() == c10::TypeKind::ClassType);
  }
  if (any_tensors(node->outputs()) && !only_arranges(node)) {
    return sizes_follow(node) && inputs_follow(node, /*for_sizes=*/true);
  }
  if (!inputs_follow(node)) {
    return false;
  }
  if (only_arranges(node) || asks_for_none(node)) {
    return true;
  }
  if (any_tensors(node->inputs())) {
    return asks_sizes(node) || (asks_type(node) && path_of(node->input(0)));
  }
  return computes_numbers(node) || writes_numbers(node);
}

}  // namespace tsfuser
