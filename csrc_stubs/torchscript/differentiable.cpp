// The hook by which Python rewrites the forward and the backward of a differentiable graph together.
//
// No pass of torch sees both graphs of a prim::DifferentiableGraph: each has an executor of its own. But
// when torch makes the operation of the node, both graphs are attributes of it, and no executor has them
// yet. So torch's operator is replaced by one that first gives the graphs to Python
// (tsfuser/frontends/torchscript/training/differentiable.py), and then makes the same operation.
//
// The check before such a graph is replaced, too. It sends calls for which autodiff's graphs would be wrong
// to the fallback: those with complex numbers, with tangents, and under functorch's transforms. What lists
// of tensors hold is not checked there: the graph itself looks at them.

#include "call/arguments.h"
#include "group/failures.h"
#include "torchscript/direct.h"
#include "torchscript/settled_branches.h"
#include "torchscript/hooks.h"
#include "torchscript/idle_results.h"
#include "torchscript/joint_function.h"
#include "torchscript/joint_program.h"
#include "torchscript/moving_values.h"
#include "torchscript/nodes.h"
#include "torchscript/prepare.h"
#include "torchscript/twins.h"
#include "torchscript/unchecked_graph.h"
#include "torchscript/written_dtypes.h"
#include "torchscript/written_results.h"
#include "torchscript/constants.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using GraphPtr = std::shared_ptr<Graph>;
using SavedValues = std::tuple<GraphPtr, GraphPtr, std::vector<int64_t>, std::vector<int64_t>>;

// The dims of a tensor of that type, outermost first, where its elements fill memory in an order that is
// not row-major; else none.
std::vector<int64_t> order_of(const c10::TypePtr& type) {
  const auto tensor = type->cast<c10::TensorType>();
  const auto sizes = tensor ? tensor->sizes().concrete_sizes() : std::nullopt;
  const auto strides = tensor ? tensor->strides().concrete_sizes() : std::nullopt;
  if (!sizes || !strides) {
    return {};
  }
  std::vector<int64_t> order(sizes->size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return (*strides)[a] > (*strides)[b]; });
  int64_t step = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if ((*sizes)[*d] != 1 && (*strides)[*d] != step) {
      return {};
    }
    step *= (*sizes)[*d];
  }
  return std::is_sorted(order.begin(), order.end()) ? std::vector<int64_t>() : order;
}

// Whether the program computes the value, so that nobody sees the strides of its gradient.
bool is_made(const torch::jit::Value* value) {
  static const auto checked = c10::Symbol::fromQualString("tsfuser::checked_batch");
  const Node* maker = value->node();
  if (is_gradient_check(maker) || maker->kind() == checked) {
    return is_made(maker->input(value->offset()));
  }
  return maker->kind() != c10::prim::Param && maker->kind() != c10::prim::GetAttr;
}

// For each gradient that the backward gives, the order of what it is the gradient of, as it was profiled;
// none where the program is given that.
std::vector<std::vector<int64_t>> orders_of_gradients(const Node* node) {
  std::vector<std::vector<int64_t>> orders;
  for (const int64_t i : node->is(c10::attr::df_output_vjps)) {
    orders.push_back(is_made(node->input(i)) ? order_of(node->input(i)->type()) : std::vector<int64_t>());
  }
  return orders;
}

bool is_profiled_as(const torch::jit::Value* value, std::initializer_list<at::ScalarType> dtypes,
                    size_t least_dims) {
  const auto tensor = value->type()->cast<c10::TensorType>();
  return tensor && tensor->scalarType() && tensor->dim().value_or(0) >= least_dims &&
         std::find(dtypes.begin(), dtypes.end(), *tensor->scalarType()) != dtypes.end();
}

// Whether the node casts to 32 bits: as autocast does, or as a trace has it of autocast.
bool widens(const Node* node) {
  if (node->kind() != c10::aten::to) {
    return node->kind() == c10::aten::_autocast_to_full_precision;
  }
  const auto dtype = node->schema().argumentIndexWithName("dtype");
  return dtype && known_int(node->input(*dtype)) == static_cast<int64_t>(at::kFloat);
}

