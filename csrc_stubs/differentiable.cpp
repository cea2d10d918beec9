// What TorchScript's autodiff keeps from the forward to the backward, where Python may have a say.
//
// No pass sees both graphs of a prim::DifferentiableGraph: each has an executor of its own. But the operation of the node is made when
// both are attributes of it, and no executor has them yet. So torch's operator is replaced by one that hands the graphs to Python before
// it makes the same operation (tsfuser/torchscript/differentiable.py).

#include "hooks.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/runtime/operator.h>

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
        return original->getOperation(node);
      },
      c10::AliasAnalysisKind::INTERNAL_SPECIAL_CASE));
}

}  // namespace tsfuser
