// Programs whose regions joint graphs differentiate. See joint_program.h.

#include "torchscript/joint_program.h"
#include "call/arguments.h"
#include "graph/memory.h"
#include "group/failures.h"
#include "torchscript/counts.h"
#include "torchscript/hooks.h"
#include "torchscript/joint_function.h"
#include "torchscript/kept_writes.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/settled_branches.h"

#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <set>

namespace tsfuser {
namespace {

using torch::jit::Code;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using GraphPtr = std::shared_ptr<Graph>;

constexpr const char* kName = "joint_program";

std::atomic<bool> switched_on{false};

c10::Symbol held_name() {
  static const auto name = c10::Symbol::attr("joint_program");
  return name;
}

// Has readers of the node's results read `result`, or its items where it is a tuple.
void replace_by_items(Node* node, torch::jit::Value* result) {
  if (node->outputs().size() == 1) {
    result->setType(node->output()->type());
    node->output()->replaceAllUsesWith(result);
    return;
  }
  const auto types = fmap(node->outputs(), [](torch::jit::Value* value) { return value->type(); });
  result->setType(c10::TupleType::create(types));
  Node* items = node->owningGraph()->createTupleUnpack(result)->insertBefore(node);
  for (size_t i = 0; i < types.size(); ++i) {
    node->output(i)->replaceAllUsesWith(items->output(i));
  }
}

// Calls in the places of `tsfuser::joint_region` nodes, which Python has made.
void call_regions(Graph& graph) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::joint_region");
  static const auto written = c10::Symbol::attr("written");
  Walk walk(graph);
  for (Node* node : walk) {
    if (node->kind() != kind) {
      continue;
    }
    auto region = std::make_unique<JointFunction>(node->g(c10::attr::Subgraph), node->is(written));
    Node* call = region_call(graph, std::move(region), node->inputs());
    call->insertBefore(node);
    call->input(0)->node()->insertBefore(call);
    call->copyMetadata(node);
    replace_by_items(node, call->output());
    walk.destroy(node);
  }
}

GraphPtr outlined(Graph& graph) {
  GraphPtr copy = graph.copy();
  prepare_for_regions(*copy);
  torch::jit::ConstantPropagation(copy);
  torch::jit::LowerSimpleTuples(copy);
  GraphPtr made;
  with_callback(regions_callback(), "the program is no graph", [&](const py::object& outline) {
    const py::object result = outline(copy);
    if (!result.is_none()) {
      made = result.cast<GraphPtr>();
    }
  });
  if (made) {
    call_regions(*made);
    end_loops(*made);
  }
  return made;
}

}  // namespace

JointProgram::JointProgram(Graph& graph, GraphPtr outlined)
    : OwnedFunction(kName, graph.inputs().size()), program_(graph.copy()), outlined_(std::move(outlined)) {
  std::set<AttributePath> found;
  for (Node* node : all_nodes(*outlined_)) {
    if (node->kind() == c10::prim::GetAttr && may_hold_tensors(node->output()->type())) {
      if (auto path = path_of(node->output())) {
        found.insert(std::move(*path));
      }
    }
  }
  attributes_.assign(found.begin(), found.end());
}

JointProgram::~JointProgram() = default;

bool JointProgram::may_record_gradients(at::ArrayRef<c10::IValue> arguments) const {
  return c10::GradMode::is_enabled() && !refuse_mode() &&
         (std::any_of(arguments.begin(), arguments.end(), requires_gradient) ||
          std::any_of(attributes_.begin(), attributes_.end(), [&](const AttributePath& path) {
            return requires_gradient(value_at(path, arguments));
          }));
}

void JointProgram::make() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!plain_) {
    const std::string name = running_function(kName);
    attempt("joint_program", *program_, [&] { code_ = std::make_unique<Code>(outlined_, name); });
    plain_ = plain_function(*program_, name);
    made_ = true;
  }
}

