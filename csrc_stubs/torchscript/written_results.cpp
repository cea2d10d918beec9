// Results of a differentiable graph that the program, or its caller, may write to before the backward; and
// its operands that neither can.
//
// In: the node of the graph, in the program's own graph, which torch has optimised. A result is not written
// to where all its readers make new tensors, as those of `relu6` here:
//
//     %y : Tensor = prim::If(%check)
//       block0(): %r : Tensor = prim::DifferentiableGraph_0(%x) -> (%r)
//       block1(): a call of the fallback, which computes the same
//     %z : Tensor = aten::conv2d(%y, ...)
//
// Checks hand their operands on, and so does another differentiable graph that returns one.

#include "torchscript/written_results.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Value;

// `around`: the differentiable graph that the value is in; null for the program's own graph.
bool may_be_written(const Value* value, const Node* around);

// Whether the reader writes to nothing, and may give the value itself or a view of it.
bool hands_on(const torch::jit::Use& use) {
  if (is_profile(use.user) || (use.offset == 0 && op_facts().handed_on.count(use.user->kind()) != 0)) {
    return true;
  }
  const auto* schema = use.user->maybeSchema();
  return schema && !schema->is_mutable() && !schema->is_vararg() &&
         use.offset < schema->arguments().size() && schema->arguments()[use.offset].alias_info();
}

bool may_write(const torch::jit::Use& use, const Node* around) {
  const Node& reader = *use.user;
  if (reader.kind() == c10::prim::Return) {
    const Node* owner = reader.owningBlock()->owningNode();
    if (owner) {
      return owner->kind() != c10::prim::If || may_be_written(owner->output(use.offset), around);
    }
    return !around || (use.offset < static_cast<size_t>(around->i(c10::attr::f_real_outputs)) &&
                       may_be_written(around->output(use.offset), nullptr));
  }
  if (is_gradient_check(&reader)) {
    return may_be_written(reader.output(use.offset), around);
  }
  if (reader.kind() == c10::prim::DifferentiableGraph && !around) {
    return may_be_written(reader.g(c10::attr::Subgraph)->inputs()[use.offset], &reader);
  }
  if (hands_on(use)) {
    const auto views = reader.outputs();
    return std::any_of(views.begin(), views.end(),
                       [around](const Value* view) { return may_be_written(view, around); });
  }
  return reader.kind() != c10::prim::Drop && reader.kind() != c10::prim::dtype && !is_fallback(&reader) &&
         !only_reads(reader);
}

bool may_be_written(const Value* value, const Node* around) {
  return std::any_of(value->uses().begin(), value->uses().end(),
                     [around](const torch::jit::Use& use) { return may_write(use, around); });
}

bool is_fresh_result(const Value* value) { return op_facts().fresh.count(value->node()->kind()) != 0; }

// Before checks of gradients, which hand their operands on.
const Value* before_checks(const Value* value) {
  while (is_gradient_check(value->node())) {
    value = value->node()->input(value->offset());
  }
  return value;
}

// Whether an op of the program has made the value, perhaps in another differentiable graph, and nobody may
// write to it.
bool is_own(const Value* value) {
  if (value->node()->kind() != c10::prim::If) {
    return is_fresh_result(value) && !may_be_written(value, nullptr);
  }
  // Of a checked differentiable graph: the other block calls a fallback, which computes the same.
  const Value* result = value->node()->blocks()[0]->outputs()[value->offset()];
  if (result->node()->kind() != c10::prim::DifferentiableGraph) {
    return false;
  }
  const Value* inner = result->node()->g(c10::attr::Subgraph)->outputs()[result->offset()];
  return is_fresh_result(inner) && !may_be_written(inner, result->node());
}

// Whether the program is given the value, or reads it from a module, and does not write to it.
bool is_given(const Value* value) {
  const auto kind = value->node()->kind();
  return (kind == c10::prim::Param || kind == c10::prim::GetAttr) && !may_be_written(value, nullptr);
}

std::vector<int64_t> inputs_that(bool (*holds)(const Value*), const Node& differentiable) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < differentiable.inputs().size(); ++i) {
    if (holds(before_checks(differentiable.input(i)))) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  return found;
}

}  // namespace

std::vector<int64_t> written_results(const Node& differentiable) {
  std::vector<int64_t> written;
  for (size_t i = 0; i < static_cast<size_t>(differentiable.i(c10::attr::f_real_outputs)); ++i) {
    if (may_be_written(differentiable.output(i), nullptr)) {
      written.push_back(static_cast<int64_t>(i));
    }
  }
  return written;
}

std::vector<int64_t> own_inputs(const Node& differentiable) { return inputs_that(is_own, differentiable); }

std::vector<int64_t> given_inputs(const Node& differentiable) {
  return inputs_that(is_given, differentiable);
}

}  // namespace tsfuser