// For each gradient that the backward gives, the input that it is for if that was profiled in 16 bits, else
// -1. None where no gradient in 32 bits is to be expected.
std::vector<int64_t> narrow_inputs(const Node* node) {
  const auto is_wide = [](const torch::jit::Value* value) { return is_profiled_as(value, {at::kFloat}, 2); };
  const auto given = node->inputs(), made = node->outputs();
  const auto nodes = all_nodes(*node->g(c10::attr::Subgraph));  // autodiff's formulas have branches
  std::vector<int64_t> narrow;
  if (std::any_of(given.begin(), given.end(), is_wide) || std::any_of(made.begin(), made.end(), is_wide) ||
      std::any_of(nodes.begin(), nodes.end(), widens)) {
    for (const int64_t i : node->is(c10::attr::df_output_vjps)) {
      narrow.push_back(is_profiled_as(node->input(i), {at::kHalf, at::kBFloat16}, 0) ? i : -1);
    }
  }
  return narrow;
}

// The inputs that were profiled in 16 bits.
std::vector<int64_t> half_inputs(const Node* node) {
  std::vector<int64_t> half;
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    if (is_profiled_as(node->input(i), {at::kHalf, at::kBFloat16}, 0)) {
      half.push_back(static_cast<int64_t>(i));
    }
  }
  return half;
}

// The inputs that were profiled with at most an eighth of the elements of another input or a result.
std::vector<int64_t> small_inputs(const Node* node) {
  const auto elements = [](const torch::jit::Value* value) {
    const auto tensor = value->type()->cast<c10::TensorType>();
    return tensor ? tensor->numel() : std::nullopt;
  };
  size_t most = 0;
  for (const auto& values : {node->inputs(), node->outputs()}) {
    for (const auto* value : values) {
      most = std::max(most, elements(value).value_or(0));
    }
  }
  std::vector<int64_t> small;
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    const auto count = elements(node->input(i));
    if (count && *count <= most / 8) {
      small.push_back(static_cast<int64_t>(i));
    }
  }
  return small;
}

// Sets the graphs of `node`, the forward's outputs that are kept, and those that a gradient comes for. False
// where a pass has failed, which Python has reported.
bool keep_less(Node* node) {
  bool has_failed = false;
  const auto set = [&has_failed, node](const py::object& pass) {
    GraphPtr plain = node->g(c10::attr::Subgraph)->copy();
    torch::jit::ConstantPropagation(plain);  // autodiff's formulas ask what is known by now
    plain_forms(*plain);
    const GraphPtr reverse = node->g(c10::attr::ReverseSubgraph)->copy();
    restore_twins(*reverse);
    const py::object result =
        pass(plain, reverse, node->i(c10::attr::f_real_outputs), node->is(c10::attr::df_input_vjps),
             node->is(c10::attr::df_input_captured_inputs), node->is(c10::attr::df_input_captured_outputs),
             orders_of_gradients(node), idle_results(*node), written_results(*node), narrow_inputs(node),
             own_inputs(*node), given_inputs(*node), small_inputs(node), node->is(c10::attr::df_output_vjps),
             half_inputs(node));
    has_failed = py::isinstance<py::bool_>(result);
    if (!has_failed && !result.is_none()) {
      const auto [forward, backward, gradients, outputs] = result.cast<SavedValues>();
      node->g_(c10::attr::Subgraph, forward);
      node->g_(c10::attr::ReverseSubgraph, backward);
      node->is_(c10::attr::df_input_vjps, gradients);
      node->is_(c10::attr::df_input_captured_outputs, outputs);
    }
  };
  with_callback(differentiable_callback(),
                "the pass over differentiable graphs returned something else than graphs", set);
  return !has_failed;
}

bool is_complex(const c10::IValue& value) {
  return value.isComplexDouble() ||
         (value.isTensor() && value.toTensor().defined() && value.toTensor().is_complex());
}

bool has_complex_numbers(const torch::jit::Block* block) {
  for (const Node* node : block->nodes()) {
    for (const auto* value : node->outputs()) {
      if (value->type()->kind() == c10::TypeKind::ComplexType) {
        return true;
      }
    }
    for (const auto* inner : node->blocks()) {
      if (has_complex_numbers(inner)) {
        return true;
      }
    }
  }
  return false;
}