bool JointProgram::call(Stack& stack, std::optional<size_t> bail_out, Run run) {
  if (!made_.load()) {
    make();
  }
  const bool records = may_record_gradients(torch::jit::last(stack, num_inputs()));
  has_recorded_.store(records, std::memory_order_relaxed);
  if (records && code_) {
    run(*code_);
    return true;
  }
  return plain_->call(stack, bail_out, run);
}

std::vector<JointFunction::PackedGraph> JointProgram::packed() const {
  std::vector<JointFunction::PackedGraph> found;
  for (const Node* node : all_nodes(*outlined_)) {
    if (const JointFunction* region = region_of(node)) {
      const auto more = region->packed();
      found.insert(found.end(), more.begin(), more.end());
    }
  }
  return found;
}

JointProgram::Shown JointProgram::shown() const {
  Shown made{outlined_->copy(), {}};
  Walk walk(*made.graph);
  for (Node* node : walk) {
    const JointFunction* region = region_of(node);
    const auto packed = region ? region->packed() : std::vector<JointFunction::PackedGraph>{};
    if (packed.empty()) {
      continue;
    }
    made.codes.push_back(packed.back().code);
    const torch::jit::WithInsertPoint before(node);
    const auto results = torch::jit::insertGraph(*made.graph, *packed.back().graph, node->inputs().slice(1));
    node->output()->replaceAllUsesWith(results.at(0));
    Node* function = node->input(0)->node();
    walk.destroy(node);
    walk.destroy(function);
  }
  return made;
}

std::vector<torch::jit::GraphFunction*> JointProgram::plain_functions() const {
  std::vector<torch::jit::GraphFunction*> found;
  if (plain()) {
    found.push_back(plain());
  }
  for (const Node* node : all_nodes(*outlined_)) {
    const JointFunction* region = region_of(node);
    if (torch::jit::GraphFunction* function = region ? region->plain() : nullptr) {
      found.push_back(function);
    }
  }
  return found;
}

GraphPtr as_joint_program(Graph& graph) {
  GraphPtr with_regions =
      takes_joint_functions(graph) && graph.outputs().size() == 1 ? outlined(graph) : nullptr;
  if (!with_regions) {
    return nullptr;
  }
  auto made = std::make_shared<Graph>();
  for (const torch::jit::Value* input : graph.inputs()) {
    // that of a value without a name is its number, which names nothing
    made->addInput(input->hasDebugName() ? input->debugNameBase() : "")->setType(input->type());
  }
  auto function = std::make_unique<JointProgram>(graph, std::move(with_regions));
  Node* call = owned_call(*made, std::move(function), kName, held_name(), made->inputs());
  made->appendNode(call->input(0)->node());
  made->appendNode(call);
  call->output()->setType(graph.outputs()[0]->type());
  made->registerOutput(call->output());
  return made;
}

const JointProgram* joint_program_of(const Graph& graph) {
  for (const Node* node : graph.nodes()) {
    if (const JointProgram* program = owned_by<JointProgram>(node, held_name())) {
      return program;
    }
  }
  return nullptr;
}

bool use_joint_functions(bool on) { return switched_on.exchange(on); }

bool takes_joint_functions(const Graph& graph) { return switched_on.load() && !is_part(graph); }

