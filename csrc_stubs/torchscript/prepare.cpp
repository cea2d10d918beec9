// What is done to a graph once, before torch profiles it, and so before it differentiates it.
//
// No pass can be registered so early. But torch asks the predicates of RegisterProfilingNode (hooks.cpp)
// about nodes that neither NNC nor autodiff knows, while it walks over a graph that it has just copied for
// itself and puts profile nodes before the operands of the nodes it passes. At the first node that it asks
// about, the steps below rewrite the whole graph; later questions are looked up only. Rules for a step:
//
//   - It destroys no node that was there: torch stands at `first`, or at a node around it, and holds on to
//     it. A node that is replaced stays, without readers, for torch's dead code elimination.
//   - Readers before `first` keep their operands: torch has put profile nodes before them, and will put none
//     before what is new there. Of what the steps look for only casts of autocast stand so far in front.
//   - New nodes stand behind `first`, or right before a reader behind it: torch comes past them.
//
// If a step raises, the graph is put back as it was, and stays so.

#include "torchscript/prepare.h"
#include "graph/memory.h"
#include "group/failures.h"
#include "torchscript/joint_program.h"
#include "torchscript/kept_writes.h"
#include "torchscript/settled_branches.h"
#include "torchscript/graph_snapshot.h"
#include "torchscript/counts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/weight_casts.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/ir.h>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;

// Readers of a dropout whose probability is the constant 0 read its operand, which eager returns, too.
// Autodiff's forward of such a node returns a copy, so what reads both could not be differentiated.
void hand_through(Graph& graph, const Node*) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::aten::dropout && known_double(node->input(1)) == 0.0) {
      node->output()->replaceAllUsesWith(node->input(0));
    }
  }
}

// Torch's alias analysis, by which autodiff and others move nodes, is right about the graph from here on.
void show_writes(Graph& graph, const Node*) {
  show_hidden_writes(graph.shared_from_this(), op_facts().hidden_views);
}

struct Step {
  const char* name;
  void (*run)(Graph& graph, const Node* first);
  // Whether programs get it, too, before joint graphs differentiate their regions (joint_program.h): what
  // saves copies and launches, and what makes runs of ops longer. The others are for torch's autodiff.
  bool for_regions = false;
};

constexpr Step kSteps[] = {
    // First of all: many look at a block at a time.
    {"inline_checked_branches", inline_checked_branches, true},
    // Anywhere: what it changes are numbers only.
    {"fold_products", fold_products, true},
    // Behind it.
    {"check_batches", check_batches, true},
    // Before the ops in place, of which it takes some.
    {"defer_counts", defer_counts, true},
    // Before all that look at joins, and before what asks which tensors a list may hold.
    {"part_grown_lists", part_grown_lists, true},
    // First of those that look at readers: what hands its operand on would hide who else reads, or made,
    // what the others look at.
    {"hand_through", hand_through, true},
    // Before what looks at readers: the checks are some.
    {"hide_dtype_checks", hide_dtype_checks},
    // Before the forms: an op that writes keeps autodiff from what it writes to, and is no reader that a
    // form could be written for.
    {"make_functional", make_functional, true},
    // Before the next one, which takes what is left.
    {"fill_parts_at_once", fill_parts_at_once, true},
    // Behind the ops in place, of which it makes more.
    {"fill_numbers", fill_numbers, true},
    // Behind the ops in place: one that is functional hides no write. Before all that asks what is written.
    {"show_writes", show_writes},
    // The same of statistics.
    {"order_writes", order_writes},
    // Behind the ops in place: it asks what is written to.
    {"drop_whole_slices", drop_whole_slices},
    // Behind the ops in place: it asks what is written to.
    {"copy_parts_alone", copy_parts_alone, true},
    // Behind the ops in place, too.
    {"copy_as_convolutions_read", copy_as_convolutions_read, true},
    // Behind the ops in place: it asks what is written to. Before what asks for sizes early, as of joins.
    {"nest_joins", nest_joins, true},
    // Behind the ops in place: what they write to may get other sizes.
    {"ask_sizes_early", ask_sizes_early, true},
    // Behind the ops in place, which may give an operand dims: it asks whether some do.
    {"ask_dtypes_early", ask_dtypes_early, true},
    // Behind them, too: what writes to a value keeps a convolution of that value in its place.
    {"move_convolutions", move_convolutions, true},
    // Behind that, which looks for what reads a norm. Behind the ops in place: an op that is functional can
    // be in a group with the sum. Before the casts of weights, as a group casts the bias itself.
    {"add_biases_late", add_biases_late, true},
    // Behind the ops in place: it leaves out what one of them may write to.
    {"cast_weights_together", cast_weights_together, true},
    // Behind all that makes nodes for autodiff: these ask which nodes it takes, as they are by now.
    {"write_differentiable_forms", write_differentiable_forms},
    {"keep_views_apart", keep_views_apart},
    {"pair_single_ops_with_identity_cast", pair_single_ops_with_identity_cast},
    // Behind all of them: it adds readers of the operands of attentions.
    {"share_masks", share_masks},
};

}  // namespace

void prepare_for_profiling(Graph& graph, const Node* first) {
  const GraphSnapshot before(graph);
  const char* running = "settle_branches";
  try {
    if (settle_branches(graph, first)) {
      return;  // what the graph runs is prepared when torch profiles that
    }
    running = "joint_program";
    if (call_joint_program(graph, first)) {
      return;
    }
    for (const Step& step : kSteps) {
      running = step.name;
      step.run(graph, first);
      end_of_pass(running);
    }
  } catch (...) {
    before.restore();
    pass_failed(running, graph);
  }
}

void prepare_for_regions(Graph& graph) {
  for (const Step& step : kSteps) {
    if (step.for_regions) {
      step.run(graph, *graph.nodes().begin());
    }
  }
}

std::vector<std::string> preparing_steps() {
  std::vector<std::string> names = {"settle_branches"};
  for (const Step& step : kSteps) {
    names.emplace_back(step.name);
  }
  return names;
}

}  // namespace tsfuser
