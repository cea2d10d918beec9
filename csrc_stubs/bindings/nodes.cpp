// The questions about nodes, values and blocks that passes ask most often, each answered by one call
// (tsfuser/graph/wrapper.py says what each means). Torch's own bindings take several calls, and strings.

#include "torchscript/hooks.h"
#include "torchscript/nodes.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

std::vector<Value*> inputs_of(Node& node) { return node.inputs().vec(); }

std::vector<Value*> outputs_of(Node& node) { return node.outputs().vec(); }

std::vector<Block*> blocks_of(Node& node) { return node.blocks().vec(); }

std::vector<Block*> blocks_within(Block& block) {
  std::vector<Block*> found;
  for (Node* node : block.nodes()) {
    found.insert(found.end(), node->blocks().begin(), node->blocks().end());
  }
  return found;
}

bool is_item(const c10::Type& type) {
  const auto kind = type.kind();
  return kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType ||
         kind == c10::TypeKind::BoolType;
}

bool is_plain_list(const Value& value) {
  const auto* list = value.type()->castRaw<c10::ListType>();
  return list && is_item(*list->getElementType());
}

bool is_plain(const Value& value) {
  switch (value.type()->kind()) {
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::DeviceObjType: return true;
    default: return is_item(*value.type()) || is_plain_list(value);
  }
}

bool is_constant(const Value& value) {
  const Node* node = value.node();
  if (node->kind() != c10::prim::ListConstruct) {
    return node->kind() == c10::prim::Constant && is_plain(value);
  }
  const auto items = node->inputs();
  return is_plain_list(value) && std::all_of(items.begin(), items.end(), [](const Value* item) {
           return item->node()->kind() == c10::prim::Constant;
         });
}

bool is_tensor_list(const Value& value) {
  const Node* node = value.node();
  if (node->kind() != c10::prim::ListConstruct || value.uses().size() != 1) {
    return false;
  }
  const auto items = node->inputs();
  return !items.empty() && std::all_of(items.begin(), items.end(), is_tensor);
}

// A number that stands for the op's schema, 0 for none that lists its arguments. None for ops that may be
// taken away: another's schema may follow in the place of theirs.
std::optional<uintptr_t> schema_key(const Node& node) {
  if (!node.kind().is_aten() && !node.kind().is_prim()) {
    return std::nullopt;
  }
  const auto* schema = node.maybeSchema();
  return schema && !schema->is_vararg() ? reinterpret_cast<uintptr_t>(schema) : 0;
}

}  // namespace

void bind_nodes(py::module_& m) {
  m.def("inputs", &inputs_of);
  m.def("outputs", &outputs_of);
  m.def("blocks", &blocks_of);
  m.def("blocks_within", &blocks_within);
  m.def("blocks_within", [](torch::jit::Graph& graph) { return blocks_within(*graph.block()); });
  m.def("is_tensor", [](const Value& value) { return is_tensor(&value); });
  m.def("is_plain_list", &is_plain_list);
  m.def("is_constant", &is_constant);
  m.def("is_tensor_list", &is_tensor_list);
  m.def("schema_key", &schema_key);
}

}  // namespace tsfuser
