// A function whose forward and backward one joint graph makes. See joint_function.h.

#include "torchscript/joint_function.h"
#include "torchscript/owned_call.h"
#include "call/arguments.h"
#include "group/failures.h"
#include "torchscript/hooks.h"
#include "torchscript/nodes.h"
#include "torchscript/settled_branches.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Code;
using torch::jit::Graph;
using torch::jit::GraphFunction;
using torch::jit::Node;
using torch::jit::Stack;
using GraphPtr = std::shared_ptr<Graph>;

constexpr const char* kName = "joint";
constexpr size_t kMostPacked = 16;  // of one function

std::atomic<bool> switched_on{false};

// Of the first input of a graph that is not to become a call again: a program's graph that Python has
// refused, and those inside of a packed one.
constexpr const char* kPart = "joint_input";

c10::Symbol held_name() {
  static const auto name = c10::Symbol::attr("joint_function");
  return name;
}

bool autocasts(at::DeviceType device) { return at::autocast::is_autocast_enabled(device); }

// What a packed graph depends on, besides sizes; whether there may be one. Numbers are values in it.
bool describe(at::ArrayRef<c10::IValue> arguments, std::vector<int64_t>& words) {
  bool records = false;
  for (const c10::IValue& value : arguments) {
    if (!value.isTensor()) {
      if (!value.isInt() && !value.isDouble() && !value.isBool()) {
        return false;
      }
      words.push_back(value.isInt() ? -1 : value.isDouble() ? -2 : -3);
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !is_readable(tensor) || tensor.is_complex() || tensor.is_inference() ||
        tensor.layout() != at::kStrided || autocasts(tensor.device().type())) {
      return false;
    }
    records |= tensor.requires_grad();
    words.push_back(static_cast<int64_t>(tensor.scalar_type()));
    words.push_back(static_cast<int64_t>(tensor.device().type()) << 16 | (tensor.device().index() + 1));
    words.push_back(tensor.dim() << 1 | static_cast<int64_t>(tensor.requires_grad()));
  }
  return records;
}

GraphPtr program_of(Graph& graph) {
  auto copy = graph.copy();
  torch::jit::ProfilingRecord::removeProfilingNodes(copy->block());
  return copy;
}

std::unique_ptr<GraphFunction> function_of(const GraphPtr& graph, const std::string& name) {
  auto part = graph->copy();
  part->inputs()[0]->setDebugName(kPart);
  auto made = std::make_unique<GraphFunction>(c10::QualifiedName(name), std::move(part), nullptr);
  keep_casts(*made);
  return made;
}

}  // namespace

JointFunction::JointFunction(GraphPtr graph, std::string name)
    : graph_(std::move(graph)), plain_(function_of(graph_, name)), name_(std::move(name)) {}

JointFunction::~JointFunction() = default;

bool JointFunction::call(Stack& stack, std::optional<size_t> bail_out, Run run) {
  if (const Code* code = code_for(torch::jit::last(stack, num_inputs()))) {
    run(*code);
    return true;
  }
  return plain_->call(stack, bail_out, run);
}

void JointFunction::run(Stack& stack) {
  call(stack, std::nullopt, [&stack](const Code& code) { torch::jit::InterpreterState(code).run(stack); });
}

size_t JointFunction::num_inputs() const { return graph_->inputs().size(); }

const c10::QualifiedName& JointFunction::qualname() const { return name_; }

const c10::FunctionSchema& JointFunction::getSchema() const {
  static const c10::FunctionSchema schema(kName, "", {}, {}, /*is_vararg=*/true, /*is_varret=*/true);
  return schema;
}

std::vector<GraphPtr> JointFunction::packed() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<GraphPtr> found;
  for (const auto& [words, made] : known_) {
    if (made.graph) {
      found.push_back(made.graph);
    }
  }
  return found;
}

// Null where the program's graph runs.
const Code* JointFunction::code_for(at::ArrayRef<c10::IValue> arguments) {
  Words words;
  if (!c10::GradMode::is_enabled() || refuse_mode() || !describe(arguments, words)) {
    return nullptr;
  }
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = known_.find(words);
    if (found != known_.end() || known_.size() >= kMostPacked) {
      return found == known_.end() ? nullptr : found->second.code.get();
    }
  }
  Packed made;
  attempt("joint_graph", *graph_, [&] { made = pack(arguments); });
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  return known_.emplace(std::move(words), std::move(made)).first->second.code.get();  // the first one stays
}

JointFunction::Packed JointFunction::pack(at::ArrayRef<c10::IValue> arguments) const {
  const GraphPtr graph = graph_->copy();
  std::vector<bool> wanted;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_tensor = arguments[i].isTensor();
    wanted.push_back(is_tensor && arguments[i].toTensor().requires_grad());
    if (is_tensor) {
      graph->inputs()[i]->setType(c10::TensorType::create(arguments[i].toTensor()));
    }
  }
  Packed made;
  with_callback(joint_callback(), "the joint graph is no graph", [&](const py::object& pack) {
    const py::object result = pack(graph, wanted);
    if (!result.is_none()) {
      made.graph = result.cast<GraphPtr>();
    }
  });
  if (made.graph) {
    made.code = std::make_unique<Code>(made.graph, name_.name());
  }
  return made;
}

bool use_joint_functions(bool on) { return switched_on.exchange(on); }

bool takes_joint_functions(const Graph& graph) {
  return switched_on.load() && !graph.inputs().empty() && graph.inputs()[0]->debugNameBase() != kPart;
}

bool call_joint_function(Graph& graph, const Node* first) {
  if (!takes_joint_functions(graph) || !may_become_call(graph, first)) {
    return false;
  }
  Node* call =
      owned_call(graph, std::make_unique<JointFunction>(program_of(graph), kName), kName, held_name());
  become_call(graph, first, call);
  return true;
}

std::vector<GraphPtr> packed_graphs(Code& code) {
  static const auto fallback = c10::Symbol::attr("fallback");
  std::vector<GraphPtr> found;
  const auto add = [&found](const std::vector<GraphPtr>& more) {
    found.insert(found.end(), more.begin(), more.end());
  };
  const auto& nodes = code.instructions_source();
  const auto own =
      std::find_if(nodes.begin(), nodes.end(), [](const Node* node) { return node != nullptr; });
  if (own == nodes.end()) {
    return found;
  }
  for (const Node* node : all_nodes(*(*own)->owningGraph())) {  // our fallbacks are in this copy only
    if (JointFunction* function = owned_by<JointFunction>(node, held_name())) {
      add(function->packed());
    }
    if (node->kind() == c10::prim::Constant && node->hasAttribute(fallback)) {
      const auto type = node->output()->type()->cast<c10::FunctionType>();
      auto* function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr;
      if (function != nullptr && function->get_executor().isOptimized()) {
        torch::jit::GraphExecutorState state = function->get_executor().getDebugState();
        for (auto& [spec, plan] : state.execution_plans) {
          add(packed_graphs(plan.code));
        }
      }
    }
  }
  return found;
}

bool is_joint(const Node& differentiable) {
  static const auto name = c10::Symbol::attr("joint");
  return differentiable.hasAttribute(name);
}

Callback& joint_callback() {
  static Callback* c = new Callback;
  return *c;
}

}  // namespace tsfuser
