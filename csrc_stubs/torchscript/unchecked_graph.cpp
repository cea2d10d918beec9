// See unchecked_graph.h.

#include "torchscript/unchecked_graph.h"
#include "group/failures.h"
#include "torchscript/call_facts.h"
#include "torchscript/open_dtypes.h"
#include "torchscript/prepare.h"
#include "torchscript/settled_branches.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/passes/shape_analysis.h>

#include <algorithm>

namespace tsfuser {

namespace {

// Of a tensor, or of a dtype as an int. An undefined tensor, which stands for zeros, passes.
bool names_fractional(const c10::IValue& value) {
  if (value.isTensor()) {
    return !value.toTensor().defined() || at::isFloatingType(value.toTensor().scalar_type());
  }
  return value.isInt() && at::isFloatingType(value.toScalarType());
}

}  // namespace

std::shared_ptr<UncheckedGraph> UncheckedGraph::of(const torch::jit::Node& node) {
  const auto& plain = node.g(c10::attr::Subgraph);
  auto made = std::make_shared<UncheckedGraph>();
  made->inputs_ = plain->inputs().size();
  for (size_t i = 0; i < made->inputs_; ++i) {
    const auto& type = plain->inputs()[i]->type();
    if (type->kind() != c10::TypeKind::TensorType && may_hold_tensors(type)) {
      made->unchecked_.push_back(i);
    }
  }
  const OpenDtypes dtypes = open_dtypes(node);
  made->fractional_ = dtypes.inputs;
  made->always_ = !dtypes.fractional;
  if (made->unchecked_.empty() && made->fractional_.empty() && !made->always_) {
    return nullptr;
  }
  const auto results = static_cast<size_t>(node.i(c10::attr::f_real_outputs));
  const auto& with_gradient = node.is(c10::attr::df_input_vjps);
  const auto& of_inputs = node.is(c10::attr::df_output_vjps);
  for (size_t i = 0; i < results; ++i) {
    const bool differentiated = std::count(with_gradient.begin(), with_gradient.end(), i) != 0;
    made->any_ = made->any_ || differentiated;
    made->all_ = made->all_ && (differentiated || !may_hold_tensors(plain->outputs()[i]->type()));
  }
  for (const size_t i : made->unchecked_) {
    made->all_ = made->all_ && std::count(of_inputs.begin(), of_inputs.end(), i) != 0;
  }
  made->make_code(node);
  return made;
}

std::shared_ptr<UncheckedGraph> UncheckedGraph::always(const torch::jit::Node& node) {
  auto made = std::make_shared<UncheckedGraph>();
  made->inputs_ = node.inputs().size();
  made->always_ = true;
  made->make_code(node);
  return made;
}

void UncheckedGraph::make_code(const torch::jit::Node& node) {
  const auto plain = node.g(c10::attr::Subgraph)->copy();
  const auto results = static_cast<size_t>(node.i(c10::attr::f_real_outputs));
  while (plain->outputs().size() > results) {
    plain->eraseOutput(plain->outputs().size() - 1);
  }
  code_ = eager_code(*plain, "");
}

// With our forms of ops where these cannot be undone: they compute the same.
std::unique_ptr<torch::jit::Code> eager_code(torch::jit::Graph& graph, const std::string& name) {
  auto copy = graph.copy();
  const bool undone = attempt("eager_forms", graph, [&copy] {
    eager_forms(*copy);
    end_of_pass("eager_forms");
  });
  copy = undone ? copy : graph.copy();
  torch::jit::EraseShapeInformation(copy);
  return std::make_unique<torch::jit::Code>(copy, name);
}

bool UncheckedGraph::takes(const torch::jit::Stack& stack) const {
  const auto given = torch::jit::last(stack, inputs_);
  if (always_ || !std::all_of(fractional_.begin(), fractional_.end(),
                              [&given](size_t i) { return names_fractional(given[i]); })) {
    return true;
  }
  if (unchecked_.empty()) {
    return false;
  }
  const bool idle =
      !c10::GradMode::is_enabled() || std::none_of(given.begin(), given.end(), requires_gradient);
  return idle ? any_ : !all_ && std::any_of(unchecked_.begin(), unchecked_.end(), [&given](size_t i) {
    return requires_gradient(given[i]);
  });
}

void UncheckedGraph::run(torch::jit::Stack& stack) const { torch::jit::InterpreterState(*code_).run(stack); }

}  // namespace tsfuser
