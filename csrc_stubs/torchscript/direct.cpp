#include "torchscript/direct.h"
#include "call/counters.h"
#include "group/failures.h"
#include "torchscript/joint_function.h"
#include "torchscript/nodes.h"
#include "torchscript/unchecked_graph.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/lower_grad_of.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace tsfuser {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Node;
using torch::jit::Stack;
using NodePtr = decltype(std::declval<torch::autograd::Node&>().getptr());  // torch has changed the type

thread_local const torch::jit::Operation* copied = nullptr;

struct Copying {
  explicit Copying(const torch::jit::Operation& operation) { copied = &operation; }
  ~Copying() { copied = nullptr; }
};

bool is_defined(const at::Tensor& tensor) { return tensor.defined(); }

bool is_tensor_type(const c10::TypePtr& type) { return type->kind() == c10::TypeKind::TensorType; }

bool has_lists_of_tensors(at::ArrayRef<torch::jit::Value*> values) {
  return std::any_of(values.begin(), values.end(), [](const torch::jit::Value* value) {
    return value->type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

// Whether an op of the block may give an undefined gradient where it is given a defined one.
bool may_lack_gradients(const torch::jit::Block& block) {
  static const auto kind = c10::Symbol::fromQualString("aten::_batch_norm_impl_index_backward");
  constexpr size_t weight = 3;
  return std::any_of(block.nodes().begin(), block.nodes().end(), [](const Node* node) {
    const auto inner = node->blocks();
    return (node->kind() == kind && !is_tensor_type(node->input(weight)->type())) ||
           std::any_of(inner.begin(), inner.end(),
                       [](const torch::jit::Block* block) { return may_lack_gradients(*block); });
  });
}

// Whether the value may be an empty batch, which has several dims. What stands for a result that is not kept
// (`tsfuser::kept_result`) is empty, too, and has one.
bool is_empty(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         at::isFloatingType(value.toTensor().scalar_type()) && value.toTensor().dim() > 1 &&
         value.toTensor().numel() == 0;
}

}  // namespace

// What autograd runs for the backward of a call: as torch's own.
class DirectBackward : public torch::autograd::Node {
 public:
  explicit DirectBackward(std::shared_ptr<const DirectGraph> graph) : graph_(std::move(graph)) {
    const size_t saved = graph_->saved_inputs_.size() + graph_->saved_outputs_.size();
    places_.reserve(saved);
    tensors_.reserve(saved);
    next_edges_.reserve(graph_->differentiated_.size());
  }

  static auto make(std::shared_ptr<const DirectGraph> graph) {
    if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
      return std::make_shared<DirectBackward>(std::move(graph));
    } else {
      return c10::make_intrusive<DirectBackward>(std::move(graph));
    }
  }

  void add_differentiated(const c10::IValue& input) {
    const bool given = input.isTensor() && input.toTensor().defined();
    add_next_edge(given ? torch::autograd::impl::gradient_edge(input.toTensor()) : torch::autograd::Edge());
  }

  void save(const c10::IValue& value, size_t position, bool is_output) {
    places_.push_back({static_cast<uint32_t>(position), value.isTensor()});
    if (value.isTensor()) {
      tensors_.emplace_back(value.toTensor(), is_output);
    } else {
      others_.push_back(value);
    }
  }

  // A gradient comes to this node that is always undefined.
  void add_undefined_output() { add_input_metadata(Node::undefined_input{}); }

  // The gradient of `output` comes to this node.
  void add_output(const c10::IValue& value) {
    at::Tensor output = value.toTensor();
    if (output.defined() &&
        (at::isFloatingType(output.scalar_type()) || at::isComplexType(output.scalar_type()))) {
      torch::autograd::create_gradient_edge(output, getptr());
      output.set_requires_grad(true);
    } else {
      add_undefined_output();
    }
  }

  variable_list apply(variable_list&& gradients) override {
    if (C10_UNLIKELY(graph_->is_joint_ && std::none_of(gradients.begin(), gradients.end(), is_defined))) {
      return variable_list(graph_->differentiated_.size());
    }
    const bool is_exact = graph_->is_joint_ && graph_->leading_again_.empty();
    const bool again =
        graph_->is_joint_ && (graph_->runs_again(gradients) || (is_exact && lacks_some(gradients)));
    const Missing missing =
        graph_->is_joint_ && !(again && is_exact) ? zeros_for_missing(gradients, again) : Missing();
    Stack stack;
    stack.reserve(gradients.size() + places_.size() + 16);
    for (at::Tensor& gradient : gradients) {
      stack.emplace_back(std::move(gradient));
    }
    unpack(stack);
    const bool lacking = graph_->run_backward(stack, again);
    const auto results = torch::jit::pop(stack).toTuple();
    variable_list given;
    given.reserve(results->elements().size());
    for (const c10::IValue& result : results->elements()) {
      const bool asked = result.isTensor() && task_should_compute_output(given.size());
      at::Tensor gradient = asked ? result.toTensor() : at::Tensor();
      const auto& edge = next_edge(given.size());
      if (C10_UNLIKELY(lacking && asked && !gradient.defined() && edge.is_valid())) {
        gradient = edge.function->input_metadata(edge.input_nr).zeros_like();
      }
      given.push_back(std::move(gradient));
    }
    if (C10_UNLIKELY(!missing.empty())) {
      graph_->drop_unreached(given, missing, again);
    }
    return given;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& tensor : tensors_) {
      tensor.reset_data();
    }
  }

  std::string name() const override {
    return "torch::jit::(anonymous namespace)::DifferentiableGraphBackward";
  }

 private:
  using Missing = DirectGraph::Missing;

  // Whether a gradient of a result is missing.
  bool lacks_some(const variable_list& gradients) const {
    bool found = false;
    for (size_t i = 0; i < graph_->result_gradients_; ++i) {
      found |= !gradients[i].defined() && graph_->gradients_[i] >= 0;
    }
    return found;
  }

  // Which gradients are missing; empty if none is. They become zeros. Those of saved values are read in
  // second derivatives only.
  Missing zeros_for_missing(variable_list& gradients, bool again) {
    Missing missing;
    const size_t read = again ? gradients.size() : graph_->result_gradients_;
    for (size_t i = 0; i < read; ++i) {
      if (!gradients[i].defined() && graph_->gradients_[i] >= 0) {
        missing.resize(gradients.size(), false);
        missing[i] = true;
        gradients[i] = input_metadata(i).zeros_like();
      }
    }
    return missing;
  }

  void unpack(Stack& stack) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const NodePtr self = getptr();
    const size_t below = stack.size();
    stack.resize(below + places_.size());
    auto tensor = tensors_.begin();
    auto other = others_.begin();
    for (const Place& place : places_) {
      if (place.is_tensor) {
        stack[below + place.position] = (tensor++)->unpack(self);
      } else {
        stack[below + place.position] = *other++;
      }
    }
  }

  const std::shared_ptr<const DirectGraph> graph_;
  struct Place {
    uint32_t position;
    bool is_tensor;
  };
  c10::SmallVector<Place, 24> places_;  // of what is saved, in order
  std::vector<SavedVariable> tensors_;
  c10::SmallVector<c10::IValue, 4> others_;
};