// Whether a tensor that bounds a clamp may require a gradient in the differentiable graph: autodiff gives
// it none.
bool loses_gradients(const Node& differentiable) {
  const auto moving = moving_values(differentiable);
  const auto nodes = differentiable.g(c10::attr::Subgraph)->nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&moving](const Node* node) {
    const auto inputs = node->inputs();
    return node->kind() == c10::aten::clamp &&
           std::any_of(inputs.begin() + 1, inputs.end(),
                       [&moving](const torch::jit::Value* value) { return moving.count(value) != 0; });
  });
}

// Whether the program may see the memory of a value of a differentiable graph, whose results the If around
// it returns. The result of the `dropout` in it is another value.
bool is_seen(const torch::jit::Value* value, const Node& differentiable, const Node& dropout) {
  const size_t results = differentiable.i(c10::attr::f_real_outputs);
  const Node& choice = *differentiable.owningBlock()->owningNode();
  return value->node()->kind() == c10::prim::Param ||
         std::any_of(value->uses().begin(), value->uses().end(), [&](const torch::jit::Use& use) {
           if (use.user->kind() != c10::prim::Return) {
             return use.user != &dropout && !only_reads(*use.user);
           }
           const auto& outer = differentiable.outputs();
           return use.offset < results &&
                  std::any_of(
                      outer[use.offset]->uses().begin(), outer[use.offset]->uses().end(),
                      [&](const torch::jit::Use& given) {
                        return given.user->kind() != c10::prim::Return ||
                               !is_only_read(choice.output(given.offset));
                      });
         });
}

// Whether eager would return one tensor where autodiff's forward of a dropout that may drop nothing returns
// two.
bool shares_memory(const Node& differentiable) {
  static const auto dropout = c10::Symbol::fromQualString("aten::native_dropout");
  const auto nodes = differentiable.g(c10::attr::Subgraph)->nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&differentiable](const Node* node) {
    if (node->kind() != dropout) {
      return false;
    }
    const bool may_drop_nothing = known_double(node->input(1)).value_or(0) == 0;
    return may_drop_nothing && is_seen(node->input(0), differentiable, *node) &&
           is_seen(node->output(0), differentiable, *node);
  });
}

// Whether a differentiable graph of the block computes what autodiff's formulas are wrong about, whatever
// the call.
bool is_for_eager(const torch::jit::Block& block) {
  return std::any_of(block.nodes().begin(), block.nodes().end(), [](const Node* node) {
    return node->kind() == c10::prim::DifferentiableGraph &&
           (has_complex_numbers(node->g(c10::attr::Subgraph)->block()) || loses_gradients(*node) ||
            shares_memory(*node));
  });
}

// Whether autocast is on, and gives another dtype of 16 bits than the tensor's. The casts that torch writes
// into graphs are of float32 only: ops cast such a tensor themselves, and autodiff saves it as it was
// before.
bool is_cast_unseen(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    return false;
  }
  const auto device = tensor.device().type();
  return at::autocast::is_autocast_enabled(device) && at::autocast::get_autocast_dtype(device) != dtype;
}

// Whether autodiff's graphs would lose what eager's ops do with the value: they compute on detached
// tensors, whose tangents are gone, and their formulas do not conjugate, nor know casts that no graph shows.
bool needs_eager(const c10::IValue& value) {
  return is_complex(value) || (value.isTensor() && value.toTensor().defined() &&
                               (!is_readable(value.toTensor()) || is_cast_unseen(value.toTensor())));
}

bool needs_eager(at::ArrayRef<c10::IValue> values) {
  return refuse_mode() || std::any_of(values.begin(), values.end(),
                                      [](const c10::IValue& value) { return needs_eager(value); });
}

// What torch calls where a differentiable graph may not run, or runs directly (direct.h). What needs
// eager's autograd runs one op at a time: torch would make a differentiable graph of it again, the check of
// which would refuse the next such call, and so on.
class Fallback : public torch::jit::GraphFunction {
 public:
  // `direct` lives as long as the check that calls for it; may be null.
  Fallback(const torch::jit::GraphFunction& torchs, const GraphPtr& graph, bool always_plain,
           const DirectGraph* direct)
      : GraphFunction(torchs.qualname(), graph, nullptr),
        always_plain_(always_plain),
        inputs_(torchs.num_inputs()),
        direct_(direct) {
    keep_casts(*this);
  }

