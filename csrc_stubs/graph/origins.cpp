#include "graph/origins.h"

#include <torch/csrc/jit/ir/scope.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::AttributeKind;
using torch::jit::Node;

constexpr size_t kLargestConstant = 4096;  // bytes

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

// Types that are written by what they are.
bool is_plain(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::ComplexType: return true;
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType: return is_plain(*type.containedTypes()[0]);
    case c10::TypeKind::TupleType: {
      const auto items = type.containedTypes();
      return !type.expectRef<c10::TupleType>().schema() &&
             std::all_of(items.begin(), items.end(), [](const auto& item) { return is_plain(*item); });
    }
    default: return false;
  }
}

const void* place_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

template <typename Map, typename Key>
int64_t found(const Map& map, const Key& key, const char* what) {
  const auto place = map.find(key);
  if (place == map.end()) {
    refuse(std::string("a pass has made ") + what);
  }
  return place->second;
}

std::tuple<const void*, size_t, size_t> key_of(const torch::jit::SourceRange& range) {
  return {range.source().get(), range.start(), range.end()};
}

const void* key_of(const std::optional<torch::jit::InlinedCallStackPtr>& stack) {
  return stack ? stack->get() : nullptr;
}

// Null where it has no name.
torch::jit::ScopePtr scope_of(const Node& node) {
  const auto scope = const_cast<Node&>(node).scope();  // which torch does not offer of a const Node
  return scope && !scope->isBlank() ? scope : nullptr;
}

// Without the numbers by which this process tells classes of one name apart.
std::string without_numbers(std::string text) {
  static const std::string mark = "___torch_mangle_";  // and the number, a part of the name
  for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
    const size_t end = text.find_first_not_of("0123456789.", at + mark.size());
    text.erase(at, (end == std::string::npos ? text.size() : end) - at);
  }
  return text;
}

// What a name says besides what the program calls a value (tsfuser/joint/names.py), a bit each.
int64_t marks_of(const std::string& name) {
  int64_t found = 0, bit = 1;
  for (const char* mark : {".written", ".laid_out", ".joint_part"}) {
    found |= name.find(mark) != std::string::npos ? bit : 0;
    bit <<= 1;
  }
  return found;
}

IValue facts_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
      tensor.is_quantized() || tensor.is_conj() || tensor.is_neg() || tensor.is_nested() ||
      tensor.key_set().has(c10::DispatchKey::Python) || tensor.nbytes() > kLargestConstant) {
    refuse("a constant is large, or no plain tensor of the CPU");
  }
  const at::Tensor whole = tensor.detach().contiguous();
  const auto* bytes = static_cast<const char*>(whole.const_data_ptr());
  return tuple({std::string(c10::toString(tensor.scalar_type())), tensor.sizes().vec(),
                tensor.strides().vec(), tensor.storage_offset(), tensor.requires_grad(),
                tensor.unsafeGetTensorImpl()->is_wrapped_number(), std::string(bytes, whole.nbytes())});
}

IValue facts_of(const c10::FunctionSchema& schema, c10::AliasAnalysisKind kind) {
  return tuple({c10::toString(schema), static_cast<int64_t>(kind)});
}

}  // namespace

Origins::Origins(const Graphs& graphs) {
  for (const auto& graph : graphs) {
    add(*graph);
  }
}

void Origins::add(const torch::jit::Graph& graph) { add(*graph.block()); }

void Origins::add(const torch::jit::Block& block) {
  for (const torch::jit::Value* value : block.inputs()) {
    add(*value);
  }
  for (const Node* node : block.nodes()) {
    add(*node);
  }
}

void Origins::add(const Node& node) {
  const auto number = static_cast<int64_t>(nodes_.size());
  nodes_.push_back(&node);
  ranges_.emplace(key_of(node.sourceRange()), number);
  stacks_.emplace(key_of(node.callstack()), number);
  if (const auto scope = scope_of(node)) {
    scopes_.emplace(scope.get(), number);
  }
  for (const torch::jit::Value* value : node.outputs()) {
    add(*value);
  }
  for (const c10::Symbol name : node.attributeNames()) {
    if (node.kindOf(name) == AttributeKind::g) {
      add(*node.g(name));
    } else if (node.kindOf(name) == AttributeKind::gs) {
      for (const auto& graph : node.gs(name)) {
        add(*graph);
      }
    } else if (node.kindOf(name) == AttributeKind::ty) {
      add(node.ty(name));
    } else if (node.kindOf(name) == AttributeKind::tys) {
      for (const c10::TypePtr& type : node.tys(name)) {
        add(type);
      }
    } else if (node.kindOf(name) == AttributeKind::t) {
      add(node.t(name));
    }
  }
  for (const torch::jit::Block* block : node.blocks()) {
    add(*block);
  }
}