const torch::jit::Operation* DirectGraph::being_copied() { return copied; }

std::shared_ptr<torch::jit::Code> DirectGraph::program_of(const Node& node,
                                                          const torch::jit::Operation& operation) {
  const auto graph = std::make_shared<torch::jit::Graph>();
  std::vector<torch::jit::Value*> inputs;
  Node* alone = graph->createClone(const_cast<Node*>(&node), [&](torch::jit::Value* value) {
    return graph->addInput()->setType(value->type());
  });
  graph->insertNode(alone);
  for (torch::jit::Value* output : alone->outputs()) {
    graph->registerOutput(output);
  }
  const Copying copying(operation);
  return std::make_shared<torch::jit::Code>(graph, "");
}

void DirectGraph::take(const Node& node, std::shared_ptr<torch::jit::Code> program,
                       std::shared_ptr<const UncheckedGraph> plain) {
  const auto forwards = program->diff_graph_op_executors(), backwards = program->grad_executors();
  auto& forward = *node.g(c10::attr::Subgraph);
  const auto& gradients = node.is(c10::attr::df_input_vjps);
  const bool known = forwards.size() == 1 && backwards.size() == 1 &&
                     !has_lists_of_tensors(forward.inputs()) && !has_lists_of_tensors(forward.outputs()) &&
                     std::all_of(gradients.begin(), gradients.end(), [&forward](int64_t i) {
                       return is_tensor_type(forward.outputs()[i]->type());
                     });
  if (!known) {
    return;
  }
  forward_executor_ = forwards[0];
  backward_executor_ = backwards[0];
  note_what_is_saved(node);
  const auto& backward = node.g(c10::attr::ReverseSubgraph);
  is_joint_ = is_joint(node);
  static const auto again = c10::Symbol::attr("again");
  if (is_joint_) {
    const auto lowered = node.g(again)->copy();
    torch::jit::LowerGradOf(*lowered);
    plain_backward_ = std::make_unique<torch::jit::Code>(lowered, "");
    leading_ = node.is(c10::Symbol::attr("leading"));
    leading_again_ = node.is(c10::Symbol::attr("leading_again"));
  } else if (may_lack_gradients(*backward->block())) {
    const auto plain = backward->copy();
    torch::jit::LowerGradOf(*plain);
    plain_backward_ = std::make_unique<torch::jit::Code>(plain, "");
  }
  code_ = std::move(program);
  plain_ = std::move(plain);
}

