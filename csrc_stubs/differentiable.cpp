// What TorchScript's autodiff keeps from the forward to the backward, where Python may have a say.
//
// No pass sees both graphs of a prim::DifferentiableGraph: each has an executor of its own. But the operation of the node is made when
// both are attributes of it, and no executor has them yet. So torch's operator is replaced by one that hands the graphs to Python before
// it makes the same operation (tsfuser/torchscript/differentiable.py).

#include "hooks.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using GraphPtr = std::shared_ptr<Graph>;
using Kept = std::tuple<GraphPtr, GraphPtr, std::vector<int64_t>, std::vector<int64_t>>;

// Sets the graphs of `node`, the forward's outputs that are kept, and those that a gradient comes for.
void keep_less(Node* node) {
  const auto set = [node](const py::object& pass) {
    GraphPtr plain = node->g(c10::attr::Subgraph)->copy();
    torch::jit::ConstantPropagation(plain);  // autodiff's formulas ask what is known by now
    plain_forms(*plain);
    const py::object result =
        pass(plain, node->g(c10::attr::ReverseSubgraph)->copy(),
             node->i(c10::attr::f_real_outputs), node->is(c10::attr::df_input_vjps),
             node->is(c10::attr::df_input_captured_inputs), node->is(c10::attr::df_input_captured_outputs));
    if (!result.is_none()) {
      const auto [forward, backward, gradients, outputs] = result.cast<Kept>();
      node->g_(c10::attr::Subgraph, forward);
      node->g_(c10::attr::ReverseSubgraph, backward);
      node->is_(c10::attr::df_input_vjps, gradients);
      node->is_(c10::attr::df_input_captured_outputs, outputs);
    }
  };
  with_callback(differentiable_callback(), "tsfuser differentiable graphs",
                "tsfuser's pass over differentiable graphs returned something else than graphs", set);
}

bool is_complex(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::ComplexType || type->kind() == c10::TypeKind::NumberType;
}

bool is_complex(const c10::IValue& value) {
  return value.isComplexDouble() || (value.isTensor() && value.toTensor().defined() && value.toTensor().is_complex());
}

bool has_complex_numbers(const torch::jit::Block* block) {
  for (const Node* node : block->nodes()) {
    for (const auto* value : node->outputs()) {
      if (is_complex(value->type())) {
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

// `operation`, of the node, but for complex numbers: autodiff's formulas do not conjugate, so that eager's autograd differentiates these.
torch::jit::Operation with_eager_gradients(const Node& node, torch::jit::Operation operation) {
  const GraphPtr plain = node.g(c10::attr::Subgraph)->copy();
  while (plain->outputs().size() > static_cast<size_t>(node.i(c10::attr::f_real_outputs))) {
    plain->eraseOutput(plain->outputs().size() - 1);
  }
  torch::jit::EliminateDeadCode(plain);
  const auto code = std::make_shared<torch::jit::Code>(plain, "");
  const size_t inputs = plain->inputs().size();
  const bool always = has_complex_numbers(plain->block());
  return [=](torch::jit::Stack& stack) mutable {
    const auto given = torch::jit::last(stack, inputs);
    if (always || std::any_of(given.begin(), given.end(), [](const c10::IValue& value) { return is_complex(value); })) {
      torch::jit::InterpreterState(*code).run(stack);
    } else {
      operation(stack);
    }
  };
}

}  // namespace

Callback& differentiable_callback() {
  static Callback* c = new Callback;
  return *c;
}

void register_differentiable_graphs() {
  const auto found = torch::jit::getAllOperatorsFor(c10::prim::DifferentiableGraph);
  if (found.size() != 1) {  // not the torch that we know
    return;
  }
  static const auto original = found.front();  // nodes of graphs that were made before point to it
  torch::jit::deregisterOperator(original->schema());
  torch::jit::registerOperator(torch::jit::Operator(
      c10::prim::DifferentiableGraph,
      [](const Node* node) {
        if (pass_enabled.load(std::memory_order_relaxed)) {
          keep_less(const_cast<Node*>(node));  // the executor's own copy of the graph
        }
        return with_eager_gradients(*node, original->getOperation(node));
      },
      c10::AliasAnalysisKind::INTERNAL_SPECIAL_CASE));
}

}  // namespace tsfuser
