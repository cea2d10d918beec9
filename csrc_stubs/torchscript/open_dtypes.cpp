#include "torchscript/open_dtypes.h"

#include "torchscript/moving_values.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

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
      if (const Value* like = cast_like(node)) {
        ask_tensor(like);
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
      const auto constant = known_int(dtype);
      found_.fractional &= constant && is_fractional(static_cast<at::ScalarType>(*constant));
    }
  }

  // What decides the dtype of a value in the graph, a tensor or a list of some. What an op makes of a
  // fractional operand is fractional, unless the op passes no gradient on (`flat`), as a comparison.
  void ask_tensor(const Value* tensor) {
    const Node* maker = tensor->node();
    const auto inputs = maker->inputs();
    if (!asked_.insert(tensor).second) {
      return;
    }
    if (is_given(tensor)) {
      note(tensor->offset(), node_.input(tensor->offset()));
    } else if (const auto constant = torch::jit::toIValue(tensor)) {
      found_.fractional &= constant->isTensor() && is_fractional(constant->toTensor().scalar_type());
    } else if (maker->kind() == c10::prim::If) {
      for (const torch::jit::Block* block : maker->blocks()) {
        ask_tensor(block->outputs()[tensor->offset()]);
      }
    } else if (const Value* like = cast_like(maker)) {
      ask_tensor(like);
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

  // The tensor whose dtype a cast gives another one; null for other ops.
  static const Value* cast_like(const Node* node) {
    const bool casts = node->kind() == c10::aten::type_as || node->kind() == c10::aten::to;
    return casts && node->inputs().size() > 1 && is_tensor(node->input(1)) ? node->input(1) : nullptr;
  }

  // The dtype that an op is told; null if it follows from the operands.
  static const Value* given_dtype(const Node* node) {
    const auto* schema = node->maybeSchema();
    const auto place = schema ? schema->argumentIndexWithName("dtype") : std::nullopt;
    const Value* given = place ? node->input(*place) : nullptr;
    return given && given->type()->kind() != c10::TypeKind::NoneType ? given : nullptr;
  }

  // The operand that makes the result fractional if it is: the first, or the first of a list. If it is not,
  // another one might, but then the graph counts as one that no call may run.
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
    const auto requires_gradient = [](const Node* check, size_t k) {
      const auto type = check->tys(c10::attr::types).at(k)->cast<c10::TensorType>();
      return type && type->requiresGrad().value_or(false);
    };
    const auto inputs = node_.inputs();
    return any_part(tensor, [&](const Value* part) {
      return std::any_of(inputs.begin(), inputs.end(), [&](const Value* input) {
        const Node* check = input->node();
        const bool is_part =
            is_gradient_check(check) && (input == part || check->input(input->offset()) == part);
        return is_part && requires_gradient(check, input->offset());
      });
    });
  }

  static bool was_fractional(const Value* tensor) {
    return any_part(tensor, [](const Value* part) {
      const auto type = part->type()->cast<c10::TensorType>();
      return type && type->scalarType() && is_fractional(*type->scalarType());
    });
  }

  template <typename Predicate>
  static bool any_part(const Value* tensor, const Predicate& predicate) {
    const auto parts = parts_of_type(tensor);
    return std::any_of(parts.begin(), parts.end(), predicate);
  }

  const Node& node_;
  Graph& graph_;
  const std::unordered_set<const Value*> moving_;
  std::unordered_set<const Value*> asked_;
  OpenDtypes found_;
};

}  // namespace

OpenDtypes open_dtypes(const Node& differentiable) { return OpenDtypesOf(differentiable).find(); }

}  // namespace tsfuser
