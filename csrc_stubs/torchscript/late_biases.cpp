// The bias of a convolution that autocast runs on CUDA is added by an op of its own, which groups can take.
// Before:
//
//     %bias : Tensor? = prim::GetAttr[name="bias"](%conv)
//     %x : Tensor = aten::_autocast_to_reduced_precision(%image, 1, 0, 15, 15)
//     %y : Tensor = aten::conv2d(%x, %w, %bias, ...)
//
// After:
//
//     %c : Tensor = aten::conv2d(%x, %w, None, ...)
//     %t : Tensor = tsfuser::bias_or_zero(%bias, %c, 2)
//     %b : Tensor = aten::_autocast_to_reduced_precision(%t, 1, 0, 15, 15)
//     %b1 : Tensor = aten::unsqueeze(%b, -1);  %b2 : Tensor = aten::unsqueeze(%b1, -1)
//     %y : Tensor = aten::add(%c, %b2, 1)
//
// On CUDA that is what eager computes: cuDNN stores the result in 16 bits, then another kernel adds the bias
// and rounds again. (The one exception is a depthwise convolution that is not channels last: ATen's own
// kernel adds the bias before it rounds once.) In a group the sum needs no pass over memory of its own. The
// gradient of the bias, a sum over the gradient, joins a group of the backward.
//
// On the CPU the bias is added inside of the convolution, before the one rounding: there the rewrite would
// change values of 16 bits, and save nothing. Before torch has profiled a graph no device is known, but the
// casts of autocast say on which device they cast: a graph with autocast for CUDA alone has no values of 16
// bits on the CPU but those of the program itself, and others are float32, which hold the sum. Without
// autocast nothing is changed.
//
// The bias of a module of torch.nn is a `Tensor?` that no graph says more about. Whether there is one is
// looked up in the module that is being called. Another module of the same type, which runs the same graph,
// may have none: it gets a zero.
//
// This is a step of prepare.cpp.

#include "torchscript/hooks.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <ATen/ops/full.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

constexpr size_t kBias = 2;  // the operand of a convolution

// The dims behind the channels.
int64_t dims_of_image(const Node* node) {
  static const std::unordered_map<c10::Symbol, int64_t> dims = {
      {c10::aten::conv1d, 1}, {c10::aten::conv2d, 2}, {c10::aten::conv3d, 3}};
  const auto found = dims.find(node->kind());
  return found == dims.end() ? 0 : found->second;
}

// Whether autocast casts the value where it is on CUDA, and nowhere else.
bool is_cast_on_cuda(const Value* value) {
  const Node* cast = behind_profile(value)->node();
  return cast->kind() == c10::aten::_autocast_to_reduced_precision && known_bool(cast->input(1)) == true &&
         known_bool(cast->input(2)) == false;
}

// Whether an op of groups that computes something reads the value, perhaps behind casts and views.
bool is_read_in_group(const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    const Node* user = use.user;
    if (op_facts().computed.count(user->kind()) != 0) {
      return true;
    }
    const bool handed_on = is_profile(user) || op_facts().handed_on.count(user->kind()) != 0;
    return handed_on && use.offset == 0 && user->outputs().size() == 1 && is_read_in_group(user->output());
  });
}

bool may_be_late(const Node* node, const Node* first) {
  return dims_of_image(node) != 0 && (node == first || node->isAfter(first)) &&
         is_cast_on_cuda(node->input(0)) && is_read_in_group(node->output());
}

// The modules whose methods are being called in this thread, innermost first.
std::vector<torch::jit::Module> called_modules() {
  std::vector<torch::jit::Module> found;
  with_callback(caller_callback(), "what tsfuser looks up called modules by returned something else",
                [&](const py::object& look) { found = look().cast<std::vector<torch::jit::Module>>(); });
  return found;
}

// The module that the graph, of one of its methods, is called with, if that is known.
std::optional<torch::jit::Module> module_of(const Graph& graph) {
  if (graph.inputs().empty() || graph.inputs()[0]->type()->kind() != c10::TypeKind::ClassType) {
    return std::nullopt;
  }
  for (const auto& module : called_modules()) {
    if (c10::TypePtr(module.type()) == graph.inputs()[0]->type()) {
      return module;
    }
  }
  return std::nullopt;
}

