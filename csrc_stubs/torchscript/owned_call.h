// Calls of a function of ours that the calling node owns, and its copies with it.
//
//     %f : Function = prim::Constant[name="..."]();  %out = prim::CallFunction[<attribute>=...](%f, %x)
//
// What owns it is an attribute: the memory of a tensor without elements. torch can print a graph with such
// an attribute, but not one with a capsule.
#pragma once

#include <ATen/core/function.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/jit/ir/ir.h>

#include <memory>

namespace tsfuser {

// A node that calls `function` with the graph's inputs. It stands nowhere yet.
template <class Function>
torch::jit::Node* owned_call(torch::jit::Graph& graph, std::unique_ptr<Function> function, const char* name,
                             c10::Symbol attribute) {
  Function* held = function.release();
  const auto owner =
      at::from_blob(held, {0}, [](void* owned) { delete static_cast<Function*>(owned); }, at::kByte);
  torch::jit::Node* constant = graph.create(c10::prim::Constant);
  constant->s_(c10::attr::name, name);
  constant->output()->setType(c10::FunctionType::create(held));
  torch::jit::Node* call = graph.create(c10::prim::CallFunction, {constant->output()}, 1);
  for (torch::jit::Value* input : graph.inputs()) {
    call->addInput(input);
  }
  call->t_(attribute, owner);
  return call;
}

// The function that the node owns by that attribute; null for other nodes.
template <class Function>
Function* owned_by(const torch::jit::Node* node, c10::Symbol attribute) {
  const bool owns = node->kind() == c10::prim::CallFunction && node->hasAttribute(attribute);
  return owns ? static_cast<Function*>(node->t(attribute).storage().mutable_data()) : nullptr;
}

}  // namespace tsfuser