void Origins::add(const torch::jit::Value& value) {
  add(value.type());
  if (value.hasDebugName() && numbers_of_names_.emplace(value.debugName(), names_.size()).second) {
    names_.push_back(value.debugName());
  }
}

// With the types of attributes: memory is looked for in them.
void Origins::add(const c10::TypePtr& type) {
  if (!is_plain(*type) && types_by_place_.emplace(type.get(), types_.size()).second) {
    types_.push_back(type);
    for (const c10::TypePtr& inner : type->containedTypes()) {
      add(inner);
    }
  }
}

void Origins::add(const at::Tensor& tensor) {
  if (tensors_by_place_.emplace(place_of(tensor), tensors_.size()).second) {
    tensors_.push_back(tensor);
  }
}

IValue Origins::write_place(const Node& node) const {
  const int64_t range =
      node.sourceRange().source() ? found(ranges_, key_of(node.sourceRange()), "a line of source") : -1;
  const int64_t stack = node.callstack() ? found(stacks_, key_of(node.callstack()), "a call stack") : -1;
  const auto own = scope_of(node);
  const int64_t scope = own ? found(scopes_, static_cast<const void*>(own.get()), "a scope") : -1;
  return tuple({range, stack, scope});
}

void Origins::read_place(Node& node, const IValue& written) const {
  const auto numbers = elements(written);
  const auto origin = [&](size_t i) -> const Node* {
    const int64_t number = numbers.at(i).toInt();
    return number < 0 ? nullptr : nodes_.at(static_cast<size_t>(number));
  };
  if (const Node* same = origin(0)) {
    node.setSourceRange(same->sourceRange());
  }
  if (const Node* same = origin(1)) {
    if (same->callstack()) {
      node.setCallStack(*same->callstack());
    }
  }
  if (const Node* same = origin(2)) {
    node.setScope(scope_of(*same));
  }
}

IValue Origins::write_name(const torch::jit::Value& value) const {
  if (!value.hasDebugName()) {
    return {};
  }
  const std::string name = value.debugName();
  for (size_t end = name.size(); end != std::string::npos && end != 0; end = name.rfind('.', end - 1)) {
    const auto known = numbers_of_names_.find(name.substr(0, end));
    if (known != numbers_of_names_.end()) {
      return tuple({known->second, name.substr(end)});
    }
  }
  return name;
}

void Origins::read_name(torch::jit::Value& value, const IValue& written) const {
  if (written.isString()) {
    value.setDebugName(written.toStringRef());
  } else if (!written.isNone()) {
    const auto parts = elements(written);
    value.setDebugName(names_.at(static_cast<size_t>(parts.at(0).toInt())) + parts.at(1).toStringRef());
  }
}

IValue Origins::write_type(const c10::TypePtr& type) const {
  return is_plain(*type) ? tsfuser::write_type(type)
                         : found(types_by_place_, static_cast<const void*>(type.get()), "a type");
}

c10::TypePtr Origins::read_type(const IValue& written) const {
  return written.isInt() ? types_.at(static_cast<size_t>(written.toInt())) : tsfuser::read_type(written);
}

IValue Origins::write_tensor(const at::Tensor& tensor) const {
  return found(tensors_by_place_, place_of(tensor), "a constant tensor");
}

const at::Tensor& Origins::read_tensor(const IValue& written) const {
  return tensors_.at(static_cast<size_t>(written.toInt()));
}

IValue Origins::facts() const {
  Items types, tensors, marks, schemas;
  for (const c10::TypePtr& type : types_) {
    Items contained{static_cast<int64_t>(type->kind()), without_numbers(type->str())};
    if (const auto own = type->cast<c10::ClassType>()) {
      for (size_t i = 0; i < own->numAttributes(); ++i) {
        contained.emplace_back(own->getAttributeName(i));
      }
    }
    for (const c10::TypePtr& inner : type->containedTypes()) {
      contained.push_back(write_type(inner));
    }
    types.push_back(tuple(std::move(contained)));
  }
  for (const at::Tensor& tensor : tensors_) {
    tensors.push_back(facts_of(tensor));
  }
  for (size_t i = 0; i < names_.size(); ++i) {  // by which values are written, so which ones are marked
    if (const int64_t found = marks_of(names_[i])) {
      marks.push_back(tuple({static_cast<int64_t>(i), found}));
    }
  }
  std::set<const torch::jit::Operator*> seen;
  for (const Node* node : nodes_) {
    if (node->kind() == c10::prim::PythonOp) {
      refuse("it calls a function of Python");
    }
    const torch::jit::Operator* op = node->maybeOperator();
    if (op && seen.insert(op).second) {
      schemas.push_back(facts_of(op->schema(), op->aliasAnalysisKind()));
    }
  }
  return tuple({tuple(std::move(types)), tuple(std::move(tensors)), tuple(std::move(marks)),
                tuple(std::move(schemas))});
}

}  // namespace tsfuser
