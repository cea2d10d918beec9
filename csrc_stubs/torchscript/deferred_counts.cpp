// Additions to counters of modules are done together, at the end of the program. Before:
//
//     %on : bool = prim::GetAttr[name="training"](%norm)
//      = prim::If(%on)
//       block0():
//         %n : Tensor = prim::GetAttr[name="num_batches_tracked"](%norm);  %s = aten::add_(%n, 1, 1)  -> ()
//
// After (the If stays, but writes to a tensor without elements):
//
//     %c0 : Capsule = tsfuser::counts(%x)                                   the program's arguments
//     %m : Tensor = prim::GetAttr[name="num_batches_tracked"](%norm);  %c1 = tsfuser::count(%c0, %m, 1, %on)
//     ...
//     tsfuser::add_counts(%c1)                                              at the end
//
// Where that is in a branch of another If, the If gives the capsule on: each of its blocks returns one.
// So 53 batch norms on a GPU launch one kernel for their counters, and on a CPU none. This is done only if
// nothing in the graph can read a counter: `may_defer`. It is a step of prepare.cpp.

#include "torchscript/call_facts.h"
#include "torchscript/counts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// aten::add_(%counter, number, 1) of a module's tensor, the result of which nobody reads
bool is_count(const Node* node) {
  return node->kind() == c10::aten::add_ && node->inputs().size() == 3 && !node->hasUses() &&
         node->input(0)->node()->kind() == c10::prim::GetAttr && is_tensor(node->input(0)) &&
         known_int(node->input(1)) && known_int(node->input(2)) == 1;
}

// The Ifs around the node, the innermost first; nothing where it is in something else than Ifs.
std::optional<std::vector<Node*>> ifs_around(const Node* node) {
  std::vector<Node*> found;
  const Block* graph = node->owningGraph()->block();
  for (const Block* block = node->owningBlock(); block != graph; block = found.back()->owningBlock()) {
    if (block->owningNode()->kind() != c10::prim::If) {
      return std::nullopt;
    }
    found.push_back(const_cast<Node*>(block->owningNode()));
  }
  return found;
}

// A node that adds to a counter. `choice`: the If by whose condition it runs, if the counter can be read
// before that; else null. `around`: the other Ifs around it.
struct CountNode {
  Node* node;
  Node* choice;
  std::vector<Node*> around;

  Node* place() const { return choice ? choice : node; }  // before which it is counted
};

bool is_made_outside(const Value* value, const Node* choice) {
  const Block* made = value->node()->owningBlock();
  const Block* block = choice->owningBlock();
  while (block != made && block->owningNode() && block->owningNode()->owningBlock()) {
    block = block->owningNode()->owningBlock();
  }
  return block == made;
}

// Whether nothing before the node, in its block, raises an error.
bool comes_first(const Node* node) {
  for (const Node* before : node->owningBlock()->nodes()) {
    if (before == node) {
      return true;
    }
    if (before->kind() != c10::prim::Constant && before->kind() != c10::prim::GetAttr && !is_count(before)) {
      return false;
    }
  }
  return false;
}

std::vector<CountNode> counts_in(const std::vector<Node*>& nodes) {
  std::vector<CountNode> found;
  for (Node* node : nodes) {
    auto around = is_count(node) ? ifs_around(node) : std::nullopt;
    if (!around) {
      continue;
    }
    Node* choice = around->empty() ? nullptr : around->front();
    const bool before = choice && choice->blocks()[0] == node->owningBlock() && comes_first(node) &&
                        is_made_outside(node->input(0)->node()->input(), choice);
    if (before) {
      around->erase(around->begin());
    }
    found.push_back({node, before ? choice : nullptr, std::move(*around)});
  }
  return found;
}

// Whether both are the same attributes of the same module.
bool is_same(const Value* one, const Value* other) {
  const Node *a = one->node(), *b = other->node();
  return one == other || (a->kind() == c10::prim::GetAttr && b->kind() == c10::prim::GetAttr &&
                          a->s(c10::attr::name) == b->s(c10::attr::name) && is_same(a->input(), b->input()));
}

// Whether they are in different blocks of an If.
bool exclude_each_other(const Node* one, const Node* other) {
  for (const Block* a = one->owningBlock(); a->owningNode(); a = a->owningNode()->owningBlock()) {
    for (const Block* b = other->owningBlock(); b->owningNode(); b = b->owningNode()->owningBlock()) {
      if (a != b && a->owningNode() == b->owningNode()) {
        return true;
      }
    }
  }
  return false;
}

// Counters that are added to twice stay where they are. For torch a batch norm writes to no statistics:
// only its counter keeps two calls of one module in order.
void drop_repeated(std::vector<CountNode>& counts) {
  const std::vector<CountNode> all = counts;
  const auto is_repeated = [&all](const CountNode& count) {
    return std::any_of(all.begin(), all.end(), [&count](const CountNode& other) {
      return other.node != count.node && is_same(other.node->input(0), count.node->input(0)) &&
             !exclude_each_other(other.node, count.node);
    });
  };
  counts.erase(std::remove_if(counts.begin(), counts.end(), is_repeated), counts.end());
}

