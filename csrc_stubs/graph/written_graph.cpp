#include "graph/written_graph.h"

#include "graph/origins.h"
#include "graph/places.h"
#include "graph/written_types.h"
#include "group/group.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::AttributeKind;
using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

template <typename T>
IValue list(const T& values) {
  Items found;
  for (const auto& value : values) {
    found.emplace_back(value);
  }
  return tuple(std::move(found));
}

template <typename T>
std::vector<T> read_list(const IValue& value) {
  std::vector<T> found;
  for (const IValue& item : elements(value)) {
    found.push_back(item.to<T>());
  }
  return found;
}

// With what torch does not pickle: whether it stands for a number of Python, which changes no dtype.
IValue write_tensor(const at::Tensor& tensor, const Origins* origins) {
  if (origins) {
    return origins->write_tensor(tensor);
  }
  return tuple({tensor, tensor.unsafeGetTensorImpl()->is_wrapped_number()});
}

at::Tensor read_tensor(const IValue& value, const Origins* origins) {
  if (origins) {
    return origins->read_tensor(value);
  }
  const auto written = elements(value);
  at::Tensor tensor = written.at(0).toTensor();
  if (written.at(1).toBool()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

// Throws for what is an object of this process.
IValue check_constant(const IValue& value) {
  if (value.isList()) {
    for (const IValue& item : value.toListRef()) {
      check_constant(item);
    }
  } else if (value.isTuple()) {
    for (const IValue& item : value.toTupleRef().elements()) {
      check_constant(item);
    }
  } else if (!value.isNone() && !value.isInt() && !value.isDouble() && !value.isBool() &&
             !value.isString() && !value.isDevice() && !value.isComplexDouble()) {
    throw std::invalid_argument("a constant is an object");
  }
  return value;
}

IValue write_type(const c10::TypePtr& type, const Origins* origins) {
  return origins ? origins->write_type(type) : tsfuser::write_type(type);
}

c10::TypePtr read_type(const IValue& value, const Origins* origins) {
  return origins ? origins->read_type(value) : tsfuser::read_type(value);
}

IValue write_whole(const Graph& graph, const Origins* origins);
std::shared_ptr<Graph> read_whole(const IValue& written, const Origins* origins);

const auto kCacheId = c10::Symbol::attr("cache_id");

IValue write_attribute(const Node& node, c10::Symbol name, const Origins* origins) {
  if (name == kCacheId) {  // a number of this process
    return group_of(&node)->text;
  }
  if (name == torch::jit::attr::Subgraph && node.hasAttribute(kCacheId) && !origins) {
    return write_whole(*group_of(&node)->graph,
                       nullptr);  // with types, which the node's own one may have lost
  }
  switch (node.kindOf(name)) {
    case AttributeKind::f: return node.f(name);
    case AttributeKind::fs: return list(node.fs(name));
    case AttributeKind::c: return node.c(name);
    case AttributeKind::cs: return list(node.cs(name));
    case AttributeKind::i: return node.i(name);
    case AttributeKind::is: return list(node.is(name));
    case AttributeKind::s: return node.s(name);
    case AttributeKind::ss: return list(node.ss(name));
    case AttributeKind::t: return write_tensor(node.t(name), origins);
    case AttributeKind::g: return write_whole(*node.g(name), origins);
    case AttributeKind::gs: {
      Items graphs;
      for (const auto& graph : node.gs(name)) {
        graphs.push_back(write_whole(*graph, origins));
      }
      return tuple(std::move(graphs));
    }
    case AttributeKind::ty: return write_type(node.ty(name), origins);
    case AttributeKind::tys: {
      Items types;
      for (const c10::TypePtr& type : node.tys(name)) {
        types.push_back(write_type(type, origins));
      }
      return tuple(std::move(types));
    }
    case AttributeKind::ival: return origins ? check_constant(node.ival(name)) : node.ival(name);
    default:
      throw std::invalid_argument(std::string("the attribute ") + name.toUnqualString() + " of " +
                                  node.kind().toQualString() + " cannot be stored");
  }
}

void read_attribute(Node& node, c10::Symbol name, AttributeKind kind, const IValue& value,
                    const Origins* origins) {
  if (name == kCacheId) {
    node.i_(name, group_by_text(node.g(torch::jit::attr::Subgraph), value.toStringRef())->id);
    return;
  }
  switch (kind) {
    case AttributeKind::f: node.f_(name, value.toDouble()); return;
    case AttributeKind::fs: node.fs_(name, read_list<double>(value)); return;
    case AttributeKind::c: node.c_(name, value.toComplexDouble()); return;
    case AttributeKind::cs: node.cs_(name, read_list<c10::complex<double>>(value)); return;
    case AttributeKind::i: node.i_(name, value.toInt()); return;
    case AttributeKind::is: node.is_(name, read_list<int64_t>(value)); return;
    case AttributeKind::s: node.s_(name, value.toStringRef()); return;
    case AttributeKind::ss: node.ss_(name, read_list<std::string>(value)); return;
    case AttributeKind::t: node.t_(name, read_tensor(value, origins)); return;
    case AttributeKind::g: node.g_(name, read_whole(value, origins)); return;
    case AttributeKind::gs: {
      std::vector<std::shared_ptr<Graph>> graphs;
      for (const IValue& graph : elements(value)) {
        graphs.push_back(read_whole(graph, origins));
      }
      node.gs_(name, std::move(graphs));
      return;
    }
    case AttributeKind::ty: node.ty_(name, read_type(value, origins)); return;
    case AttributeKind::tys: {
      std::vector<c10::TypePtr> types;
      for (const IValue& type : elements(value)) {
        types.push_back(read_type(type, origins));
      }
      node.tys_(name, std::move(types));
      return;
    }
    case AttributeKind::ival: node.ival_(name, value); return;
    default:
      throw std::invalid_argument("this is no stored graph: an attribute of a kind that is not stored");
  }
}

// The line of source that the node stands for.
IValue write_place(const Node& node) {
  const std::vector<Frame> found = frames(node);
  if (found.empty()) {
    return {};
  }
  const auto& [file, line, column, text] = found.front();
  return tuple({file, static_cast<int64_t>(line), text});
}

void read_place(Node& node, const IValue& value) {
  if (!value.isNone()) {
    const auto written = elements(value);
    set_place(node, written.at(0).toStringRef(), static_cast<size_t>(written.at(1).toInt()),
              written.at(2).toStringRef());
  }
}

class Writer {
 public:
  explicit Writer(const Origins* origins) : origins_(origins) {}

  IValue block(at::ArrayRef<const Value*> inputs, torch::jit::const_graph_node_list nodes,
               at::ArrayRef<const Value*> outputs) {
    Items written;
    IValue made_inputs = values(inputs);
    for (const Node* node : nodes) {
      written.push_back(this->node(*node));
    }
    return tuple({std::move(made_inputs), tuple(std::move(written)), numbers(outputs)});
  }

 private:
  IValue node(const Node& node) {
    IValue inputs = numbers(node.inputs());
    Items attributes, blocks;
    // The subgraph comes first: the group's number is found by it.
    std::vector<c10::Symbol> names = node.attributeNames();
    std::stable_partition(names.begin(), names.end(), [](c10::Symbol name) { return name != kCacheId; });
    for (const c10::Symbol name : names) {
      attributes.push_back(
          tuple({std::string(name.toUnqualString()), static_cast<int64_t>(node.kindOf(name)),
                 write_attribute(node, name, origins_)}));
    }
    for (const Block* block : node.blocks()) {
      blocks.push_back(this->block(block->inputs(), block->nodes(), block->outputs()));
    }
    return tuple({std::string(node.kind().toQualString()), std::move(inputs), values(node.outputs()),
                  tuple(std::move(attributes)), tuple(std::move(blocks)),
                  origins_ ? origins_->write_place(node) : write_place(node)});
  }

  // New values, which get the next numbers.
  IValue values(at::ArrayRef<const Value*> made) {
    Items found;
    for (const Value* value : made) {
      numbers_.emplace(value, static_cast<int64_t>(numbers_.size()));
      found.push_back(tuple({write_type(value->type(), origins_), write_name(*value)}));
    }
    return tuple(std::move(found));
  }

  IValue write_name(const Value& value) const {
    if (origins_) {
      return origins_->write_name(value);
    }
    return value.hasDebugName() ? value.debugName() : std::string();
  }

  IValue numbers(at::ArrayRef<const Value*> used) const {
    Items found;
    for (const Value* value : used) {
      found.emplace_back(numbers_.at(value));
    }
    return tuple(std::move(found));
  }

  const Origins* origins_;
  std::unordered_map<const Value*, int64_t> numbers_;
};

class Reader {
 public:
  Reader(Graph& graph, const Origins* origins) : graph_(graph), origins_(origins) {}

  void block(Block& block, const IValue& value) {
    const auto written = elements(value);
    for (const IValue& input : elements(written.at(0))) {
      made(*block.addInput(), input);
    }
    for (const IValue& node : elements(written.at(1))) {
      this->node(block, elements(node));
    }
    for (Value* output : used(written.at(2))) {
      block.registerOutput(output);
    }
  }

 private:
  void node(Block& block, c10::ArrayRef<IValue> written) {
    const auto outputs = elements(written.at(2));
    const auto kind = c10::Symbol::fromQualString(written.at(0).toStringRef());
    if (kind == c10::prim::profile || kind == c10::prim::profile_ivalue || kind == c10::prim::PythonOp) {
      throw std::invalid_argument("a node holds a function of this process");
    }
    Node* node = graph_.create(kind, used(written.at(1)), outputs.size());
    block.appendNode(node);
    for (const IValue& value : elements(written.at(3))) {
      const auto attribute = elements(value);
      read_attribute(*node, c10::Symbol::attr(attribute.at(0).toStringRef()),
                     static_cast<AttributeKind>(attribute.at(1).toInt()), attribute.at(2), origins_);
    }
    for (const IValue& inner : elements(written.at(4))) {
      this->block(*node->addBlock(), inner);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      made(*node->outputs()[i], outputs[i]);
    }
    origins_ ? origins_->read_place(*node, written.at(5)) : read_place(*node, written.at(5));
  }

  void made(Value& value, const IValue& written) {
    const auto parts = elements(written);
    value.setType(read_type(parts.at(0), origins_));
    if (origins_) {
      origins_->read_name(value, parts.at(1));
    } else if (!parts.at(1).toStringRef().empty()) {
      value.setDebugName(parts.at(1).toStringRef());
    }
    values_.push_back(&value);
  }

  std::vector<Value*> used(const IValue& written) const {
    std::vector<Value*> found;
    for (const IValue& number : elements(written)) {
      found.push_back(values_.at(static_cast<size_t>(number.toInt())));
    }
    return found;
  }

  Graph& graph_;
  const Origins* origins_;
  std::vector<Value*> values_;  // by number
};

IValue write_whole(const Graph& graph, const Origins* origins) {
  return Writer(origins).block(graph.inputs(), graph.nodes(), graph.outputs());
}

std::shared_ptr<Graph> read_whole(const IValue& written, const Origins* origins) {
  auto graph = std::make_shared<Graph>();
  Reader(*graph, origins).block(*graph->block(), written);
  return graph;
}

std::string bytes_of(const IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  return {bytes.begin(), bytes.end()};
}

// Without tensors.
std::string pickled(const IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle(value);
  return {bytes.begin(), bytes.end()};
}

IValue write_all(const Graphs& graphs, const Origins& origins) {
  Items written;
  for (const auto& graph : graphs) {
    written.push_back(write_whole(*graph, &origins));
  }
  return tuple(std::move(written));
}

}  // namespace

std::string write_graph(const std::shared_ptr<Graph>& graph) {
  std::string bytes = bytes_of(write_whole(*graph, nullptr));
  if (bytes_of(write_whole(*read_graph(bytes), nullptr)) != bytes) {
    throw std::invalid_argument("the graph would not come back as it is");
  }
  return bytes;
}

std::shared_ptr<Graph> read_graph(const std::string& bytes) {
  return read_whole(torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end())), nullptr);
}

std::string graphs_text(const Graphs& graphs) {
  const Origins origins(graphs);
  return pickled(tuple({origins.facts(), write_all(graphs, origins)}));
}

std::string write_made(const Graphs& made, const Graphs& origins) {
  std::string bytes = pickled(write_all(made, Origins(origins)));
  if (pickled(write_all(read_made(bytes, origins), Origins(origins))) != bytes) {
    throw std::invalid_argument("the graphs would not come back as they are");
  }
  return bytes;
}

Graphs read_made(const std::string& bytes, const Graphs& origins) {
  const Origins known(origins);
  Graphs made;
  const IValue all = torch::jit::unpickle(bytes.data(), bytes.size());
  for (const IValue& written : elements(all)) {
    made.push_back(read_whole(written, &known));
  }
  return made;
}

}  // namespace tsfuser