// What the chain of attributes has in the module; None where the value is none of its attributes.
c10::IValue attribute_of(const torch::jit::Module& module, const Value* value) {
  const Node* node = value->node();
  if (node->kind() == c10::prim::Param && value->offset() == 0) {
    return module._ivalue();
  }
  if (node->kind() != c10::prim::GetAttr) {
    return {};
  }
  const c10::IValue owner = attribute_of(module, node->input());
  return owner.isObject() ? owner.toObject()->getAttr(node->s(c10::attr::name)) : c10::IValue();
}

Node* insert(Graph& graph, Node* like, c10::Symbol kind, at::ArrayRef<Value*> operands) {
  Node* made = graph.insertNode(graph.create(kind, operands, 1));
  made->copyMetadata(like);
  return made;
}

Value* checked_bias(Graph& graph, Node* node, Value* bias) {
  static const auto or_zero = c10::Symbol::fromQualString("tsfuser::bias_or_zero");
  Value* dims = graph.insertConstant(dims_of_image(node));
  return insert(graph, node, or_zero, {bias, node->output(), dims})->output();
}

// The bias, which may be None, cast as the image is.
Value* cast_bias(Graph& graph, Node* node, Value* bias) {
  const Node* like = behind_profile(node->input(0))->node();
  std::vector<Value*> operands = {checked_bias(graph, node, bias)};
  for (size_t i = 1; i < like->inputs().size(); ++i) {
    operands.push_back(graph.insertConstant(*torch::jit::toIValue(like->input(i))));
  }
  return insert(graph, node, like->kind(), operands)->output();
}

void add_bias_behind(Node* node) {
  Graph& graph = *node->owningGraph();
  Value* bias = const_cast<Value*>(behind_profile(node->input(kBias)));
  {
    const torch::jit::WithInsertPoint before(node);
    node->replaceInput(kBias, graph.insertConstant(c10::IValue()));
  }
  const torch::jit::WithInsertPoint behind(node->next());
  bias = is_tensor(bias) ? checked_bias(graph, node, bias) : cast_bias(graph, node, bias);
  Value* last = graph.insertConstant(-1);
  for (int64_t i = 0; i < dims_of_image(node); ++i) {
    bias = insert(graph, node, c10::aten::unsqueeze, {bias, last})->output();
  }
  Node* sum = insert(graph, node, c10::aten::add, {node->output(), bias, graph.insertConstant(1)});
  node->output()->replaceAllUsesAfterNodeWith(sum, sum->output());
}

// The bias, or a zero that changes no value. Raises what a convolution does for a bias that is not of one
// element a channel, which a sum might broadcast. `like`: what has `dims` dims behind its channels.
void bias_or_zero(torch::jit::Stack& stack) {
  const int64_t dims = torch::jit::pop(stack).toInt();
  const at::Tensor like = torch::jit::pop(stack).toTensor();
  const c10::IValue& bias = torch::jit::peek(stack, 0, 1);
  if (bias.isNone()) {
    torch::jit::drop(stack, 1);
    torch::jit::push(stack, at::full({1}, -0.0, like.options()));
    return;
  }
  const at::Tensor& given = bias.toTensor();
  const int64_t channels = like.size(-dims - 1);
  TORCH_CHECK(given.dim() == 1 && given.size(0) == channels, "expected bias to be 1-dimensional with ",
              channels, " elements, but got bias of size ", given.sizes(), " instead");
}

}  // namespace

Callback& caller_callback() {
  static Callback* c = new Callback;
  return *c;
}

void register_late_biases() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::bias_or_zero(Tensor(a)? bias, Tensor like, int dims) -> Tensor(a)",
                            bias_or_zero, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

void add_biases_late(Graph& graph, const Node* first) {
  std::vector<Node*> optional;
  for (Node* node : all_nodes(graph)) {
    if (!may_be_late(node, first)) {
      continue;
    }
    if (is_tensor(node->input(kBias)) && is_cast_on_cuda(node->input(kBias))) {
      add_bias_behind(node);
    } else if (is_optional_tensor(node->input(kBias))) {
      optional.push_back(node);
    }
  }
  const auto module = optional.empty() ? std::nullopt : module_of(graph);
  for (Node* node : optional) {
    if (module && attribute_of(*module, node->input(kBias)).isTensor()) {
      add_bias_behind(node);
    }
  }
}

}  // namespace tsfuser
