#include "torchscript/open_dtypes.h"

#include "torchscript/moving_values.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool is_fractional(at::ScalarType dtype) { return at::isFloatingType(dtype); }

class OpenDtypesOf {
 public:
  explicit OpenDtypesOf(const Node& differentiable)
      : node_(differentiable),
        graph_(*differentiable.g(c10::attr::Subgraph)),
        moving_(moving_values(differentiable)) {}

  OpenDtypes find() {
    for (const Node* node : all_nodes(graph_)) {
      if (node->inputs().empty() || moving_.count(node->input(0)) == 0) {
        continue;
      }
      if (node->kind() == c10::aten::type_as) {
        ask_tensor(node->input(1));
      } else if (const Value* dtype = given_dtype(node); dtype && !torch::jit::toIValue(dtype)) {
        ask_dtype(dtype);  // constants are known when torch differentiates
      }
    }
    std::sort(found_.inputs.begin(), found_.inputs.end());
    found_.inputs.erase(std::unique(found_.inputs.begin(), found_.inputs.end()), found_.inputs.end());
    return std::move(found_);
  }

 private:
  bool is_given(const Value* value) const { return value->node() == graph_.param_node(); }

  // What decides a dtype, an int in the graph.
  void ask_dtype(const Value* dtype) {
    const Node* maker = dtype->node();
    if (is_given(dtype)) {
      const Node* asks = node_.input(dtype->offset())->node();
      note(dtype->offset(), asks->kind() == c10::prim::dtype ? asks->input() : nullptr);
    } else if (maker->kind() == c10::prim::dtype) {
      ask_tensor(maker->input());
    } else {
      const auto constant = torch::jit::constant_as<int64_t>(dtype);
      found_.fractional &= constant && is_fractional(static_cast<at::ScalarType>(*constant));
    }
  }

  // What decides the dtype of a value in the graph, a tensor or a list of some. What an op makes of a
  // fractional operand is fractional, if the op has a derivative.
  void ask_tensor(const Value* tensor) {
    const Node* maker = tensor->node();
    const auto inputs = maker->inputs();
    if (is_given(tensor)) {
      note(tensor->offset(), node_.input(tensor->offset()));
    } else if (const auto constant = torch::jit::toIValue(tensor)) {
      found_.fractional &= constant->isTensor() && is_fractional(constant->toTensor().scalar_type());
    } else if (maker->kind() == c10::prim::If) {
      for (const torch::jit::Block* block : maker->blocks()) {
        ask_tensor(block->outputs()[tensor->offset()]);
      }
    } else if (maker->kind() == c10::aten::type_as) {
      ask_tensor(inputs[1]);
    } else if (maker->kind() == c10::aten::where && inputs.size() == 3) {
      ask_tensor(inputs[is_tensor(inputs[1]) ? 1 : 2]);
    } else if (const auto dtype = given_dtype(maker)) {
      ask_dtype(dtype);
    } else if (const Value* operand = first_operand(tensor)) {
      ask_tensor(operand);
    } else {
      found_.fractional = false;
    }
  }

  // The dtype that an op is told; null if it follows from the operands.
  static const Value* given_dtype(const Node* node) {
    const auto* schema = node->maybeSchema();
    const auto place = schema ? schema->argumentIndexWithName("dtype") : std::nullopt;
    const Value* given = place ? node->input(*place) : nullptr;
    return given && given->type()->kind() != c10::TypeKind::NoneType ? given : nullptr;
  }

  // The operand whose dtype the result of an op has, or promotes: the first, or the first of a list.
  static const Value* first_operand(const Value* result) {
    const Node* maker = result->node();
    const bool any_result =
        maker->kind() == c10::prim::ListUnpack || maker->kind() == c10::prim::ConstantChunk;
    if (maker->inputs().empty() || (result->offset() != 0 && !any_result) ||
        op_facts().flat.count(maker->kind()) != 0) {
      return nullptr;
    }
    const Value* first = maker->input(0);
    return is_tensor(first) || first->type()->isSubtypeOf(*c10::ListType::ofTensors()) ? first : nullptr;
  }

  // Input `i` has the dtype of a tensor outside of the graph, or is it; null: of none that is known.
  void note(size_t i, const Value* tensor) {
    if (tensor && surely_is_fractional(tensor)) {
      return;
    }
    found_.fractional &= tensor && was_fractional(tensor);
    found_.inputs.push_back(i);
  }

  // Whether torch's check lets the call pass only if the tensor requires a gradient.
  bool surely_is_fractional(const Value* tensor) const {
    const auto requires_gradient = [tensor](const Node* check) {
      for (size_t k = 0; k + 1 < check->outputs().size(); ++k) {
        if (tensor == check->input(k) || tensor == check->output(k)) {
          const auto type = check->tys(c10::attr::types).at(k)->cast<c10::TensorType>();
          return type && type->requiresGrad().value_or(false);
        }
      }
      return false;
    };
    const auto inputs = node_.inputs();
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](const Value* input) {
                         return is_gradient_check(input->node()) && requires_gradient(input->node());
                       }) ||
           any_operand(tensor, [this](const Value* operand) { return surely_is_fractional(operand); });
  }

  static bool was_fractional(const Value* tensor) {
    const auto type = tensor->type()->cast<c10::TensorType>();
    return (type && type->scalarType() && is_fractional(*type->scalarType())) ||
           any_operand(tensor, was_fractional);
  }

  // Of what early_dtypes.cpp has put in the place of the tensor: what it stands for is promoted of the
  // operands, or a cast of one, so it is fractional if one of them is.
  template <typename Predicate>
  static bool any_operand(const Value* tensor, const Predicate& predicate) {
    if (!asks_for_type(tensor->node()) || !is_tensor(tensor)) {
      return false;
    }
    const auto operands = tensor->node()->inputs();
    return std::any_of(operands.begin(), operands.end(),
                       [&](const Value* operand) { return is_tensor(operand) && predicate(operand); });
  }

  const Node& node_;
  Graph& graph_;
  const std::unordered_set<const Value*> moving_;
  OpenDtypes found_;
};

}  // namespace

OpenDtypes open_dtypes(const Node& differentiable) { return OpenDtypesOf(differentiable).find(); }

}  // namespace tsfuser
