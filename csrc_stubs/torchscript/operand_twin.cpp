// The twin of ops for which autodiff has no formula, and whose backward reads their operands: of
// normalisations, and of the elements of a tensor at places that another one names.
//
//     aten::group_norm(%x, 4, %w, %b, 1e-5, 1)
//       tsfuser::with_operands(%x, %w, %b, None, 4, [], 1e-5, 1, 1, 0., 0)
//     aten::instance_norm(%x, %w, %b, None, None, 1, .1, 1e-5, 1)
//       tsfuser::with_operands(%x, %w, %b, None, 0, [], 1e-5, 1, 1, .1, 1)
//     aten::rms_norm(%x, [8], %w, None)
//       tsfuser::with_operands(%x, %w, None, None, 0, [8], None, 0, 0, 0., 2)
//     %l : Tensor?[] = prim::ListConstruct(%i);  aten::index(%x, %l)
//       tsfuser::with_operands(%x, %i, None, None, 0, [], None, 0, 0, 0., 3)
//
// The last number says which op it is. These ops share one twin, because autodiff's table has few free
// entries. The backward of each is an op of ours, `tsfuser::group_norm_backward` and so on. That of a norm
// reads only the operands: a group reads the rows of the operand anyway, and computes their statistics in
// the same pass. If it is not fused, it runs eager's autograd on eager's op, so that it can be
// differentiated again. That of an index reads the index, and of the tensor the sizes.

#include "torchscript/nodes.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/index.h>
#include <ATen/ops/instance_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <optional>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Operator;
using torch::jit::Stack;
using torch::jit::Value;
using Sizes = std::vector<int64_t>;

enum Norm : int64_t { kGroupNorm, kInstanceNorm, kRmsNorm, kIndexed };

// The numbers behind the operand and the parameters.
struct NormNumbers {
  int64_t groups = 0;
  Sizes shape;
  std::optional<double> eps;
  bool cudnn = true, own_statistics = true;
  double momentum = 0;
  Norm norm = kGroupNorm;
};

// The operand, the weight (or the index) and the bias; the latter may be undefined.
using NormTensors = std::vector<at::Tensor>;

c10::List<std::optional<at::Tensor>> only(const at::Tensor& index) {
  c10::List<std::optional<at::Tensor>> indices;
  indices.push_back(index);
  return indices;
}

at::Tensor normalized(const NormTensors& given, const NormNumbers& numbers) {
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  const auto weight = optional(given[1]), bias = optional(given[2]);
  switch (numbers.norm) {
    case kGroupNorm:
      return at::group_norm(given[0], numbers.groups, weight, bias, *numbers.eps, numbers.cudnn);
    case kInstanceNorm:
      return at::instance_norm(given[0], weight, bias, {}, {}, numbers.own_statistics, numbers.momentum,
                               *numbers.eps, numbers.cudnn);
    case kIndexed: return at::index(given[0], only(given[1]));
    default: return at::rms_norm(given[0], numbers.shape, weight, numbers.eps);
  }
}

std::optional<double> pop_eps(Stack& stack) { return torch::jit::pop(stack).toOptional<double>(); }

// Undefined for None.
at::Tensor pop_tensor(Stack& stack) {
  const c10::IValue value = torch::jit::pop(stack);
  return value.isNone() ? at::Tensor() : value.toTensor();
}

// The operand, the weight and the bias, where they stand side by side.
NormTensors pop_operands(Stack& stack) {
  NormTensors given(3);
  for (auto tensor = given.rbegin(); tensor != given.rend(); ++tensor) {
    *tensor = pop_tensor(stack);
  }
  return given;
}

void run_normalized(Stack& stack) {
  NormNumbers numbers;
  numbers.norm = static_cast<Norm>(torch::jit::pop(stack).toInt());
  numbers.momentum = torch::jit::pop(stack).toDouble();
  numbers.own_statistics = torch::jit::pop(stack).toBool();
  numbers.cudnn = torch::jit::pop(stack).toBool();
  numbers.eps = pop_eps(stack);
  numbers.shape = torch::jit::pop(stack).toIntVector();
  numbers.groups = torch::jit::pop(stack).toInt();
  torch::jit::drop(stack, 1);  // no running statistics
  torch::jit::push(stack, normalized(pop_operands(stack), numbers));
}

