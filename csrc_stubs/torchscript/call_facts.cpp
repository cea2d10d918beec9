#include "torchscript/call_facts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/static_values.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

constexpr size_t kMostWords = 1 << 11;  // of a call: longer lists are data, rather than facts

enum class Tag : int64_t { None, Bool, Int, Float, String, Device, Tensor, Items };

class Writer {
 public:
  Writer(CallFacts::Words& words, bool with_sizes) : words_(words), with_sizes_(with_sizes) {}

  bool add(const c10::IValue& value) {
    if (value.isTensor()) {
      return add_tensor(value.toTensor());
    }
    if (value.isInt() || value.isBool()) {
      return put(value.isInt() ? Tag::Int : Tag::Bool, value.isInt() ? value.toInt() : value.toBool());
    }
    if (value.isDouble()) {
      int64_t bits = 0;
      const double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      return put(Tag::Float, bits);
    }
    if (value.isNone()) {
      return put(Tag::None, 0);
    }
    if (value.isDevice()) {
      const c10::Device device = value.toDevice();
      return put(Tag::Device, static_cast<int64_t>(device.type()) << 32 | (device.index() & 0xff));
    }
    if (value.isString()) {
      const std::string& text = value.toStringRef();
      words_.insert(words_.end(), {static_cast<int64_t>(Tag::String), static_cast<int64_t>(text.size())});
      words_.insert(words_.end(), text.begin(), text.end());
      return words_.size() < kMostWords;
    }
    if (value.isList()) {
      return add_items(value.toListRef());
    }
    return value.isTuple() && add_items(value.toTupleRef().elements());
  }

 private:
  bool put(Tag tag, int64_t word) {
    words_.insert(words_.end(), {static_cast<int64_t>(tag), word});
    return words_.size() < kMostWords;
  }

  template <class List>
  bool add_items(const List& items) {
    return put(Tag::Items, static_cast<int64_t>(items.size())) &&
           std::all_of(items.begin(), items.end(), [this](const c10::IValue& item) { return add(item); });
  }

  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      return false;
    }
    const auto sizes = tensor.sizes();
    put(Tag::Tensor, static_cast<int64_t>(sizes.size()) << 24 |
                         static_cast<int64_t>(tensor.device().index() & 0xff) << 16 |
                         static_cast<int64_t>(tensor.scalar_type()) << 8 |
                         static_cast<int64_t>(tensor.device().type()));
    if (with_sizes_) {
      words_.insert(words_.end(), sizes.begin(), sizes.end());
    }
    return words_.size() < kMostWords;
  }

  CallFacts::Words& words_;
  const bool with_sizes_;
};

bool is_mask(const c10::IValue& index) {
  return index.isTensor() &&
         (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte);
}

// What a node asks about a tensor, where that is no length of a dim: how many dims there are, of which dtype
// it is, or whether there is one. Null for other nodes.
const Value* asked_without_sizes(const Node* node) {
  if (node->kind() == c10::aten::dim || asks_type(node)) {
    return node->input(0);
  }
  if (node->kind() == c10::aten::len) {
    const Node* sizes = node->input(0)->node();
    return sizes->kind() == c10::aten::size && sizes->inputs().size() == 1 ? sizes->input(0) : nullptr;
  }
  if (!asks_for_none(node)) {
    return nullptr;
  }
  return node->input(node->input(0)->type()->kind() == c10::TypeKind::NoneType ? 1 : 0);
}

// Goes back from values to the arguments that they depend on; of tensors, that their sizes depend on, or
// only how many dims they have.
class Sources {
 public:
  explicit Sources(torch::jit::Graph& graph) : graph_(graph) {}

  void add(const Value* value) {
    if (!seen_.insert(value).second) {
      return;
    }
    if (has_facts(value->type())) {
      if (const auto path = path_of(value)) {
        paths_.insert(*path);
        return;
      }
    }
    if (is_container(value->type())) {
      add_writes();
    }
    add_maker(value);
  }
  const std::set<AttributePath>& paths() const { return paths_; }
  const std::set<AttributePath>& paths_without_sizes() const { return ranks_; }
  std::vector<AttributePath> indices() const { return {indices_.begin(), indices_.end()}; }

 private:
  // Where lengths of dims are of no interest.
  void add_rank(const Value* value) {
    if (!ranked_.insert(value).second) {
      return;
    }
    if (const auto path = has_facts(value->type()) ? path_of(value) : std::nullopt) {
      ranks_.insert(*path);
      return;
    }
    const Node* node = value->node();
    const bool hands_on = node->kind() == c10::prim::unchecked_cast ||
                          node->kind() == c10::prim::unchecked_unwrap_optional || writes_in_place(node);
    if (hands_on) {
      add_rank(node->input(0));
    } else if (node->kind() == c10::prim::If) {
      add(node->input());
      for (const Block* block : node->blocks()) {
        add_rank(block->outputs()[value->offset()]);
      }
    } else if (value->offset() == 0 && op_facts().ranked.count(node->kind()) != 0) {
      for (const Value* input : node->inputs()) {
        if (may_hold_tensors(input->type())) {
          add_rank(input);
        }
      }
    } else {
      add(value);
    }
  }

