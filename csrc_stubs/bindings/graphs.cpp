// The functions of tsfuser._C that take or return graphs.

#include "torchscript/joint_program.h"
#include "torchscript/settled_branches.h"
#include "torchscript/static_values.h"
#include "graph/memory.h"
#include "graph/places.h"
#include "graph/written_graph.h"
#include "group/group.h"
#include "torchscript/hooks.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twins.h"
#include "torchscript/weight_casts.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/remove_mutation.h>
#include <torch/csrc/jit/python/pybind.h>  // a Node that is gone raises in Python
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/autodiff.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using GraphPtr = std::shared_ptr<torch::jit::Graph>;

std::optional<std::unordered_set<std::string>> static_values(const GraphPtr& graph) {
  const StaticValues values(*graph);
  if (!values.knows_all()) {
    return std::nullopt;
  }
  std::unordered_set<std::string> names;
  for (const torch::jit::Node* node : all_nodes(*graph)) {
    for (const torch::jit::Value* value : node->outputs()) {
      if (values.follows(value)) {
        names.insert(value->debugName());
      }
    }
  }
  return names;
}

// None where no branch of the graph is settled.
std::optional<std::vector<torch::jit::GraphExecutorState>> settled_states(const GraphPtr& graph) {
  const py::gil_scoped_release released;  // another thread may hold an executor's lock, and wait for Python
  const auto functions = settled_functions(*graph);
  if (!functions) {
    return std::nullopt;
  }
  std::vector<torch::jit::GraphExecutorState> states;
  std::unordered_set<const torch::jit::GraphFunction*> seen;
  for (const auto& [function, training] : *functions) {
    if (seen.insert(function).second && function->get_executor().isOptimized()) {
      states.push_back(function->getDebugState());
    }
  }
  return states;
}

using ExecutorState = std::optional<torch::jit::GraphExecutorState>;
// What runs in the place of a settled graph: the state of its executor, if that has optimised it, and its
// graph.
using SettledCopy = std::pair<ExecutorState, GraphPtr>;

// None where the graph was not settled, or the copy is not known.
std::optional<SettledCopy> settled_copy(torch::jit::GraphFunction* function) {
  if (!function) {
    return std::nullopt;
  }
  const bool optimised = function->get_executor().isOptimized();
  return SettledCopy{optimised ? ExecutorState(function->getDebugState()) : std::nullopt, function->graph()};
}

// That which a call of the function with such arguments runs. The graph is the one that torch has made of
// it.
std::optional<SettledCopy> copy_for_arguments(const GraphPtr& graph, const c10::FunctionSchema& schema,
                                              const py::tuple& args, const py::dict& kwargs,
                                              std::optional<c10::IValue> self) {
  const auto* settled = settled_branches_of(*graph);
  if (!settled) {
    return std::nullopt;
  }
  const auto stack = torch::jit::createStackForSchema(
      schema, args, py::reinterpret_borrow<py::kwargs>(kwargs), std::move(self));
  const py::gil_scoped_release released;  // as above
  return settled_copy(settled->function_for(stack));
}

// That which ran last.
std::optional<SettledCopy> last_copy(const GraphPtr& graph) {
  const py::gil_scoped_release released;  // as above
  const auto* settled = settled_branches_of(*graph);
  return settled ? settled_copy(settled->last()) : std::nullopt;
}

// What the program that a graph is a call of runs without gradients, and its graph with regions; None for
// other graphs.
std::optional<SettledCopy> joint_program(const GraphPtr& graph) {
  const py::gil_scoped_release released;  // as above
  const JointProgram* program = joint_program_of(*graph);
  if (!program) {
    return std::nullopt;
  }
  const auto plain = settled_copy(program->plain());
  return SettledCopy{plain->first, program->outlined()};
}

// Forward and backward; none of an executor that has not optimised its graph.
using DifferentiableStates = std::vector<std::pair<ExecutorState, ExecutorState>>;

DifferentiableStates states_in(torch::jit::Code& code) {
  const auto state_of = [](torch::jit::GraphExecutor& executor) {
    return executor.isOptimized() ? ExecutorState(executor.getDebugState()) : std::nullopt;
  };
  DifferentiableStates states;
  for (const auto& [forward, backward] : differentiable_executors(code)) {
    states.emplace_back(state_of(*forward), state_of(*backward));
  }
  return states;
}

DifferentiableStates differentiable_states(torch::jit::Code& code) {
  const py::gil_scoped_release released;  // as above
  return states_in(code);
}

// Of a graph that is a call of a program with joint graphs: whether its last call may have recorded
// gradients, the graph that such calls run, and the states of the differentiable graphs in it.
using ShownProgram = std::tuple<bool, GraphPtr, DifferentiableStates>;