  size_t num_inputs() const override { return inputs_; }

  using GraphFunction::call;
  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out,
            c10::function_ref<void(const torch::jit::Code&)> run) override {
    if (direct_ && std::exchange(next_direct(), nullptr) == direct_) {
      const size_t below = stack.size() - num_inputs();
      direct_->run(stack);
      std::vector<c10::IValue> results = torch::jit::pop(stack, stack.size() - below);
      stack.emplace_back(c10::ivalue::Tuple::create(std::move(results)));
      return false;  // nothing is left to run
    }
    if (!always_plain_ && !needs_eager(torch::jit::last(stack, num_inputs()))) {
      return GraphFunction::call(stack, bail_out, run);
    }
    std::call_once(made_, [this] { code_ = eager_code(*graph(), name()); });
    run(*code_);
    return true;
  }

 private:
  const bool always_plain_;
  const size_t inputs_;
  const DirectGraph* const direct_;
  std::once_flag made_;
  std::unique_ptr<torch::jit::Code> code_;
};

bool is_ours(const torch::jit::GraphFunction* fallback) {
  return dynamic_cast<const Fallback*>(fallback) != nullptr;
}

bool has_torchs_fallbacks(const Node& check) {
  const auto found = fallbacks(check);
  return std::any_of(found.begin(), found.end(), [](const auto& each) { return !is_ours(each.second); });
}

// Has our fallbacks take the places of torch's behind the check.
void replace_fallbacks(const Node& check, bool always_plain, const DirectGraph* direct) {
  for (const auto& [call, function] : fallbacks(check)) {
    if (always_plain || !is_ours(function)) {  // neither is ever destroyed: types point to functions
      const bool joint = takes_joint_functions(*call->owningGraph());
      const GraphPtr noted = joint ? noting_writes(call, *function->graph()) : nullptr;
      if (joint && !noted && !always_plain) {  // torch's is a joint program by now
        keep_casts(*function);
        continue;
      }
      const GraphPtr graph = noted ? noted : function->graph();
      auto* ours = new Fallback(*function, graph, always_plain, direct);
      call->input(0)->setType(c10::FunctionType::create(ours));
    }
  }
}

// The results of a differentiable graph that may be views of a value inside of it. Torch lets none of them
// share memory with another, or with an input.
std::vector<size_t> views_given(const Node& differentiable) {
  const auto results = differentiable.g(c10::attr::Subgraph)->outputs();
  std::vector<size_t> views;
  for (size_t i = 0; i < static_cast<size_t>(differentiable.i(c10::attr::f_real_outputs)); ++i) {
    const Node* maker = results[i]->node();
    const auto* schema = (is_idle_cast(maker) ? maker->input(0)->node() : maker)->maybeSchema();
    if (schema && schema->returns().size() == 1 && schema->returns()[0].alias_info()) {
      views.push_back(i);
    }
  }
  return views;
}

// Makes of a view of a tensor that nobody else has a tensor of its own, on the same memory. Who writes to
// the view would be told that it is one of a leaf, since what it is a view of has no history.
void release_view(c10::IValue& value) {
  const at::Tensor& view = value.toTensor();
  if (!view.defined() || !view.is_view() || !view.requires_grad()) {
    return;
  }
  at::Tensor own = view.tensor_data();  // counts its versions together with the view
  torch::autograd::impl::set_gradient_edge(own, torch::autograd::impl::gradient_edge(view));
  value = std::move(own);
}

// What a node has as an attribute, for tools, where its operation is not torch's own.
struct HeldProgram : torch::CustomClassHolder {
  explicit HeldProgram(std::shared_ptr<torch::jit::Code> code) : code(std::move(code)) {}
  const std::shared_ptr<torch::jit::Code> code;
};

c10::Symbol program_name() {
  static const auto name = c10::Symbol::attr("program");
  return name;
}

