// Results of a differentiable graph that no gradient ever comes for.
//
// Eager's backward of `y = torch.where(mask, x * 2, 0); return y.sin() > 0, x * 2` never reaches `where`, so
// a program may write to the mask before it. The backward of a differentiable graph reads all that is kept
// for any of its results, wherever gradients come from. So the gradients of such results are taken out of it
// (tsfuser/frontends/torchscript/training/saved.py), and with them what is kept for them alone.

#include "torchscript/idle_results.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/twins.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <string>
#include <unordered_map>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Value;

// The kind whose twin it is, or itself.
c10::Symbol plain_kind(c10::Symbol kind) {
  static const auto* originals = [] {
    auto* found = new std::unordered_map<c10::Symbol, c10::Symbol>;
    for (const auto& [twin, original] : twins()) {
      found->emplace(c10::Symbol::fromQualString(twin), c10::Symbol::fromQualString(original));
    }
    return found;
  }();
  const auto found = originals->find(kind);
  return found == originals->end() ? kind : found->second;
}

bool is_plain(const c10::TypePtr& type) {
  static const std::unordered_set<c10::TypeKind> kinds = {
      c10::TypeKind::BoolType,   c10::TypeKind::IntType,    c10::TypeKind::FloatType,
      c10::TypeKind::NumberType, c10::TypeKind::StringType, c10::TypeKind::DeviceObjType,
      c10::TypeKind::NoneType,   c10::TypeKind::ComplexType};
  if (const auto list = type->cast<c10::ListType>()) {
    return is_plain(list->getElementType());
  }
  return kinds.count(type->kind()) != 0;
}

// Whether the reader asks whether a tensor has a history, rather than for what is in it.
bool asks_for_history(const Node& reader) {
  static const Kinds kinds = symbols({"prim::requires_grad", "prim::is_leaf", "aten::is_leaf",
                                      "aten::requires_grad", "aten::retains_grad", "aten::output_nr"});
  return kinds.count(reader.kind()) != 0;
}

// Whether the reader gives its operand without a history.
bool detaches(const Node& reader) {
  static const Kinds kinds = symbols({"aten::detach", "prim::data"});
  return kinds.count(reader.kind()) != 0;
}

// Whether all of the reader's results that are read are integers: their dtype is given, or they say where
// elements are, as those of `max(y, 0)[1]`.
bool gives_integers(const Node& reader, const c10::FunctionSchema& schema) {
  if (!reader.kind().is_aten() || schema.is_mutable()) {  // what it writes may be read elsewhere
    return false;
  }
  if (const auto place = schema.argumentIndexWithName("dtype")) {
    const auto dtype = known_int(reader.input(*place));
    return dtype && c10::isIntegralType(static_cast<at::ScalarType>(*dtype), /*includeBool=*/true);
  }
  bool any = false;
  for (size_t i = 0; i < reader.outputs().size(); ++i) {
    const auto& uses = reader.output(i)->uses();
    const bool is_read = std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
      return use.user->kind() != c10::prim::Drop;
    });
    if (is_read && schema.returns()[i].name() != "indices") {
      return false;
    }
    any |= is_read;
  }
  return any;
}

// Which results get a gradient, each asked once.
class Gradients {
 public:
  bool come_for(const Value* value) {
    const auto [place, is_new] = found_.emplace(value, true);
    if (is_new) {
      const auto& uses = value->uses();
      const bool come = std::any_of(uses.begin(), uses.end(), [this](const auto& use) { return pass(use); });
      found_[value] = come;
      return come;
    }
    return place->second;
  }

 private:
  // Whether the reader may pass a gradient on to what it reads.
  bool pass(const torch::jit::Use& use) {
    const Node& reader = *use.user;
    if (reader.kind() == c10::prim::Drop) {
      return false;
    }
    if (reader.kind() == c10::prim::Return) {
      const Node* around = reader.owningBlock()->owningNode();
      return !around || around->kind() != c10::prim::If || come_for(around->output(use.offset));
    }
    if (is_gradient_check(&reader)) {
      return come_for(reader.output(use.offset));
    }
    if (reader.kind() == c10::prim::DifferentiableGraph || reader.kind() == c10::prim::TupleUnpack ||
        is_fallback(&reader)) {
      return come_for_any_of(reader);
    }
    const auto* schema = reader.maybeSchema();
    if (!schema || schema->is_vararg() || schema->is_varret() || use.offset >= schema->arguments().size() ||
        asks_for_history(reader)) {
      return true;
    }
    if (detaches(reader) || gives_integers(reader, *schema)) {
      return false;
    }
    const c10::Argument& argument = schema->arguments()[use.offset];
    if (argument.alias_info()) {
      return true;
    }
    const c10::Symbol kind = plain_kind(reader.kind());
    const auto asked = op_facts().asked.find(kind);
    if (op_facts().flat.count(kind) ||
        (asked != op_facts().asked.end() && asked->second == argument.name())) {
      return false;
    }
    // What an op writes to may be read elsewhere, and what gives nothing may keep what it reads.
    return schema->is_mutable() || reader.outputs().empty() || !is_known(&reader) || come_for_any_of(reader);
  }

  bool come_for_any_of(const Node& reader) {
    const auto outputs = reader.outputs();
    return std::any_of(outputs.begin(), outputs.end(),
                       [this](const Value* value) { return !is_plain(value->type()) && come_for(value); });
  }

  std::unordered_map<const Value*, bool> found_;
};

}  // namespace

std::vector<int64_t> idle_results(const Node& differentiable) {
  std::vector<int64_t> idle;
  Gradients gradients;
  for (size_t i = 0; i < static_cast<size_t>(differentiable.i(c10::attr::f_real_outputs)); ++i) {
    if (!gradients.come_for(differentiable.output(i))) {
      idle.push_back(static_cast<int64_t>(i));
    }
  }
  return idle;
}

}  // namespace tsfuser
