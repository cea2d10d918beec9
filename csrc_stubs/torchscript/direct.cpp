#include "torchscript/direct.h"
#include "call/counters.h"
#include "group/failures.h"
#include "torchscript/joint_function.h"
#include "torchscript/nodes.h"
#include "torchscript/partial_backward.h"
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

DirectGraph::DirectGraph() = default;
DirectGraph::~DirectGraph() = default;

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
    return graph_->partials_ ? apply_joint(gradients) : apply_whole(gradients);
  }

  // Before a backward after which no other may come: what is saved lives no longer than its last reader.
  void will_release_variables() override { releases_ = true; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (last_.empty()) {
      for (SavedVariable& tensor : tensors_) {
        tensor.reset_data();
      }
    } else {
      release_what_ran();
    }
  }

  std::string name() const override {
    return "torch::jit::(anonymous namespace)::DifferentiableGraphBackward";
  }

 private:
  variable_list apply_whole(variable_list& gradients) {
    Stack stack;
    stack.reserve(gradients.size() + places_.size() + 16);
    for (at::Tensor& gradient : gradients) {
      stack.emplace_back(std::move(gradient));
    }
    unpack(stack, nullptr);
    const bool lacking = graph_->run_backward(stack);
    return given(stack, lacking);
  }

  // What the backward gives, where it is asked for.
  variable_list given(Stack& stack, bool lacking) {
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
    return given;
  }

  variable_list apply_joint(variable_list& gradients) {
    const size_t results = graph_->result_gradients_;
    Flags present, asked;
    bool all = true, again = c10::GradMode::is_enabled(), some = false;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const bool there = gradients[i].defined();
      present.push_back(there);
      all &= there || i >= results;
      again |= there && i >= results;
      some |= there;
    }
    for (size_t i = 0; i < graph_->differentiated_.size(); ++i) {
      asked.push_back(task_should_compute_output(i));
      all &= asked[i];
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last_.clear();
      if (C10_UNLIKELY(!all || !freed_.empty())) {
        last_ = graph_->partials_->running(present, asked);
        check_freed();
      }
    }
    if (C10_LIKELY(all && !again)) {
      return apply_whole(gradients);
    }
    return some ? apply_part(gradients, again, present, asked) : variable_list(asked.size());
  }

  // What of the backward has to run.
  variable_list apply_part(variable_list& gradients, bool again, const Flags& present, const Flags& asked) {
    const auto part = graph_->partials_->find(again, present, asked);
    for (const size_t i : part->zeros()) {
      gradients[i] = input_metadata(i).zeros_like();
    }
    Stack whole, stack;
    for (const at::Tensor& gradient : gradients) {
      whole.emplace_back(gradient);
    }
    Flags read(whole.size() + places_.size(), false);
    for (const size_t place : part->places()) {
      read[place] = true;
    }
    unpack(whole, &read);
    for (const size_t place : part->places()) {
      stack.push_back(std::move(whole[place]));
    }
    {
      const WithoutAutocast casts(true);
      part->run(stack);
    }
    return given(stack, /*lacking=*/false);
  }

  // Raises what eager raises where an op runs whose saved values are freed.
  void check_freed() const {
    const auto& readers = graph_->partials_->readers();
    for (size_t i = 0; i < freed_.size(); ++i) {
      if (freed_[i] && last_[i] && !readers[i].elements.empty()) {
        TORCH_CHECK(false, torch::autograd::ERR_BACKWARD_TWICE);
      }
    }
  }

  // Frees what nothing is to read any more: what readers read that have run. Those of second derivatives may
  // still run as long as another one may.
  void release_what_ran() {
    const auto& readers = graph_->partials_->readers();
    const auto is_second = [&](const auto& reader) {
      return reader.gradients[0] >= graph_->result_gradients_;
    };
    freed_.resize(readers.size(), false);
    bool some_left = false;
    for (size_t i = 0; i < readers.size(); ++i) {
      freed_[i] = freed_[i] || last_[i];
      some_left |= !freed_[i] && !is_second(readers[i]);
    }
    Flags kept(places_.size(), false);
    for (size_t i = 0; some_left && i < readers.size(); ++i) {
      for (const auto* read : {&readers[i].elements, &readers[i].others}) {
        for (const size_t position : *read) {
          kept[position] = kept[position] || !freed_[i];
        }
      }
    }
    auto tensor = tensors_.begin();
    for (const Place& place : places_) {
      if (place.is_tensor) {
        if (!kept[place.position]) {
          tensor->reset_data();
        }
        ++tensor;
      }
    }
  }

  // Those that are `read`, where that is not null: by their places behind what is on the stack by now.
  void unpack(Stack& stack, const Flags* read) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const NodePtr self = getptr();
    const size_t below = stack.size();
    stack.resize(below + places_.size());
    auto tensor = tensors_.begin();
    auto other = others_.begin();
    for (const Place& place : places_) {
      const size_t index = below + place.position;
      if (place.is_tensor) {
        if (!read || (*read)[index]) {
          stack[index] = tensor->unpack(self);
        }
        ++tensor;
      } else {
        stack[index] = *other++;
      }
    }
    if (std::exchange(releases_, false) && !read && last_.empty()) {
      for (SavedVariable& saved : tensors_) {
        saved.reset_data();
      }
    }
  }

  const std::shared_ptr<const DirectGraph> graph_;
  struct Place {
    uint32_t position;
    bool is_tensor;
  };
  c10::SmallVector<Place, 24> places_;  // of the saved tensors, in order
  std::vector<SavedVariable> tensors_;
  c10::SmallVector<c10::IValue, 4> others_;
  // Of a joint graph, by the numbers of its readers: whether they have run in the last backward, empty if
  // all have; and whether what they read is freed, empty if nothing is.
  Flags last_, freed_;
  bool releases_ = false;
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
  if (is_joint(node)) {
    partials_ = std::make_unique<const PartialBackwards>(node);
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
    result_gradients_ += static_cast<size_t>(j) < results_;
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

void DirectGraph::run_forward(Stack& stack) const {
  const bool ready = state_.load(std::memory_order_acquire) == State::Ready;
  if (!ready || forward_->has_tensor_ops()) {
    for (size_t i = stack.size() - inputs_; i < stack.size(); ++i) {
      forget_history(stack[i]);
    }
  }
  const at::NoGradGuard no_grad;
  const WithoutAutocast casts(partials_ != nullptr);
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

bool DirectGraph::run_backward(Stack& stack) const {
  const bool ready = state_.load(std::memory_order_acquire) == State::Ready;
  const WithoutAutocast casts(partials_ != nullptr);
  if (C10_UNLIKELY(plain_backward_ && std::any_of(stack.begin(), stack.end(), is_empty))) {
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
