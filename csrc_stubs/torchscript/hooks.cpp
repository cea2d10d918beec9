// Everything that we hook into torch's TorchScript executor:
//
//   the pre-pass                  makes groups in a graph that was profiled, or differentiated (Python)
//   the profiling predicate       prepares the graph (prepare.cpp), then says which nodes to profile
//   operators                     those that fused graphs call (operators.cpp, sizes.cpp, counts.cpp,
//                                 cast_together.cpp)
//   prim::DifferentiableGraph,    replaced by operators that wrap torch's (differentiable.cpp)
//   prim::RequiresGradCheck
//   callbacks                     those that Python has set
//
// None of them changes a program while `pass_enabled` is off.

#include "torchscript/hooks.h"
#include "torchscript/kept_writes.h"
#include "torchscript/settled_branches.h"
#include "call/arguments.h"
#include "graph/memory.h"
#include "group/failures.h"
#include "torchscript/counts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twins.h"
#include "torchscript/unfused_functions.h"
#include "torchscript/weight_casts.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/pass_manager.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::jit::tensorexpr {
TORCH_API bool& getTEGenerateBlockCode();  // of tensorexpr/kernel.h, which includes all of NNC
}

namespace tsfuser {

std::atomic<bool> pass_enabled{false};

namespace {

using torch::jit::Graph;
using GraphPtr = std::shared_ptr<Graph>;

struct ProfiledKinds {
  std::shared_mutex mutex;
  Kinds kinds;
};

ProfiledKinds& profiled() {
  static ProfiledKinds* p = new ProfiledKinds;
  return *p;
}

// Before the first graph is looked at, Python reads nvFuser's variables, and tells C++ what they change
// (tsfuser/options.py). Other threads wait for that, inside of Python.
void read_options(const Graph& graph) {
  static std::atomic<bool> is_read{false};
  if (!is_read.load(std::memory_order_acquire)) {
    attempt("read_options", graph,
            [] { with_callback(first_graph_callback(), "", [](const py::object& read) { read(); }); });
    is_read.store(true, std::memory_order_release);
  }
}

// Whether this is the first time that torch asks about a node of the graph. Marks it: no copy of a graph
// has what is noted at its end.
bool is_new(torch::jit::Graph& graph) {
  static const auto asked = c10::Symbol::attr("asked");
  torch::jit::Node* end = graph.return_node();
  const bool found = end->hasAttribute(asked);
  end->i_(asked, 1);
  return !found;
}

// Rewrites the graph when torch asks about its first node; `first` is that node. functorch knows no batches
// of casts of autocast, which some forms are.
void prepare_once(const torch::jit::Node* first) {
  Graph& graph = *const_cast<torch::jit::Node*>(first)->owningGraph();  // torch's own copy, which it changes
  if (pass_enabled.load(std::memory_order_relaxed) && !refuse_mode() && is_new(graph)) {
    prepare_for_profiling(graph, first);
  }
}

bool is_profiled(const torch::jit::Node* node) {
  if (pass_enabled.load(std::memory_order_relaxed)) {
    read_options(*node->owningGraph());
  }
  prepare_once(node);
  const std::shared_lock<std::shared_mutex> lock(profiled().mutex);
  return profiled().kinds.count(node->kind()) != 0;
}

// Torch's oldest fuser, which comes next, and fuses nothing where ours is on, raises for values whose types
// name a device that it does not know, such as meta.
void forget_unknown_devices(Graph& graph) {
  const auto forget = [](torch::jit::Value* value) {
    const auto type = value->type()->cast<c10::TensorType>();
    const auto device = type ? type->device() : std::nullopt;
    if (device && !device->is_cpu() && !device->is_cuda() && !device->is_xpu()) {
      value->setType(c10::TensorType::get());
    }
  };
  std::for_each(graph.inputs().begin(), graph.inputs().end(), forget);
  for (torch::jit::Node* node : all_nodes(graph)) {
    std::for_each(node->outputs().begin(), node->outputs().end(), forget);
    for (torch::jit::Block* block : node->blocks()) {
      std::for_each(block->inputs().begin(), block->inputs().end(), forget);
    }
  }
}

// A graph with groups; null where Python makes none. `running`: the pass that is at work.
GraphPtr with_groups(Graph& graph, const char*& running) {
  const GraphPtr copy = graph.copy();
  GraphPtr made;
  running = "eager_forms";
  eager_forms(*copy);
  forget_noted_writes(*copy);
  end_of_pass(running);
  running = "graph_pass";
  with_callback(pass_callback(), "the graph pass returned something else than a graph",
                [&](const py::object& pass) {
                  const py::object result = pass(copy);
                  if (!result.is_none()) {
                    made = result.cast<GraphPtr>();
                  }
                });
  end_of_pass(running);
  return made;
}

// The executor's compile lock is held. All work on a copy, so that what fails leaves the graph as it was.
void pre_pass(GraphPtr& graph) {
  // Though there be no groups, and though the fuser be off since the graph was prepared.
  attempt("check_written", *graph, [&graph] { check_written(*graph); });
  if (!pass_enabled.load(std::memory_order_relaxed)) {
    attempt("note_unfused", *graph, [&graph] { note_unfused(graph); });
    return;
  }
  read_options(*graph);
  const char* running = "graph_pass";
  try {
    if (GraphPtr made = with_groups(*graph, running)) {
      graph = std::move(made);
    }
  } catch (...) {
    pass_failed(running, *graph);
  }
  if (!torch::jit::tensorExprFuserEnabled()) {  // nobody else removes, or reads, those of a graph without
                                                // groups
    torch::jit::ProfilingRecord::removeProfilingNodes(graph->block());
  }
  forget_unknown_devices(*graph);
  end_loops(*graph);
}

// Torch's operators that were replaced. Those of graphs that were made before point to them.
std::unordered_map<c10::Symbol, std::shared_ptr<torch::jit::Operator>>& replaced() {
  static auto* r = new std::unordered_map<c10::Symbol, std::shared_ptr<torch::jit::Operator>>;
  return *r;
}

void replace_operator(c10::Symbol kind, torch::jit::Operation (*make)(const torch::jit::Node*)) {
  const auto found = torch::jit::getAllOperatorsFor(kind);
  if (found.size() != 1) {  // not the torch that we know
    return;
  }
  replaced()[kind] = found.front();
  torch::jit::deregisterOperator(found.front()->schema());
  torch::jit::registerOperator(
      torch::jit::Operator(kind, make, c10::AliasAnalysisKind::INTERNAL_SPECIAL_CASE));
}

}  // namespace

// Leaked: they may be called as long as any thread runs.
Callback& pass_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& first_graph_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& differentiable_callback() {
  static Callback* c = new Callback;
  return *c;
}

bool ask_about_all(bool on) { return std::exchange(torch::jit::tensorexpr::getTEGenerateBlockCode(), on); }

void profile_kinds(const std::vector<std::string>& names) {
  const std::unique_lock<std::shared_mutex> lock(profiled().mutex);
  profiled().kinds.merge(symbols(names));
}

torch::jit::Operation torchs_operation(const torch::jit::Node* node) {
  return replaced().at(node->kind())->getOperation(node);
}

void hook_into_torch() {
  static const bool once = [] {
    register_operators();
    register_products();
    register_size_operators();
    register_early_sizes();
    register_early_dtypes();
    register_convolution_operands();
    register_pad();
    register_grown_lists();
    register_nested_joins();
    register_rows();
    register_matmul_gradients();
    register_room_products();
    register_count_operators();
    register_cast_operator();
    register_dropout_seeds();
    register_joint_norms();
    register_late_biases();
    register_shared_masks();
    register_shared_memory();
    register_settled_branches();
    register_loop_end();
    register_operators_of_fills();
    torch::jit::RegisterProfilingNode(is_profiled);
    torch::jit::registerPrePass(pre_pass);
    replace_operator(c10::prim::DifferentiableGraph, make_differentiable_graph);
    replace_operator(c10::Symbol::fromQualString("prim::RequiresGradCheck"), make_gradient_check);
    return true;
  }();
  static_cast<void>(once);
}

void take_op_facts(OpFacts facts) {
  static const bool once = [&facts] {
    set_op_facts(std::move(facts));
    register_twins();
    for (const auto& [twin, original] : twins()) {
      profile_kinds({twin});
    }
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace tsfuser
