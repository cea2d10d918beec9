// The hooks that `import tsfuser` installs in torch's TorchScript executor, and the switches that Python
// sets.
#pragma once

#include "group/python.h"
#include "torchscript/op_facts.h"

#include <ATen/core/jit_type_base.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <string>
#include <vector>

namespace torch::jit {
struct Block;
struct Code;
struct Graph;
struct GraphExecutor;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

extern std::atomic<bool> pass_enabled;
extern std::atomic<bool> guard_mode;

Callback& pass_callback();
Callback& differentiable_callback();
Callback& first_graph_callback();
Callback& caller_callback();   // late_biases.cpp
Callback& joint_callback();    // joint_function.cpp
Callback& regions_callback();  // joint_program.cpp
Callback& partial_callback();  // partial_backward.cpp

// The guard's operation for the profiled types of its inputs; it opens (guard_widening.h) after so many
// `patterns`, where that is not 0 (guard.cpp).
torch::jit::Operation guard_operation(at::ArrayRef<c10::TypePtr> types, size_t patterns);

// Hooks all into torch, once a process, when the module is initialised (hooks.cpp).
void hook_into_torch();
// What the rows of the op table say, once, before the first graph. It decides what the twins look like.
void take_op_facts(OpFacts facts);
void register_operators();       // operators.cpp
void register_size_operators();  // sizes.cpp
void register_products();        // ended_products.cpp
void register_dropout_seeds();   // dropout_seeds.cpp
void register_joint_norms();     // joint_norms.cpp

// What runs the node by torch's own operator, where ours has replaced it.
torch::jit::Operation torchs_operation(const torch::jit::Node* node);
// The operators that replace torch's: of a differentiable graph, and of the check before it
// (differentiable.cpp).
torch::jit::Operation make_differentiable_graph(const torch::jit::Node* node);
torch::jit::Operation make_gradient_check(const torch::jit::Node* node);
// Of a differentiable graph.
struct DifferentiableExecutors {
  torch::jit::GraphExecutor* forward;
  torch::jit::GraphExecutor* backward;
};
// Of the differentiable graphs in a program, in order. Torch finds only those whose operation is its own.
std::vector<DifferentiableExecutors> differentiable_executors(torch::jit::Code& code);

// Nodes of these kinds get the types of their tensors profiled from now on.
void profile_kinds(const std::vector<std::string>& names);
// Torch asks the profiling predicate about the ops that neither autodiff nor NNC knows. NNC knows all that
// are fused; while it generates code for "blocks", two ops only. Nothing else is read from that switch
// where NNC is off. Returns its state before.
bool ask_about_all(bool on);

// The functions of tsfuser._C that take or return graphs (bindings/graphs.cpp).
void bind_graphs(py::module_& m);

// Those that passes ask about nodes, values and blocks (bindings/nodes.cpp).
void bind_nodes(py::module_& m);

}  // namespace tsfuser