// Of the branch around it the other block has the differentiable graph, whose results no call hides.
GraphPtr noting_writes(Node* fallback, Graph& graph) {
  const GraphPtr program = fallback->owningGraph()->copy();  // that of an interpreter has nodes that free
  const std::vector<Node*> given = all_nodes(*fallback->owningGraph());
  const auto place = std::find(given.begin(), given.end(), fallback) - given.begin();
  Node* call = all_nodes(*program).at(static_cast<size_t>(place));
  std::vector<Node*> writers;
  Walk walk(*program);
  for (Node* node : walk) {
    const auto* schema = node->maybeSchema();
    if (node->kind() == c10::prim::Drop) {
      walk.destroy(node);
    } else if (schema && schema->is_mutable()) {
      writers.push_back(node);
    }
  }
  if (writers.empty()) {
    return nullptr;
  }
  GraphPtr noted = graph.copy();
  const Memory memory(program, op_facts().hidden_views);
  const auto note = [&](torch::jit::Value* outside, torch::jit::Value* inside) {
    if (std::any_of(writers.begin(), writers.end(),
                    [&](Node* node) { return memory.writes_to(node, {outside}); })) {
      note_write(inside);
    }
  };
  for (size_t i = 0; i < noted->inputs().size(); ++i) {
    note(call->input(i + 1), noted->inputs()[i]);
  }
  const auto results = call->owningBlock()->owningNode()->blocks()[0]->outputs();
  Node* together = noted->outputs()[0]->node();
  for (size_t i = 0; i < results.size(); ++i) {
    note(results[i], together->input(i));
  }
  return noted;
}

void leave_to_autodiff(const Node& differentiable) {
  if (switched_on.load()) {
    make_part(*differentiable.g(c10::attr::Subgraph));
    make_part(*differentiable.g(c10::attr::ReverseSubgraph));
  }
}

bool call_joint_program(Graph& graph, const Node* first) {
  if (!takes_joint_functions(graph) || !may_become_call(graph, first)) {
    return false;
  }
  const GraphPtr program = graph.copy();
  torch::jit::ProfilingRecord::removeProfilingNodes(program->block());
  GraphPtr with_regions = outlined(*program);
  if (!with_regions) {
    make_part(graph);
    return false;
  }
  auto function = std::make_unique<JointProgram>(*program, std::move(with_regions));
  Node* call = owned_call(graph, std::move(function), kName, held_name(), graph.inputs());
  become_call(graph, first, call);
  return true;
}

namespace {

// The programs that optimised code calls, also behind checks of gradients.
void visit_programs(Code& code, const std::function<void(const JointProgram&)>& visit) {
  static const auto fallback = c10::Symbol::attr("fallback");
  const auto visit_those_of = [&visit](torch::jit::GraphFunction& function) {
    if (function.get_executor().isOptimized()) {
      torch::jit::GraphExecutorState state = function.get_executor().getDebugState();
      for (auto& [spec, plan] : state.execution_plans) {
        visit_programs(plan.code, visit);
      }
    }
  };
  const auto& nodes = code.instructions_source();
  const auto own =
      std::find_if(nodes.begin(), nodes.end(), [](const Node* node) { return node != nullptr; });
  if (own == nodes.end()) {
    return;
  }
  for (const Node* node : all_nodes(*(*own)->owningGraph())) {  // our fallbacks are in this copy only
    if (const JointProgram* program = owned_by<JointProgram>(node, held_name())) {
      visit(*program);
    }
    if (const SettledBranches* settled = SettledBranches::of(node)) {
      for (const SettledFunction& copy : settled->functions()) {
        visit_those_of(*copy.function);
      }
    }
    if (node->kind() == c10::prim::Constant && node->hasAttribute(fallback)) {
      const auto type = node->output()->type()->cast<c10::FunctionType>();
      if (auto* function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr) {
        visit_those_of(*function);
      }
    }
  }
}

}  // namespace

std::vector<JointFunction::PackedGraph> packed_graphs(Code& code) {
  std::vector<JointFunction::PackedGraph> found;
  visit_programs(code, [&found](const JointProgram& program) {
    const auto more = program.packed();
    found.insert(found.end(), more.begin(), more.end());
  });
  return found;
}

std::vector<torch::jit::GraphExecutorState> plain_states(Code& code) {
  std::vector<torch::jit::GraphExecutorState> found;
  visit_programs(code, [&found](const JointProgram& program) {
    for (torch::jit::GraphFunction* function : program.plain_functions()) {
      if (function->get_executor().isOptimized()) {
        found.push_back(function->getDebugState());
      }
    }
  });
  return found;
}

Callback& regions_callback() {
  static Callback* c = new Callback;
  return *c;
}

}  // namespace tsfuser