void DirectGraph::note_what_is_saved(const Node& node) {
  auto& forward = *node.g(c10::attr::Subgraph);
  const auto outputs = forward.outputs();
  inputs_ = forward.inputs().size();
  results_ = node.i(c10::attr::f_real_outputs);
  std::vector<int64_t> numbers;  // of the outputs that the list of steps gives; -1: it does not
  int64_t next = 0;
  for (size_t j = 0; j < outputs.size(); ++j) {
    const bool given = j >= results_ && outputs[j]->node() == forward.param_node();
    numbers.push_back(given ? -1 : next++);
    if (given) {
      given_.push_back(j);
    }
  }
  outputs_ = next;
  for (const int64_t j : node.is(c10::attr::df_input_vjps)) {
    gradients_.push_back(numbers[j]);
    result_gradients_ += j < results_;
  }
  differentiated_ = node.is(c10::attr::df_output_vjps);
  size_t position = 0;
  for (const int64_t i : node.is(c10::attr::df_input_captured_inputs)) {
    saved_inputs_.push_back({i, position++});
  }
  for (const int64_t j : node.is(c10::attr::df_input_captured_outputs)) {
    if (numbers[j] < 0) {
      saved_inputs_.push_back({static_cast<int64_t>(outputs[j]->offset()), position++});
    } else {
      saved_outputs_.push_back({numbers[j], position++});
    }
  }
}

bool DirectGraph::takes_calls() {
  if (!code_ || !torch::jit::getGraphExecutorOptimize()) {
    return false;
  }
  if (C10_UNLIKELY(state_.load(std::memory_order_acquire) == State::Profiling)) {
    look_at_plans();
  }
  return true;
}

void DirectGraph::look_at_plans() {
  if (!forward_executor_->isOptimized() || !backward_executor_->isOptimized()) {
    return;
  }
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || state_ != State::Profiling) {
    return;
  }
  Stack none;  // only profiling looks at arguments
  const auto forward = forward_executor_->getPlanFor(none).graph;
  const auto backward = backward_executor_->getPlanFor(none).graph;
  const bool made = attempt("step_lists", *forward, [&] {
    forward_ = StepList::of(*forward, given_);
    backward_ = StepList::of(*backward);
    end_of_pass("step_lists");
  });
  if (!made) {
    forward_ = nullptr;
  }
  state_.store(forward_ && backward_ ? State::Ready : State::Never, std::memory_order_release);
}

namespace {

bool has_history(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().unsafeGetTensorImpl()->autograd_meta() != nullptr;
}

// The tensor without its history, where it has one: its memory and version counter, and nothing else.
void forget_history(c10::IValue& value) {
  if (has_history(value)) {
    value = value.toTensor().tensor_data();
  }
}

// Whether the program may hold the tensor itself, as an input that an op has handed on: it is not to get the
// history of an output.
bool is_held(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().use_count() > 1;
}

// The same for all outputs; those that are one tensor stay one.
void forget_histories(Stack& stack, size_t outputs) {
  for (size_t i = stack.size() - outputs; i < stack.size(); ++i) {
    if (C10_UNLIKELY(has_history(stack[i]) || is_held(stack[i]))) {
      const c10::IValue before = stack[i];
      stack[i] = before.toTensor().tensor_data();
      for (size_t j = i + 1; j < stack.size(); ++j) {
        if (stack[j].is(before)) {
          stack[j] = stack[i];
        }
      }
    }
  }
}

}  // namespace

