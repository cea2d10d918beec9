// Graphs, as torch's executor gives them and as Python asks for them: the pre-pass, the predicate that says
// which nodes to profile, and the graph passes that torch has in C++ only.

#include "call/arguments.h"
#include "group/group.h"
#include "torchscript/hooks.h"
#include "torchscript/op_facts.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/pass_manager.h>
#include <torch/csrc/jit/passes/remove_mutation.h>
#include <torch/csrc/jit/runtime/autodiff.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <memory>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_set>
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

// Nodes of these kinds get the types of their tensors profiled, from now on.
void profile_kinds(const std::vector<std::string>& names) {
  const std::unique_lock<std::shared_mutex> lock(profiled().mutex);
  profiled().kinds.merge(symbols(names));
}

// A line of source: file, line, column, text.
using Frame = std::tuple<std::string, size_t, size_t, std::string>;

// Where a node comes from: its own place, then those of the calls around it that were inlined. The code of a
// module that was loaded is made from what was saved; the lines from which that was made are saved with it.
std::vector<Frame> frames(const torch::jit::Node& node) {
  std::vector<Frame> result;
  const auto add = [&](const torch::jit::SourceRange& own) {
    const auto range = own.findSourceRangeThatGenerated().value_or(own);
    if (const auto place = range.file_line_col()) {
      const auto& source = range.source();
      const auto& [file, line, column] = *place;
      result.emplace_back(file, line, column,
                          source->get_line(source->lineno_for_offset(range.start())).str());
    }
  };
  add(node.sourceRange());
  if (const auto& calls = node.callstack()) {
    auto stack = (*calls)->vec();  // outermost first
    for (auto call = stack.rbegin(); call != stack.rend(); ++call) {
      add(std::get<1>(*call));
    }
  }
  return result;
}

// Torch asks while it walks over its own copy of a graph, about to put profile nodes in, about the ops that
// neither autodiff nor NNC knows. NNC knows all that are fused; while it generates code for "blocks", two
// ops only. Nothing else is read from that switch where NNC is off.
bool ask_about_all(bool on) { return std::exchange(torch::jit::tensorexpr::getTEGenerateBlockCode(), on); }

// Whether this is the first time that torch asks about a node of the graph. Marks it: no copy of a graph has
// what is noted at its end.
bool is_new(torch::jit::Graph& graph) {
  static const auto asked = c10::Symbol::attr("asked");
  torch::jit::Node* end = graph.return_node();
  const bool found = end->hasAttribute(asked);
  end->i_(asked, 1);
  return !found;
}

bool is_profiled(const torch::jit::Node* node) {
  if (pass_enabled.load(std::memory_order_relaxed) &&
      !refuse_mode()) {  // functorch knows no batches of casts of autocast
    torch::jit::Graph& graph = *const_cast<torch::jit::Node*>(node)->owningGraph();
    if (is_new(graph)) {
      own_casts(graph, node);
      hand_through(*graph.block());
    }
    make_functional(const_cast<torch::jit::Node*>(node));
    make_differentiable(const_cast<torch::jit::Node*>(node));
  }
  const std::shared_lock<std::shared_mutex> lock(profiled().mutex);
  return profiled().kinds.count(node->kind()) != 0;
}

// The executor's compile lock is held. Python gets a copy, so that whatever it does half-way leaves the
// graph as it was.
void pre_pass(GraphPtr& graph) {
  if (!pass_enabled.load(std::memory_order_relaxed)) {
    return;
  }
  const GraphPtr copy = graph->copy();
  plain_forms(*copy);
  with_callback(pass_callback(), "tsfuser graph pass",
                "tsfuser's graph pass returned something else than a graph", [&](const py::object& pass) {
                  const py::object result = pass(copy);
                  if (!result.is_none()) {
                    graph = result.cast<GraphPtr>();
                  }
                });
}

}  // namespace

// Leaked: they may be called as long as any thread runs.
Callback& pass_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& planner_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& reporter_callback() {
  static Callback* c = new Callback;
  return *c;
}

void register_pass_hooks() {
  static const auto pass = torch::jit::registerPrePass(pre_pass);
  static_cast<void>(pass);
  torch::jit::RegisterProfilingNode(is_profiled);
}

void bind_graphs(py::module_& m) {
  m.def("register_profiled_kinds", &profile_kinds);
  m.def("ask_about_all", &ask_about_all,
        "Whether torch asks about all ops that autodiff does not know, as it profiles; only while NNC is "
        "off. Returns the state before.");
  m.def(
      "set_op_facts",
      [](const std::vector<std::string>& in_place, const std::vector<std::string>& fresh,
         const std::vector<std::string>& excluded) {
        set_op_facts({symbols(in_place), symbols(fresh), symbols(excluded)});
      },
      py::arg("in_place"), py::arg("fresh"), py::arg("excluded"),
      "What the op table says about kinds of nodes (torchscript/op_facts.h).");
  m.def("frames", &frames,
        "Where a node comes from, innermost first: (file, line, column, text of the line).");
  m.def(
      "is_differentiable", [](const torch::jit::Node& node) { return torch::jit::isDifferentiable(&node); },
      "Whether TorchScript's autodiff takes the node.");
  m.def("lower_simple_tuples", [](const GraphPtr& graph) { torch::jit::LowerSimpleTuples(graph); });
  m.def("remove_tensor_mutation", [](const GraphPtr& graph, const std::vector<torch::jit::Node*>& nodes) {
    const std::unordered_set<torch::jit::Node*> wanted(nodes.begin(), nodes.end());
    return torch::jit::RemoveTensorMutation(
        graph, [&wanted](torch::jit::Node* node) { return wanted.count(node) != 0; });
  });
  m.def("group_id",
        [](const GraphPtr& graph, const std::string& text) { return group_by_text(graph, text)->id; });
  m.def("group_graph", [](int64_t id) { return known_group(id).graph; });
}

}  // namespace tsfuser