  void add_maker(const Value* value) {
    const Node* node = value->node();
    if (const Value* tensor = asked_without_sizes(node)) {
      add_rank(tensor);
      return;
    }
    if (node->kind() == c10::prim::Param) {  // a loop's, which counts, or carries what its block gives
      if (const Node* loop = node->owningBlock()->owningNode()) {
        add_operands(loop, loop->inputs());
      }
      return;
    }
    for (const Value* index : indices_of(node)) {
      indices_.insert(*path_of(index));
    }
    const bool by_first =
        is_tensor(value) && value->offset() == 0 && op_facts().same_sizes.count(node->kind()) != 0;
    add_operands(node, by_first ? node->inputs().slice(0, 1) : node->inputs());
  }

  void add_operands(const Node* node, at::ArrayRef<const Value*> inputs) {
    for (const Value* input : inputs) {
      add(input);
    }
    for (const Block* block : node->blocks()) {
      for (const Value* output : block->outputs()) {
        add(output);
      }
    }
  }

  // What is written to lists, and whether: no list is followed through memory.
  void add_writes() {
    if (std::exchange(with_writes_, true)) {
      return;
    }
    for (const Node* node : all_nodes(graph_)) {
      const auto* schema = node->maybeSchema();
      if (!schema || !schema->is_mutable() || !is_container(node->input(0)->type())) {
        continue;
      }
      add_operands(node, node->inputs());
      for (; node; node = node->owningBlock()->owningNode()) {
        add_control(node);
      }
    }
  }

  // Whether, and how often, the blocks of the node run.
  void add_control(const Node* node) {
    if (node->kind() == c10::prim::If) {
      add(node->input());
    } else if (node->kind() == c10::prim::Loop) {
      add(node->input(0));
      add(node->input(1));
      add(node->blocks()[0]->outputs()[0]);
    }
  }

  torch::jit::Graph& graph_;
  std::set<const Value*> seen_, ranked_;
  std::set<AttributePath> paths_, ranks_, indices_;
  bool with_writes_ = false;
};

}  // namespace

const c10::IValue& value_at(const AttributePath& path, at::ArrayRef<c10::IValue> arguments) {
  const c10::IValue* value = &arguments[path.input];
  for (const size_t slot : path.slots) {
    value = &value->toObjectRef().getSlot(slot);
  }
  return *value;
}

bool may_hold_tensors(const c10::TypePtr& type) {
  const auto items = type->containedTypes();
  return type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::AnyType ||
         (type->kind() != c10::TypeKind::ClassType &&
          std::any_of(items.begin(), items.end(), may_hold_tensors));
}

bool is_container(const c10::TypePtr& type) {
  const auto items = type->containedTypes();  // of a module: the types of its attributes
  return type->kind() == c10::TypeKind::ListType || type->kind() == c10::TypeKind::DictType ||
         (type->kind() != c10::TypeKind::ClassType && std::any_of(items.begin(), items.end(), is_container));
}

bool has_facts(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::DeviceObjType: return true;
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
    case c10::TypeKind::TupleType: {
      const auto items = type->containedTypes();
      return std::all_of(items.begin(), items.end(), has_facts);
    }
    default: return false;
  }
}

std::optional<AttributePath> path_of(const Value* value) {
  const Node* node = value->node();
  if (node->kind() == c10::prim::Param && node->owningBlock() == value->owningGraph()->block()) {
    return AttributePath{value->offset(), {}};
  }
  if (node->kind() != c10::prim::GetAttr) {
    return std::nullopt;
  }
  const auto owner = node->input()->type()->cast<c10::ClassType>();
  auto path = owner ? path_of(node->input()) : std::nullopt;
  if (path) {
    path->slots.push_back(owner->getAttributeSlot(node->s(c10::attr::name)));
  }
  return path;
}

std::vector<const Value*> indices_of(const Node* node) {
  std::vector<const Value*> found;
  const Node* list =
      node->kind() == c10::aten::index && is_tensor(node->input(0)) ? node->input(1)->node() : nullptr;
  if (!list || list->kind() != c10::prim::ListConstruct) {
    return found;
  }
  for (const Value* index : list->inputs()) {
    if (!path_of(index)) {
      return {};
    }
    found.push_back(index);
  }
  return found;
}

CallFacts::CallFacts(torch::jit::Graph& graph, const std::vector<const Value*>& values) {
  Sources sources(graph);
  for (const Value* value : values) {
    sources.add(value);
  }
  for (const AttributePath& path : sources.paths()) {
    facts_.push_back({path, true});
  }
  for (const AttributePath& path : sources.paths_without_sizes()) {
    if (sources.paths().count(path) == 0) {
      facts_.push_back({path, false});
    }
  }
  indices_ = sources.indices();
}

bool CallFacts::has_sizes() const {
  return std::any_of(facts_.begin(), facts_.end(),
                     [](const Fact& fact) { return fact.with_sizes && fact.path.slots.empty(); });
}

bool CallFacts::read(at::ArrayRef<c10::IValue> arguments, Words& words) const {
  words.clear();
  return std::all_of(facts_.begin(), facts_.end(),
                     [&](const Fact& fact) {
                       return Writer(words, fact.with_sizes).add(value_at(fact.path, arguments));
                     }) &&
         std::none_of(indices_.begin(), indices_.end(),
                      [&](const AttributePath& path) { return is_mask(value_at(path, arguments)); });
}

}  // namespace tsfuser