void DirectGraph::run(Stack& stack) const {
  if (plain_ && plain_->takes(stack)) {
    return plain_->run(stack);
  }
  const auto node = DirectBackward::make(shared_from_this());
  const auto inputs = torch::jit::last(stack, inputs_);
  for (const int64_t i : differentiated_) {
    node->add_differentiated(inputs[i]);
  }
  for (const Saved& saved : saved_inputs_) {
    node->save(inputs[saved.index], saved.position, /*is_output=*/false);
  }
  run_forward(stack);
  const auto outputs = torch::jit::last(stack, outputs_);
  for (const int64_t j : gradients_) {
    if (j < 0) {
      node->add_undefined_output();
    } else {
      node->add_output(outputs[j]);
    }
  }
  for (const Saved& saved : saved_outputs_) {
    node->save(outputs[saved.index], saved.position, /*is_output=*/true);
  }
  torch::jit::drop(stack, outputs.size() - results_);
}

namespace {

// As torch's interpreter does, with the traceback that TorchScript programs get for an error of torch's.
void run_with_traceback(const StepList& steps, Stack& stack) {
  try {
    steps.run(stack);
  } catch (const c10::Error& error) {
    const auto place = StepList::take_failed_place();
    const bool keeps_type = dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
    if (!place || keeps_type) {
      throw;
    }
    throw std::runtime_error(
        "The following operation failed in the TorchScript interpreter.\n"
        "Traceback of TorchScript (most recent call last):\n" +
        place->str() + "RuntimeError: " + error.what_without_backtrace());
  } catch (...) {
    StepList::take_failed_place();
    throw;
  }
}

}  // namespace

namespace {

// The casts of autocast are ops of a joint graph; others it must not have.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(bool on) {
    if (on) {
      guard_.emplace(c10::autocast_dispatch_keyset);
    }
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace

void DirectGraph::run_forward(Stack& stack) const {
  const bool ready = state_.load(std::memory_order_acquire) == State::Ready;
  if (!ready || forward_->has_tensor_ops()) {
    for (size_t i = stack.size() - inputs_; i < stack.size(); ++i) {
      forget_history(stack[i]);
    }
  }
  const at::NoGradGuard no_grad;
  const WithoutAutocast casts(is_joint_);
  if (ready) {
    run_with_traceback(*forward_, stack);
    counters().add(Count::DirectCalls);
  } else {
    forward_executor_->run(stack);
    const auto first = stack.end() - static_cast<std::ptrdiff_t>(outputs_ + given_.size());
    for (auto j = given_.rbegin(); j != given_.rend(); ++j) {
      stack.erase(first + static_cast<std::ptrdiff_t>(*j));
    }
  }
  forget_histories(stack, outputs_);
}

bool DirectGraph::runs_again(const variable_list& gradients) const {
  const auto of_saved = gradients.begin() + static_cast<std::ptrdiff_t>(result_gradients_);
  return c10::GradMode::is_enabled() || std::any_of(of_saved, gradients.end(), is_defined);
}

void DirectGraph::drop_unreached(variable_list& given, const Missing& missing, bool again) const {
  const auto& leading = again ? leading_again_ : leading_;
  size_t next = 0;
  for (at::Tensor& gradient : given) {
    const auto first = leading.begin() + static_cast<std::ptrdiff_t>(next) + 1;
    next += 1 + leading[next];
    const auto last = leading.begin() + static_cast<std::ptrdiff_t>(next);
    if (std::all_of(first, last, [&missing](int64_t place) { return missing[place]; })) {
      gradient = at::Tensor();
    }
  }
}

bool DirectGraph::run_backward(Stack& stack, bool again) const {
  const bool ready = state_.load(std::memory_order_acquire) == State::Ready;
  const WithoutAutocast casts(is_joint_);
  if (C10_UNLIKELY(again)) {
    torch::jit::InterpreterState(*plain_backward_).run(stack);
    return false;
  }
  if (C10_UNLIKELY(plain_backward_ && !is_joint_ && std::any_of(stack.begin(), stack.end(), is_empty))) {
    torch::jit::InterpreterState(*plain_backward_).run(stack);
    return true;
  }
  if (!ready || c10::GradMode::is_enabled() || !torch::jit::getGraphExecutorOptimize()) {
    backward_executor_->run(stack);
  } else {
    run_with_traceback(*backward_, stack);
  }
  return false;
}

const DirectGraph*& next_direct() {
  static thread_local const DirectGraph* next = nullptr;
  return next;
}

}  // namespace tsfuser