// Marks a node whose forward runs one op at a time: it has no executors.
c10::Symbol eager_name() {
  static const auto name = c10::Symbol::attr("eager");
  return name;
}

}  // namespace

std::vector<DifferentiableExecutors> differentiable_executors(torch::jit::Code& code) {
  const auto& torchs_forward = code.diff_graph_op_executors();
  const auto& torchs_backward = code.grad_executors();
  size_t next = 0;
  std::vector<DifferentiableExecutors> executors;
  std::unordered_set<const Node*> seen;
  for (const auto& packed : packed_graphs(code)) {
    const auto more = differentiable_executors(*packed.code);
    executors.insert(executors.end(), more.begin(), more.end());
  }
  for (Node* node : code.instructions_source()) {
    if (!node || !seen.insert(node).second) {
      continue;
    }
    if (node->kind() != c10::prim::DifferentiableGraph || node->hasAttribute(eager_name())) {
      continue;
    }
    if (node->hasAttribute(program_name())) {
      const auto held =
          c10::static_intrusive_pointer_cast<HeldProgram>(node->ival(program_name()).toCapsule());
      executors.push_back({held->code->diff_graph_op_executors().at(0), held->code->grad_executors().at(0)});
    } else {
      executors.push_back({torchs_forward.at(next), torchs_backward.at(next)});
      ++next;
    }
  }
  return executors;
}

namespace {

// None where a pass in Python has failed.
std::optional<torch::jit::Operation> with_our_graphs(const Node* node) {
  const auto direct = DirectGraph::marked(*const_cast<Node*>(node));
  const auto plain = UncheckedGraph::of(*node);
  if (!keep_less(const_cast<Node*>(node))) {  // the executor's own copy of the graph
    return std::nullopt;
  }
  keep_branches(*node->g(c10::attr::Subgraph));
  keep_branches(*node->g(c10::attr::ReverseSubgraph));
  auto run = torchs_operation(node);
  auto views = views_given(*node);
  const bool hidden = !views.empty() || plain;  // from tools that look for torch's operation
  const auto program = direct || hidden ? DirectGraph::program_of(*node, run) : nullptr;
  if (direct && (!plain || plain->asks_for_dtypes_only())) {
    direct->take(*node, program, plain);
  }
  if (!hidden) {
    return run;
  }
  const_cast<Node*>(node)->ival_(program_name(),
                                 c10::IValue::make_capsule(c10::make_intrusive<HeldProgram>(program)));
  const size_t results = node->outputs().size();
  return torch::jit::Operation([=](torch::jit::Stack& stack) mutable {
    if (plain && plain->takes(stack)) {
      plain->run(stack);
      return;
    }
    run(stack);
    for (const size_t i : views) {
      release_view(torch::jit::peek(stack, i, results));
    }
  });
}

// Of a joint graph, by an autograd node of ours.
torch::jit::Operation joint_operation(Node* node) {
  keep_branches(*node->g(c10::attr::Subgraph));
  keep_branches(*node->g(c10::attr::ReverseSubgraph));
  auto run = torchs_operation(node);
  const auto program = DirectGraph::program_of(*node, run);
  const auto direct = std::make_shared<DirectGraph>();
  direct->take(*node, program, nullptr);
  node->ival_(program_name(), c10::IValue::make_capsule(c10::make_intrusive<HeldProgram>(program)));
  const auto views = views_given(*node);
  const size_t results = node->outputs().size();
  return torch::jit::Operation([=](torch::jit::Stack& stack) mutable {
    if (direct->takes_calls()) {
      direct->run(stack);
    } else {
      run(stack);
    }
    for (const size_t i : views) {
      release_view(torch::jit::peek(stack, i, results));
    }
  });
}

// Of a check that sends all calls to the fallback, for joint graphs.
c10::Symbol refusing_name() {
  static const auto name = c10::Symbol::attr("refuses_all");
  return name;
}

// Whether no call comes to the differentiable graph. The operation of the check has been made by now.
bool is_idle(const Node& differentiable) {
  const Node* choice = differentiable.owningBlock()->owningNode();
  return choice && choice->kind() == c10::prim::If && is_gradient_check(choice->input()->node()) &&
         choice->input()->node()->hasAttribute(refusing_name());
}

// Of the forward, with eager's autograd. What torch would run knows nothing of the calls that autodiff's
// formulas are wrong for, and may save what the program writes to.
torch::jit::Operation without_formulas(Node* node) {
  node->i_(eager_name(), 1);
  const auto plain = UncheckedGraph::always(*node);
  return [plain](torch::jit::Stack& stack) { plain->run(stack); };
}

// What a pass may set of a differentiable graph.
class Graphs {
 public:
  explicit Graphs(const Node& node)
      : forward_(node.g(c10::attr::Subgraph)),
        backward_(node.g(c10::attr::ReverseSubgraph)),
        gradients_(node.is(c10::attr::df_input_vjps)),
        outputs_(node.is(c10::attr::df_input_captured_outputs)) {}