bool is_object(const Value* value) {
  const auto kind = value->type()->kind();
  return kind == c10::TypeKind::ClassType || kind == c10::TypeKind::InterfaceType;
}

// Whether only batch norms read the value, which is no counter then: torch takes none for a statistic.
bool is_statistic(const Value* value) {
  return std::all_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    return is_profile(use.user) ? is_statistic(use.user->output())
                                : use.user->kind() == c10::aten::batch_norm && use.offset > 0;
  });
}

bool is_counted_only(const Value* value) {
  return std::all_of(value->uses().begin(), value->uses().end(),
                     [](const torch::jit::Use& use) { return use.offset == 0 && is_count(use.user); });
}

// Whether what the node reads of a module is no counter, by whatever name, or is only counted.
bool reads_no_counter(const Node* attribute) {
  const Value* value = attribute->output();
  const auto type = attribute->input()->type()->cast<c10::ClassType>();
  if (!may_hold_tensors(value->type())) {
    return true;
  }
  const auto slot = type ? type->findAttributeSlot(attribute->s(c10::attr::name)) : std::nullopt;
  return slot && (type->is_parameter(*slot) || is_counted_only(value) || is_statistic(value));
}

bool may_defer(Graph& graph, const std::vector<Node*>& nodes) {
  const auto inputs = graph.inputs();
  return std::all_of(inputs.begin(), inputs.end(),
                     [](const Value* input) {
                       return is_object(input) || is_tensor(input) || !may_hold_tensors(input->type());
                     }) &&
         std::none_of(graph.outputs().begin(), graph.outputs().end(), is_object) &&
         std::all_of(nodes.begin(), nodes.end(), [](const Node* node) {
           return node->kind() == c10::prim::GetAttr
                      ? reads_no_counter(node)
                      : is_known(node) &&
                            std::none_of(node->inputs().begin(), node->inputs().end(), is_object);
         });
}

// The counts of the graph, and nodes that hold them together. An If around some gives the capsule on.
class Chain {
 public:
  Chain(Graph& graph, const std::vector<CountNode>& counts) : graph_(graph) {
    for (const CountNode& count : counts) {
      counts_[count.place()].push_back(count);
      around_.insert(count.around.begin(), count.around.end());
    }
    std::vector<Value*> given;
    std::copy_if(graph.inputs().begin(), graph.inputs().end(), std::back_inserter(given), is_tensor);
    last_ = make("counts", given)->output();
    last_->setType(c10::CapsuleType::get());
    graph.prependNode(last_->node());
  }

  void add_in(Block* block) {
    const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
    for (Node* node : nodes) {
      for (const CountNode& count : counts_[node]) {
        add(count);
      }
      if (around_.count(node) != 0) {
        Value* before = last_;
        for (Block* inner : node->blocks()) {
          last_ = before;
          add_in(inner);
          inner->registerOutput(last_);
        }
        last_ = node->addOutput()->setType(c10::CapsuleType::get());
      }
    }
  }

  void end() {
    Node* added = graph_.create(c10::Symbol::fromQualString("tsfuser::add_counts"), {last_}, 0);
    graph_.appendNode(added);
  }

 private:
  void add(const CountNode& counted) {
    const torch::jit::WithInsertPoint here(counted.place());
    Node* count = counted.node;
    Node* counter =
        graph_.insertNode(graph_.createClone(count->input(0)->node(), [](Value* value) { return value; }));
    Value* on = counted.choice ? counted.choice->input(0) : graph_.insertConstant(true);
    Value* number = graph_.insertConstant(known_int(count->input(1)).value());
    Node* made = graph_.insertNode(make("count", {last_, counter->output(), number, on}));
    last_ = made->output()->setType(c10::CapsuleType::get());
    const torch::jit::WithInsertPoint there(count);
    Value* none = graph_.insertConstant(std::vector<int64_t>{0});
    count->replaceInput(0, graph_.insert(c10::aten::new_empty, {count->input(0), none}));
  }

  Node* make(const char* name, at::ArrayRef<Value*> inputs) {
    return graph_.create(c10::Symbol::fromQualString(std::string("tsfuser::") + name), inputs, 1);
  }

  Graph& graph_;
  Value* last_;
  std::unordered_map<Node*, std::vector<CountNode>> counts_;  // by their places
  std::unordered_set<Node*> around_;
};

}  // namespace

void defer_counts(Graph& graph, const Node*) {
  const auto nodes = all_nodes(graph);
  std::vector<CountNode> counts = counts_in(nodes);
  drop_repeated(counts);
  if (counts.size() < 2 || !may_defer(graph, nodes)) {
    return;
  }
  Chain chain(graph, counts);
  chain.add_in(graph.block());
  chain.end();
}

}  // namespace tsfuser