std::optional<ShownProgram> joint_shown(const GraphPtr& graph) {
  const py::gil_scoped_release released;  // as above
  const JointProgram* program = joint_program_of(*graph);
  if (!program) {
    return std::nullopt;
  }
  const JointProgram::Shown shown = program->shown();
  DifferentiableStates states;
  for (torch::jit::Code* code : shown.codes) {
    const DifferentiableStates own = states_in(*code);
    states.insert(states.end(), own.begin(), own.end());
  }
  return ShownProgram{program->has_recorded(), shown.graph, states};
}

}  // namespace

void bind_graphs(py::module_& m) {
  m.def("register_profiled_kinds", [](const std::vector<std::string>& names) { profile_kinds(names); });
  m.def("ask_about_all", &ask_about_all,
        "Whether torch asks about all ops that autodiff does not know, as it profiles; only while NNC is "
        "off. Returns the state before.");
  m.def(
      "set_op_facts",
      [](const std::vector<std::string>& in_place, const std::vector<std::string>& fresh,
         const std::vector<std::string>& computed, const std::vector<std::string>& handed_on,
         const std::vector<std::string>& excluded, const std::vector<std::string>& heavy,
         const std::vector<std::string>& same_sizes, const std::vector<std::string>& moved,
         const std::vector<std::string>& like_first, const std::vector<std::string>& promoted,
         const std::vector<std::string>& retyped, const std::vector<std::string>& sized,
         const std::vector<std::string>& ranked, const std::vector<std::string>& broadcast,
         const std::vector<std::string>& alone, const std::vector<std::string>& flat,
         const std::vector<std::string>& hidden_views, const std::vector<std::string>& writers,
         const std::unordered_map<std::string, std::string>& asked,
         const std::unordered_map<std::string, std::tuple<std::string, std::vector<std::string>, bool>>&
             rules,
         size_t most_joined, size_t most_joined_in_memory) {
        take_op_facts(
            {symbols(in_place),     symbols(fresh),       symbols(computed),     symbols(handed_on),
             symbols(excluded),     symbols(heavy),       symbols(same_sizes),   symbols(moved),
             symbols(like_first),   symbols(promoted),    symbols(retyped),      symbols(sized),
             symbols(ranked),       symbols(broadcast),   symbols(alone),        symbols(flat),
             symbols(hidden_views), symbols(writers),     argument_names(asked), size_rules(rules),
             most_joined,           most_joined_in_memory});
      },
      py::arg("in_place"), py::arg("fresh"), py::arg("computed"), py::arg("handed_on"), py::arg("excluded"),
      py::arg("heavy"), py::arg("same_sizes"), py::arg("moved"), py::arg("like_first"), py::arg("promoted"),
      py::arg("retyped"), py::arg("sized"), py::arg("ranked"), py::arg("broadcast"), py::arg("alone"),
      py::arg("flat"), py::arg("hidden_views"), py::arg("writers"), py::arg("asked"), py::arg("size_rules"),
      py::arg("most_joined"), py::arg("most_joined_in_memory"),
      "What the op table says about kinds of nodes (torchscript/op_facts.h).");
  m.def(
      "leave_in_place", [](const std::vector<std::string>& kinds) { leave_in_place(symbols(kinds)); },
      py::arg("kinds"), "Once, before the first graph: in-place ops that stay.");
  m.def("settle_branches", py::overload_cast<bool>(&settle_branches),
        "Whether branches that follow from the sizes and attributes of a call are settled "
        "(torchscript/settled_branches.h). Returns the state before.");
  m.def(
      "cast_in_groups_everywhere", &cast_in_groups_everywhere,
      "Whether weights on the CPU are cast by groups, too (torchscript/weight_casts.h); for tests. Returns "
      "the state before.");
  m.def("static_values", &static_values,
        "The names of the values of a graph that follow from the facts of a call "
        "(torchscript/static_values.h); None where it has nodes of unknown kinds.");
  m.def("settled_states", &settled_states,
        "The states of the executors that a graph with settled branches runs; None where it has none.");
  m.def(
      "is_settled", [](const GraphPtr& graph) { return settled_branches_of(*graph) != nullptr; },
      "Whether the graph calls copies of a program whose branches were settled.");
  m.def(
      "joint_graphs",
      [](torch::jit::Code& code) {
        const py::gil_scoped_release released;  // as above
        std::vector<GraphPtr> found;
        for (const auto& packed : packed_graphs(code)) {
          found.push_back(packed.graph);
        }
        return found;
      },
      "The packed graphs that optimised code runs, in no order.");
  m.def(
      "joint_states",
      [](torch::jit::Code& code) {
        const py::gil_scoped_release released;  // as above
        return plain_states(code);
      },
      "The states of the other executors that programs with joint graphs run.");
  m.def("joint_program", &joint_program,
        "Of a graph that is a call of a program with joint graphs: (the executor state without gradients, "
        "None where that has optimised nothing; the program with regions). None for others.");
  m.def("joint_shown", &joint_shown,
        "Of a graph that is a call of a program with joint graphs: (whether its last call may have recorded "
        "gradients; the graph that such calls run; the executor states, forward and backward, of the "
        "differentiable graphs in it). None for others.");
  m.def("use_joint_functions", &use_joint_functions,
        "Whether training goes by joint graphs, experimentally; returns the state before.");
  m.def("last_copy", &last_copy,
        "The copy that a graph with settled branches ran last: (the state of its executor, None where that "
        "has optimised nothing; its graph). None where it ran as it is.");
  m.def(
      "copy_for_arguments",
      [](const GraphPtr& graph, const torch::jit::StrongFunctionPtr& f, const py::tuple& args,
         const py::dict& kwargs) {
        return copy_for_arguments(graph, f.function_->getSchema(), args, kwargs, std::nullopt);
      },
      "The same of the copy that a call with such arguments runs; None where none was made by now.");
  m.def("copy_for_arguments", [](const GraphPtr& graph, const torch::jit::Method& method,
                                 const py::tuple& args, const py::dict& kwargs) {
    return copy_for_arguments(graph, method.function().getSchema(), args, kwargs, method.owner()._ivalue());
  });
  m.def("differentiable_states", &differentiable_states,
        "The states of the executors of each differentiable graph in the code of a plan, (forward, "
        "backward), in order; None for one that has not optimised its graph.");
  m.def("frames", &frames,
        "Where a node comes from, innermost first: (file, line, column, text of the line).");
  m.def("set_place", &set_place, py::arg("node"), py::arg("file"), py::arg("line"), py::arg("text"),
        "Has the node stand for a line of source.");
  m.def(
      "is_differentiable", [](const torch::jit::Node& node) { return torch::jit::isDifferentiable(&node); },
      "Whether TorchScript's autodiff takes the node.");
  m.def("differentiable_forms", &differentiable_forms,
        "The names of the forms that autodiff knows, in order.");
  m.def("twins", &twins, "Kinds of ops of ours that autodiff takes, and which ops they stand for.");
  m.def(
      "write_differentiable_forms",
      [](const GraphPtr& graph) { write_differentiable_forms(*graph, *graph->nodes().begin()); },
      "Gives ops forms that autodiff knows, as in a graph that is about to be profiled.");
  m.def("plain_forms", [](const GraphPtr& graph) { eager_forms(*graph); }, "Writes all as it was.");
  py::class_<Memory>(m, "Memory", "Which values of a graph may share memory (graph/memory.h).")
      .def(py::init([](const GraphPtr& graph, const Memory::Values& also_written) {
             return std::make_unique<Memory>(graph, op_facts().hidden_views, also_written);
           }),
           py::arg("graph"), py::arg("also_written") = Memory::Values())
      .def("may_share", &Memory::may_share)
      .def("is_written", &Memory::is_written)
      .def("is_changed", &Memory::is_changed)
      .def(
          "hides_writes", [](const Memory& memory) { return !memory.hidden_writes().empty(); },
          "Whether a node writes to what torch's alias analysis does not know that it writes to.");
  m.def("lower_simple_tuples", [](const GraphPtr& graph) { torch::jit::LowerSimpleTuples(graph); });
  m.def("remove_tensor_mutation", [](const GraphPtr& graph, const std::vector<torch::jit::Node*>& nodes) {
    const std::unordered_set<torch::jit::Node*> wanted(nodes.begin(), nodes.end());
    return torch::jit::RemoveTensorMutation(
        graph, [&wanted](torch::jit::Node* node) { return wanted.count(node) != 0; });
  });
  m.def(
      "write_graph", [](const GraphPtr& graph) { return py::bytes(write_graph(graph)); },
      "A graph as bytes. RuntimeError or ValueError where it would not come back as it is.");
  m.def(
      "read_graph", [](const py::bytes& bytes) { return read_graph(bytes); },
      "The graph of such bytes, whose writer has to be known: they are a pickle of torch's.");
  m.def(
      "graphs_text", [](const Graphs& graphs) { return py::bytes(graphs_text(graphs)); },
      "What tells graphs from others. ValueError where they hold what cannot be told.");
  m.def(
      "write_made",
      [](const Graphs& made, const Graphs& origins) { return py::bytes(write_made(made, origins)); },
      "What a pass has made of the graphs `origins`, as bytes. ValueError where it would not come back.");
  m.def(
      "read_made", [](const py::bytes& bytes, const Graphs& origins) { return read_made(bytes, origins); },
      "What such a pass has made of graphs with the text of `origins`.");
  m.def("group_id",
        [](const GraphPtr& graph, const std::string& text) { return group_by_text(graph, text)->id; });
  m.def("group_graph", [](int64_t id) { return known_group(id).graph; });
}

}  // namespace tsfuser
