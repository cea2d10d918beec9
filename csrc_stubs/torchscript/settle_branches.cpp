// The rewrite that settles branches, before torch profiles a graph. See settled_branches.h.

#include "graph/memory.h"
#include "group/failures.h"
#include "torchscript/call_facts.h"
#include "torchscript/settled_branches.h"
#include "torchscript/static_values.h"
#include "torchscript/joint_program.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

std::atomic<bool> switched_on{true};

c10::Symbol kept() {
  static const auto name = c10::Symbol::attr("kept");
  return name;
}

// Whether the op takes random numbers.
bool draws(const Node* node) {
  const auto* schema = node->maybeSchema();
  if (!schema || !node->kind().is_aten()) {
    return false;
  }
  const auto found = c10::Dispatcher::singleton().findSchema({schema->name(), schema->overload_name()});
  return found && found->hasTag(at::Tag::nondeterministic_seeded);
}

bool keeps_statistics(const Node* node) { return op_facts().writers.count(node->kind()) != 0; }

// Whether the node may run twice, but for what is in its blocks: it only computes its results.
bool is_pure(const Node* node) {
  const auto* schema = node->maybeSchema();
  return !node->hasSideEffects() && !(schema && schema->is_mutable()) && !draws(node) &&
         !keeps_statistics(node) && (node->kind().is_aten() || node->kind().is_prim());
}

bool raises(const Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(),
                     [](const Node* node) { return node->kind() == c10::prim::RaiseException; });
}

// Whether the branch is a check: the program goes on in one way only, else it ends with an exception.
bool is_check(Node* branch) {
  const auto blocks = branch->blocks();
  if (raises(blocks[0]) != raises(blocks[1])) {
    return true;
  }
  return branch->outputs().empty() && std::all_of(blocks.begin(), blocks.end(), [](Block* block) {
           return std::all_of(block->nodes().begin(), block->nodes().end(), [](Node* node) {
             return node->kind() == c10::prim::If ? is_check(node) : is_pure(node);
           });
         });
}

// The branches that follow from the facts, and are reached by such branches only; outer ones first.
// `all_checks`: also those that look at sizes. Where regions are made they are left out: the sizes would be
// facts, and each call with others runs the graph as it is, for the sake of some regions that would end
// there.
void add_branches(Block* block, const StaticValues& values, bool all_checks, std::vector<Node*>& found) {
  for (Node* node : block->nodes()) {
    if (node->kind() == c10::prim::If && !node->hasAttribute(kept()) && values.follows(node->input())) {
      if (all_checks || !is_check(node) || !CallFacts(*node->owningGraph(), {node->input()}).has_sizes()) {
        found.push_back(node);
      }
      for (Block* inner : node->blocks()) {
        add_branches(inner, values, all_checks, found);
      }
    }
  }
}

std::vector<Node*> branches_of(Graph& graph, bool all_checks) {
  const StaticValues values(graph);
  std::vector<Node*> found;
  if (values.knows_all()) {
    add_branches(graph.block(), values, all_checks, found);
  }
  return found;
}

// Whether an op computes the tensor, in the block.
bool is_computed_in(const Value* value, const Block* block) {
  const Node* node = value->node();
  return node->owningBlock() == block && node->kind().is_aten() && is_tensor(value);
}

// Whether a tensor that one of the blocks computes is read behind the branch.
bool parts_groups(Node* branch) {
  for (size_t i = 0; i < branch->outputs().size(); ++i) {
    for (const Block* block : branch->blocks()) {
      if (branch->output(i)->hasUses() && is_computed_in(block->outputs()[i], block)) {
        return true;
      }
    }
  }
  return false;
}

// Whether the branch decides, by what it gives, about one that parts groups.
bool decides(Node* branch) {
  for (const Value* output : branch->outputs()) {
    for (const auto& use : output->uses()) {
      if (use.user->kind() == c10::prim::If && parts_groups(use.user)) {
        return true;
      }
    }
  }
  return false;
}

// The node of the graph's own block that the node is, or is in.
Node* outermost(const Node* node) {
  while (node->owningBlock()->owningNode()) {
    node = node->owningBlock()->owningNode();
  }
  return const_cast<Node*>(node);
}

