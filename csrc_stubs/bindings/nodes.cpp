// The questions about nodes, values and blocks that passes ask most often, each answered by one call
// (tsfuser/graph/wrapper.py says what each means). Torch's own bindings take several calls, and strings.

#include "torchscript/hooks.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind.h>  // a Node that is gone raises in Python
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
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

std::vector<Node*> nodes_in(Block& block) { return {block.nodes().begin(), block.nodes().end()}; }

// The block, and all blocks within, outer ones first.
std::vector<Block*> all_blocks(Block& block) {
  std::vector<Block*> found;
  for (std::vector<Block*> waiting{&block}; !waiting.empty();) {
    found.push_back(waiting.back());
    waiting.pop_back();
    const auto within = blocks_within(*found.back());
    waiting.insert(waiting.end(), within.begin(), within.end());
  }
  return found;
}

std::vector<Node*> all_nodes_in(Block& block) {
  std::vector<Node*> found;
  for (Block* inner : all_blocks(block)) {
    found.insert(found.end(), inner->nodes().begin(), inner->nodes().end());
  }
  return found;
}

std::vector<Node*> of_kinds(std::vector<Node*> nodes, const std::vector<std::string>& kinds) {
  const auto wanted = symbols(kinds);
  const auto rest = std::remove_if(nodes.begin(), nodes.end(),
                                   [&](const Node* node) { return wanted.count(node->kind()) == 0; });
  nodes.erase(rest, nodes.end());
  return nodes;
}

std::vector<Node*> nodes_of(Block& block, const std::vector<std::string>& kinds) {
  return of_kinds(nodes_in(block), kinds);
}

std::vector<Node*> all_nodes_of(Block& block, const std::vector<std::string>& kinds) {
  return of_kinds(all_nodes_in(block), kinds);
}

std::vector<Node*> nodes_with_blocks(Block& block) {
  std::vector<Node*> found;
  for (Node* node : block.nodes()) {
    if (!node->blocks().empty()) {
      found.push_back(node);
    }
  }
  return found;
}

// Whether it is no tensor, or one whose dtype, device and rank are known.
bool is_typed(const Value* value) {
  const auto* type = value->type()->castRaw<c10::TensorType>();
  return !type || (type->scalarType() && type->device() && type->dim());
}

std::vector<Node*> nodes_without_types(Block& block) {
  std::vector<Node*> found;
  for (Node* node : block.nodes()) {
    const auto results = node->outputs();
    if (node->hasUses() && !std::all_of(results.begin(), results.end(), is_typed)) {
      found.push_back(node);
    }
  }
  return found;
}

std::vector<Value*> used_outputs(Node& node) {
  std::vector<Value*> found;
  for (Value* value : node.outputs()) {
    const auto* type = value->type()->castRaw<c10::TensorType>();
    if (value->hasUses() && !(type && type->undefined().value_or(false))) {
      found.push_back(value);
    }
  }
  return found;
}

std::vector<size_t> ids(const std::vector<Value*>& values) {
  std::vector<size_t> found;
  found.reserve(values.size());
  for (const Value* value : values) {
    found.push_back(value->unique());
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
  const auto fits = [](const Value* item) { return is_tensor(item) || item->mustBeNone(); };
  return std::any_of(items.begin(), items.end(), is_tensor) && std::all_of(items.begin(), items.end(), fits);
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

// A graph with the arguments as its inputs, copies of the constants and of the nodes, which read nothing
// else, and the results as its outputs.
std::shared_ptr<Graph> subgraph(const std::vector<Node*>& nodes, const std::vector<Value*>& arguments,
                                const std::vector<Value*>& constants, const std::vector<Value*>& results) {
  const auto graph = std::make_shared<Graph>();
  std::unordered_map<const Value*, Value*> inner;
  const auto copy = [&](Node* node) {
    Node* made = graph->appendNode(graph->createClone(node, [&](Value* value) { return inner.at(value); }));
    for (size_t i = 0; i < node->outputs().size(); ++i) {
      inner[node->output(i)] = made->output(i);
    }
  };
  for (const Value* value : arguments) {
    inner[value] = graph->addInput()->setType(value->type());
  }
  for (Value* value : constants) {
    for (Value* item : value->node()->inputs()) {  // of a list
      if (inner.count(item) == 0) {
        copy(item->node());
      }
    }
    copy(value->node());
  }
  std::for_each(nodes.begin(), nodes.end(), copy);
  for (const Value* value : results) {
    graph->registerOutput(inner.at(value));
  }
  return graph;
}

// A binding of a question about a block; a graph stands for its top block.
template <class Answer, class... More>
void of_block(py::module_& m, const char* name, Answer (*ask)(Block&, More...)) {
  m.def(name, ask);
  m.def(name, [ask](Graph& graph, More... more) { return ask(*graph.block(), more...); });
}

}  // namespace

void bind_nodes(py::module_& m) {
  m.def("inputs", &inputs_of);
  m.def("outputs", &outputs_of);
  m.def("blocks", &blocks_of);
  m.def("graph_inputs", [](Graph& graph) { return graph.inputs().vec(); });
  m.def("graph_outputs", [](Graph& graph) { return graph.outputs().vec(); });
  m.def("used_outputs", &used_outputs);
  m.def("ids", &ids);
  m.def("subgraph", &subgraph);
  m.def("use_count", [](const Value& value) { return value.uses().size(); });
  of_block(m, "blocks_within", &blocks_within);
  of_block(m, "nodes_in", &nodes_in);
  of_block(m, "nodes_of", &nodes_of);
  of_block(m, "all_nodes", &all_nodes_in);
  of_block(m, "all_nodes_of", &all_nodes_of);
  of_block(m, "nodes_with_blocks", &nodes_with_blocks);
  of_block(m, "nodes_without_types", &nodes_without_types);
  m.def("is_tensor", [](const Value& value) { return is_tensor(&value); });
  m.def("is_plain_list", &is_plain_list);
  m.def("is_constant", &is_constant);
  m.def("is_tensor_list", &is_tensor_list);
  m.def("schema_key", &schema_key);
}

}  // namespace tsfuser