  void put_back(Node& node) const {
    node.g_(c10::attr::Subgraph, forward_);
    node.g_(c10::attr::ReverseSubgraph, backward_);
    node.is_(c10::attr::df_input_vjps, gradients_);
    node.is_(c10::attr::df_input_captured_outputs, outputs_);
  }

 private:
  const GraphPtr forward_, backward_;
  const std::vector<int64_t> gradients_, outputs_;
};

}  // namespace

torch::jit::Operation make_differentiable_graph(const Node* node) {
  if (!pass_enabled.load(std::memory_order_relaxed)) {
    return torchs_operation(node);
  }
  if (const auto* same = DirectGraph::being_copied()) {
    return *same;
  }
  if (is_joint(*node)) {
    return joint_operation(const_cast<Node*>(node));
  }
  if (is_idle(*node)) {
    return torchs_operation(node);
  }
  leave_to_autodiff(*node);
  auto* own = const_cast<Node*>(node);  // the executor's own copy of the graph
  const Graphs before(*node);
  try {
    if (auto operation = with_our_graphs(node)) {
      end_of_pass("differentiable_graph");
      return *operation;
    }
  } catch (...) {
    before.put_back(*own);
    pass_failed("differentiable_graph", *node->g(c10::attr::Subgraph));
  }
  return without_formulas(own);
}

namespace {

torch::jit::Operation with_our_check(const Node* node, torch::jit::Operation check) {
  const bool joint = takes_joint_functions(*node->owningGraph());
  if (joint) {
    const_cast<Node*>(node)->i_(refusing_name(), 1);  // the executor's own copy of the graph
  }
  bool never = false;
  for (const auto& use : node->outputs().back()->uses()) {
    for (const auto* block : use.user->blocks()) {
      never |= is_for_eager(*block);
    }
  }
  const bool replaces = has_torchs_fallbacks(*node);
  const std::shared_ptr<DirectGraph> direct = never || !replaces ? nullptr : DirectGraph::behind(*node);
  replace_fallbacks(*node, never, direct.get());
  const size_t inputs = node->inputs().size();
  const ProfiledDtypes profiled = written_dtypes(*node);
  return [=](torch::jit::Stack& stack) mutable {
    const auto given = torch::jit::last(stack, inputs);
    const bool refused =
        never || joint || !c10::GradMode::is_enabled() || needs_eager(given) || differ(profiled, given);
    check(stack);
    if (refused) {
      stack.back() = false;
    } else if (direct && stack.back().toBool() && direct->takes_calls()) {
      next_direct() = direct.get();
      stack.back() = false;
    }
  };
}

}  // namespace

// The check sends what needs eager's autograd to the fallback, and what needs none: a result of a
// differentiable graph requires a gradient in whatever mode. Where that cannot be told, it sends all calls.
torch::jit::Operation make_gradient_check(const Node* node) {
  auto check = torchs_operation(node);
  if (!pass_enabled.load(std::memory_order_relaxed)) {
    return check;
  }
  try {
    auto operation = with_our_check(node, check);
    end_of_pass("gradient_check");
    return operation;
  } catch (...) {
    pass_failed("gradient_check", *node->owningGraph());
  }
  replace_fallbacks(*node, /*always_plain=*/true, nullptr);
  return [check](torch::jit::Stack& stack) mutable {
    check(stack);
    stack.back() = false;
  };
}

}  // namespace tsfuser