// Whether the op may run twice once `still` has seen it: a dropout can be told to drop nothing, a norm to
// keep no statistics, and an op in place that torch asks about to write to a copy. The latter two for joint
// graphs, whose programs would else run without any for ever.
bool may_be_stilled(const Graph& graph, const Node* node, const Node* first) {
  if (!takes_joint_functions(graph)) {
    return node->kind() == c10::aten::dropout && node->owningBlock() == graph.block();
  }
  const auto places = written_operands(node);
  const bool writes_to_tensors =
      node == first && !places.empty() && node->kind().is_aten() && !draws(node) &&
      std::all_of(places.begin(), places.end(), [node](size_t i) { return is_tensor(node->input(i)); });
  return node->kind() == c10::aten::dropout || keeps_statistics(node) || writes_to_tensors;
}

// Whether the op writes to nothing but lists that the graph has made, which are gone once a call has taken
// the place of all that reads them.
bool writes_to_own_lists(const Node* node) {
  const auto places = written_operands(node);
  return node->kind().is_aten() && !places.empty() &&
         std::all_of(places.begin(), places.end(), [node](size_t i) {
           return node->input(i)->node()->kind() == c10::prim::ListConstruct;
         });
}

// Whether all up to the node, which torch has passed by and which stays in the graph, may run twice: in the
// first call it does.
bool may_repeat(Graph& graph, const Node* first) {
  const Node* end = takes_joint_functions(graph) ? nullptr : outermost(first)->next();
  for (const Node* node : all_nodes(graph)) {
    if (node == end) {
      break;
    }
    const bool is_unseen = !end && writes_to_own_lists(node);
    if (!is_pure(node) && !is_unseen && !may_be_stilled(graph, node, first)) {
      return false;
    }
    if (!end && node == first) {
      break;
    }
  }
  return true;
}

// Has the op only compute, as it runs twice in the first call.
void still(Node* node) {
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  for (const size_t i : written_operands(node)) {
    node->replaceInput(i, graph.insert(c10::aten::clone, {node->input(i)}));
  }
  const bool is_norm = keeps_statistics(node);
  if (!is_norm && node->kind() != c10::aten::dropout) {
    return;
  }
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    const std::string& name = node->schema().arguments()[i].name();
    if (name == "running_mean" || name == "running_var") {
      node->replaceInput(i, graph.insertConstant(c10::IValue()));
    } else if (name == "train" || name == "training" || name == "use_input_stats") {
      node->replaceInput(i, graph.insertConstant(is_norm));  // which takes those of the batch then
    }
  }
}

void destroy_behind(Block* block, const Node* last) {
  while (block->return_node()->prev() != last) {
    block->return_node()->prev()->destroy();
  }
}

// Has a block end behind the node, or give nothing at once where that is null. Nothing reads its results.
void end_behind(Block* block, Node* last) {
  Graph& graph = *block->owningGraph();
  const bool is_body = block->owningNode()->kind() == c10::prim::Loop;
  Node* begin = block->param_node()->next();
  const torch::jit::WithInsertPoint front(begin);
  for (size_t i = 0; i < block->outputs().size(); ++i) {
    const auto type = block->outputs()[i]->type();
    block->replaceOutput(i, is_body && i == 0  // no other iteration
                                ? graph.insertConstant(false)
                                : graph.insertNode(graph.createUninitialized(type))->output());
  }
  destroy_behind(block, last ? last : begin->prev());
}

// Has the blocks around the node end behind it. Its own, which torch has not come to, do nothing.
void end_blocks_behind(Node* last) {
  for (Block* block : last->blocks()) {
    end_behind(block, nullptr);
  }
  while (Node* around = last->owningBlock()->owningNode()) {
    const auto blocks = around->blocks();
    auto own = std::find(blocks.begin(), blocks.end(), last->owningBlock());
    end_behind(*own, last);
    std::for_each(own + 1, blocks.end(), [](Block* block) { end_behind(block, nullptr); });
    last = around;
  }
}