bool may_have_gradient(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

// The gradients of the operand, the weight and the bias, undefined for what is not there, or is of integers.
// They have gradients themselves where gradients are on and an operand requires one. Autocast may have
// computed the result in the dtype of `gradient`.
NormTensors gradients(const at::Tensor& gradient, NormTensors given, const NormNumbers& numbers) {
  const bool again = c10::GradMode::is_enabled();
  const c10::AutoGradMode on(true);
  if (given[2].defined()) {  // nothing depends on what it holds, and it may be the weight
    given[2] = given[2].detach();
  }
  NormTensors cast, moving;
  for (at::Tensor& tensor : given) {
    if (may_have_gradient(tensor)) {
      // Another tensor in any case: the operand may be computed of the weight, and what the weight gets that
      // way is not this op's to give.
      tensor = again && tensor.requires_grad() ? at::alias(tensor) : tensor.detach().requires_grad_();
      moving.push_back(tensor);
    }
    const bool other = given[0].scalar_type() != gradient.scalar_type() && tensor.defined();
    cast.push_back(other ? tensor.to(gradient.scalar_type()) : tensor);
  }
  if (numbers.norm == kInstanceNorm && !cast[1].defined() && cast[2].defined()) {
    cast[1] = at::ones_like(cast[2]);  // the backward of CUDA fails for a bias alone
  }
  const auto found = torch::autograd::grad({normalized(cast, numbers)}, moving, {gradient},
                                           /*retain_graph=*/std::nullopt, /*create_graph=*/again);
  NormTensors all;
  for (size_t i = 0, next = 0; i < (numbers.norm == kRmsNorm ? 2 : 3); ++i) {
    all.push_back(may_have_gradient(given[i]) ? found.at(next++) : at::Tensor());
  }
  return all;
}

// Takes the gradient, too, which is undefined where it is 0, as behind a batch norm of an empty tensor.
void push_gradients(Stack& stack, NormTensors given, const NormNumbers& numbers) {
  const at::Tensor gradient = pop_tensor(stack);
  if (!gradient.defined()) {
    stack.insert(stack.end(), numbers.norm == kRmsNorm ? 2 : 3, at::Tensor());
    return;
  }
  for (at::Tensor& found : gradients(gradient, std::move(given), numbers)) {
    stack.emplace_back(std::move(found));
  }
}

// The gradient of a tensor of these sizes, of which the elements at the places of an index were taken. It
// can be differentiated again.
at::Tensor index_backward(const at::Tensor& gradient, at::IntArrayRef sizes, const at::Tensor& index) {
  return gradient.defined()
             ? at::zeros(sizes, gradient.options()).index_put_(only(index), gradient, /*accumulate=*/true)
             : gradient;
}

void run_index_backward(Stack& stack) {
  const at::Tensor index = torch::jit::pop(stack).toTensor();
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  torch::jit::push(stack, index_backward(pop_tensor(stack), sizes, index));
}

// Of the formula.
void run_normalized_backward(Stack& stack) {
  NormNumbers numbers;
  numbers.norm = static_cast<Norm>(torch::jit::pop(stack).toInt());
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  numbers.eps = pop_eps(stack);
  numbers.shape = torch::jit::pop(stack).toIntVector();
  numbers.groups = torch::jit::pop(stack).toInt();
  NormTensors given = pop_operands(stack);
  if (numbers.norm == kIndexed) {
    torch::jit::push(stack, index_backward(pop_tensor(stack), sizes, given[1]), at::Tensor(), at::Tensor());
    return;
  }
  push_gradients(stack, std::move(given), numbers);
  if (numbers.norm == kRmsNorm) {
    stack.emplace_back(at::Tensor());  // it has no bias
  }
}

void run_group_norm_backward(Stack& stack) {
  NormNumbers numbers;
  numbers.norm = kGroupNorm;
  numbers.eps = pop_eps(stack);
  NormTensors given(3);
  given[2] = pop_tensor(stack), given[1] = pop_tensor(stack);
  numbers.groups = torch::jit::pop(stack).toInt();
  given[0] = pop_tensor(stack);
  push_gradients(stack, std::move(given), numbers);
}

void run_instance_norm_backward(Stack& stack) {
  NormNumbers numbers;
  numbers.norm = kInstanceNorm;
  numbers.eps = pop_eps(stack);
  NormTensors given = pop_operands(stack);
  push_gradients(stack, std::move(given), numbers);
}

void run_rms_norm_backward(Stack& stack) {
  NormNumbers numbers;
  numbers.norm = kRmsNorm;
  numbers.eps = pop_eps(stack);
  NormTensors given(3);
  given[1] = pop_tensor(stack);
  numbers.shape = torch::jit::pop(stack).toIntVector();
  given[0] = pop_tensor(stack);
  push_gradients(stack, std::move(given), numbers);
}

// What eager saves of the operand: a copy where it is not in the order that its kernel needs, or where it
// computes in float32. On CUDA a group reads channels last as they are, though eager copies them. Of
// rms_norm on the CPU, if only the weight has a gradient, eager saves no operand at all; nor of a batch norm
// of no elements.
void push_operand(Stack& stack) {
  constexpr int64_t weight_only = 3, batch_norm = 4;  // stand for such an rms_norm, and for a batch norm
  const int64_t number = torch::jit::pop(stack).toInt();
  const auto norm = number == weight_only ? kRmsNorm : static_cast<Norm>(number);
  const at::Tensor given = torch::jit::pop(stack).toTensor();
  const auto type = given.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  if (number == batch_norm) {
    return torch::jit::push(stack, given.numel() == 0 ? given.clone() : given);
  }
  switch (norm) {
    case kGroupNorm: return torch::jit::push(stack, given.contiguous(given.suggest_memory_format()));
    case kInstanceNorm: return torch::jit::push(stack, given.contiguous());
    default:
      const bool copied = given.is_cpu() && (narrow || number == weight_only);
      torch::jit::push(stack, copied ? given.clone() : given);
  }
}

bool is_absent(const Value* value) { return value->type()->kind() == c10::TypeKind::NoneType; }

bool is_given_or_absent(const Value* value) { return is_tensor(value) || is_absent(value); }

// The one tensor in the list of indices; null if there are others, or may be.
Value* only_index(const Node* node) {
  Node* list = const_cast<Value*>(node->input(1))->node();
  const bool alone = list->kind() == c10::prim::ListConstruct && list->inputs().size() == 1 &&
                     is_tensor(list->input(0)) && is_left_as_made(list->output());
  return alone ? list->input(0) : nullptr;
}

// Whether the node is one that the backward knows all of.
bool has_backward(const Node* node, Norm norm) {
  switch (norm) {
    case kGroupNorm:  // eager's derivative fails for a bias alone
      return is_given_or_absent(node->input(2)) &&
             (is_absent(node->input(3)) || (is_tensor(node->input(3)) && is_tensor(node->input(2))));
    case kInstanceNorm:
      return is_given_or_absent(node->input(1)) && is_given_or_absent(node->input(2)) &&
             is_absent(node->input(3)) && is_absent(node->input(4)) && known_bool(node->input(5)) == true;
    case kIndexed: return only_index(node) != nullptr;
    default:  // of which autocast on CUDA has casts that no graph shows
      return is_given_or_absent(node->input(2)) && !at::autocast::is_autocast_enabled(at::kCUDA);
  }
}

Norm norm_of(const Node* node) {
  static const auto group = c10::Symbol::fromQualString("aten::group_norm");
  static const auto instance = c10::Symbol::fromQualString("aten::instance_norm");
  return node->kind() == group              ? kGroupNorm
         : node->kind() == instance         ? kInstanceNorm
         : node->kind() == c10::aten::index ? kIndexed
                                            : kRmsNorm;
}

void write_norm(Node* node, c10::Symbol twin) {
  const Norm norm = norm_of(node);
  if (!has_backward(node, norm)) {
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint behind(node->next());
  const auto in = [node](size_t i) { return node->input(i); };
  const auto constant = [&graph](const c10::IValue& value) { return graph.insertConstant(value); };
  std::vector<Value*> operands;
  switch (norm) {
    case kGroupNorm:
      operands = {in(0), in(2), in(3), constant({}), in(1), constant(Sizes()), in(4), in(5)};
      operands.insert(operands.end(), {constant(true), constant(0.0)});
      break;
    case kInstanceNorm:
      operands = {in(0), in(1), in(2), in(3), constant(0), constant(Sizes()), in(7), in(8), in(5), in(6)};
      break;
    case kIndexed:
      operands = {in(0), only_index(node), constant({}), constant({}), constant(0), constant(Sizes())};
      operands.insert(operands.end(), {constant({}), constant(true), constant(true), constant(0.0)});
      break;
    default:
      operands = {in(0), in(2), constant({}), constant({}), constant(0), in(1), in(3)};
      operands.insert(operands.end(), {constant(true), constant(true), constant(0.0)});
  }
  operands.push_back(constant(static_cast<int64_t>(norm)));
  Node* made = graph.insertNode(graph.create(twin, operands, 1));
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

Norm given_norm(const Node* node) { return static_cast<Norm>(known_int(node->inputs().back()).value()); }

// Has the node that the twin was written for take its place.
void restore_norm(Node* node, Walk& walk) {
  const auto in = [node](size_t i) { return node->input(i); };
  const auto put_back = [node, &walk](const char* kind, at::ArrayRef<Value*> operands) {
    put(node, walk, c10::Symbol::fromQualString(kind), operands);
  };
  switch (given_norm(node)) {
    case kGroupNorm: return put_back("aten::group_norm", {in(0), in(4), in(1), in(2), in(6), in(7)});
    case kInstanceNorm:
      return put_back("aten::instance_norm",
                      {in(0), in(1), in(2), in(3), in(3), in(8), in(9), in(6), in(7)});
    case kIndexed: {
      Node* list = node->owningGraph()->create(c10::prim::ListConstruct, {in(1)}, 1)->insertBefore(node);
      list->output()->setType(c10::ListType::create(c10::OptionalType::ofTensor()));
      return put_back("aten::index", {in(0), list->output()});
    }
    default: put_back("aten::rms_norm", {in(0), in(5), in(1), in(6)});
  }
}

// tsfuser::with_operands_backward(%dy, %x, %w, %b, 4, [], %eps, %sizes, 0)
//   ->  tsfuser::group_norm_backward(%dy, %x, 4, %w, %b, %eps)
void restore_norm_backward(Node* node, Walk& walk) {
  const auto in = [node](size_t i) { return node->input(i); };
  const Norm norm = given_norm(node);
  const char* kind = "tsfuser::instance_norm_backward";
  std::vector<Value*> operands = {in(0), in(1), in(2), in(3), in(6)};
  if (norm == kGroupNorm) {
    kind = "tsfuser::group_norm_backward";
    operands = {in(0), in(1), in(4), in(2), in(3), in(6)};
  } else if (norm == kRmsNorm) {
    kind = "tsfuser::rms_norm_backward";
    operands = {in(0), in(1), in(5), in(2), in(6)};
  } else if (norm == kIndexed) {
    kind = "tsfuser::index_backward";
    operands = {in(0), in(7), in(2)};
  }
  const size_t results = norm == kIndexed ? 1 : norm == kRmsNorm ? 2 : 3;
  Node* made =
      node->owningGraph()->create(c10::Symbol::fromQualString(kind), operands, results)->insertBefore(node);
  made->copyMetadata(node);
  for (size_t i = 0; i < results; ++i) {
    made->output(i)->setType(node->output(i)->type());
    node->output(i)->replaceAllUsesWith(made->output(i));
  }
  if (!node->hasUses()) {  // else of the bias that rms_norm has not, or of an index
    walk.destroy(node);
  }
}

}  // namespace

Twin twin_with_operands() {
  return {
      "tsfuser::with_operands(Tensor input, Tensor? weight, Tensor? bias, Tensor? running, int groups,"
      " int[] shape, float? eps, bool cudnn, bool own_statistics, float momentum, int norm) -> Tensor",
      {"aten::group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps,"
       " bool cudnn_enabled) -> Tensor",
       "aten::instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean,"
       " Tensor? running_var, bool use_input_stats, float momentum, float eps, bool cudnn_enabled)"
       " -> Tensor",
       "aten::rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> Tensor",
       "aten::index(Tensor self, Tensor?[] indices) -> Tensor"},
      {"aten::rsub(Tensor self, Tensor other, Scalar alpha) -> Tensor",
       "%sizes : int[] = aten::size(%input)\n  "
       "%result : Tensor = tsfuser::with_operands(%input, %weight, %bias, %running, %groups, %shape, %eps,"
       " %cudnn, %own_statistics, %momentum, %norm)",
       {{"Tensor", "input"},
        {"Tensor?", "weight"},
        {"Tensor?", "bias"},
        {"int", "groups"},
        {"int[]", "shape"},
        {"float?", "eps"},
        {"int[]", "sizes"},
        {"int", "norm"}},
       "%of_input : Tensor, %of_weight : Tensor, %of_bias : Tensor ="
       " tsfuser::with_operands_backward(%gradient, %input, %weight, %bias, %groups, %shape, %eps, %sizes,"
       " %norm)"},
      run_normalized,
      write_norm,
      restore_norm};
}

std::vector<Helper> helpers_with_operands() {
  return {{"tsfuser::with_operands_backward", restore_norm_backward}};
}

void register_operators_with_operands() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator(
           "tsfuser::with_operands_backward(Tensor gradient, Tensor input, Tensor? weight, Tensor? bias,"
           " int groups, int[] shape, float? eps, int[] sizes, int norm) -> (Tensor, Tensor, Tensor)",
           run_normalized_backward, kind),
       Operator("tsfuser::index_backward(Tensor gradient, int[] sizes, Tensor index) -> Tensor",
                run_index_backward, kind),
       Operator("tsfuser::norm_operand(Tensor(a) input, int norm) -> Tensor(a)", push_operand, kind),
       Operator("tsfuser::group_norm_backward(Tensor grad_out, Tensor input, int num_groups, Tensor? weight,"
                " Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
                run_group_norm_backward, kind),
       Operator("tsfuser::instance_norm_backward(Tensor grad_out, Tensor input, Tensor? weight,"
                " Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
                run_instance_norm_backward, kind),
       Operator("tsfuser::rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape,"
                " Tensor? weight, float? eps) -> (Tensor, Tensor)",
                run_rms_norm_backward, kind)});
}

}  // namespace tsfuser