// Has a branch hand on the operand of each dropout whose rate, an attribute of a module, is 0, as eager
// does: a group that does not know the rate draws numbers, and stores a mask. Only where such a branch is
// settled: in the graph's block, or in one of the `settled` branches.
void branch_on_rates(Graph& graph, const std::vector<Node*>& settled) {
  for (Node* node : all_nodes(graph)) {
    const auto path = node->kind() == c10::aten::dropout ? path_of(node->input(1)) : std::nullopt;
    const Node* around = node->owningBlock()->owningNode();
    if (!path || path->slots.empty() || node->input(1)->type()->kind() != c10::TypeKind::FloatType ||
        (around && std::find(settled.begin(), settled.end(), around) == settled.end())) {
      continue;
    }
    const torch::jit::WithInsertPoint here(node);
    Value* is_zero = graph.insert(c10::aten::eq, {node->input(1), graph.insertConstant(0.0)});
    Node* branch = graph.insertNode(graph.create(c10::prim::If, {is_zero}, 1));
    branch->output()->setType(node->output()->type());
    branch->copyMetadata(node);
    node->output()->replaceAllUsesWith(branch->output());
    branch->addBlock()->registerOutput(node->input(0));
    Block* drops = branch->addBlock();
    node->moveBefore(drops->return_node());
    drops->registerOutput(node->output());
  }
}

// The graph's program without profiles, with notes of the branches.
std::shared_ptr<Graph> noting(Graph& graph) {
  auto copy = graph.copy();
  torch::jit::ProfilingRecord::removeProfilingNodes(copy->block());
  const bool parts = takes_joint_functions(graph);  // each branch ends a region
  std::vector<Node*> branches = branches_of(*copy, !parts);
  if (branches.empty() || (!parts && std::none_of(branches.begin(), branches.end(), [](Node* branch) {
        return parts_groups(branch) || decides(branch);
      }))) {
    return nullptr;
  }
  branch_on_rates(*copy, branches);
  branches = branches_of(*copy, !parts);
  for (size_t i = 0; i < branches.size(); ++i) {
    Node* branch = branches[i];
    const torch::jit::WithInsertPoint before(branch);
    Value* number = copy->insertConstant(static_cast<int64_t>(i));
    Value* nothing = copy->insertConstant(c10::IValue());
    Node* note = copy->insertNode(copy->create(taken_kind(), {branch->input(), number, nothing}, 1));
    note->output()->setType(c10::BoolType::get());
    note->copyMetadata(branch);
    branch->replaceInput(0, note->output());
  }
  return copy;
}

bool has_branches(Graph& graph) {
  bool found = false;
  for (const Node* node : all_nodes(graph)) {
    if (node->kind() == taken_kind()) {
      return false;
    }
    found |= node->kind() == c10::prim::If;
  }
  return found;
}

}  // namespace

bool settle_branches(bool on) { return switched_on.exchange(on); }

bool settle_branches(Graph& graph, const Node* first) {
  if (!switched_on.load() || !has_branches(graph) || !may_become_call(graph, first)) {
    return false;
  }
  const auto body = noting(graph);
  if (!body) {
    return false;
  }
  Node* node = SettledBranches::call_of(body, graph);
  end_of_pass("settle_branches");  // nothing behind this fails: nodes are destroyed
  become_call(graph, first, node);
  return true;
}

bool may_become_call(Graph& graph, const Node* first) {
  return graph.outputs().size() == 1 && may_repeat(graph, first);
}

void become_call(Graph& graph, const Node* first, Node* call) {
  call->insertAfter(outermost(first));
  call->input(0)->node()->insertBefore(call);
  call->output()->setType(graph.outputs()[0]->type());
  graph.return_node()->replaceInput(0, call->output());
  destroy_behind(graph.block(), call);
  end_blocks_behind(const_cast<Node*>(first));
  for (Node* node : all_nodes(graph)) {
    if (node != call && !is_pure(node) && !writes_to_own_lists(node)) {
      still(node);
    }
  }
}

void keep_branches(Graph& graph) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::prim::If) {
      node->i_(kept(), 1);
    }
  }
}

}  // namespace tsfuser
