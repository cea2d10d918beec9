// What `import` hooks into torch's TorchScript executor, and the switches that Python sets.
#pragma once

#include "group/python.h"

#include <ATen/core/jit_type_base.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <string>
#include <vector>

namespace torch::jit {
struct Block;
struct Graph;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

extern std::atomic<bool> pass_enabled;
extern std::atomic<bool> guard_mode;

Callback& pass_callback();
Callback& planner_callback();
Callback& reporter_callback();
Callback& differentiable_callback();

// The guard's operation for the profiled types of its inputs; it opens (opening.h) after so many `patterns`,
// where that is not 0 (guard.cpp).
torch::jit::Operation guard_operation(at::ArrayRef<c10::TypePtr> types, size_t patterns);

// Once a process, when the module is initialised. None of them changes a program while `pass_enabled` is
// off.
void register_operators();              // operators.cpp
void register_size_operators();         // sizes.cpp
void register_pass_hooks();             // pass_hook.cpp
void register_differentiable_graphs();  // differentiable.cpp

// Makes the node functional, in the graph that torch is about to profile, where it is an in-place op and
// nobody can tell (in_place.cpp).
void make_functional(torch::jit::Node* node);
// Replaces each dropout whose probability is the constant 0 by its operand, which eager returns too.
// Autodiff's forward of such a node returns a copy, so what reads both could not be differentiated.
void hand_through(torch::jit::Block& block);
// Whether the reader makes new tensors of its operands, or numbers; and whether all that reads the value
// does.
bool only_reads(const torch::jit::Node& reader);
bool is_only_read(const torch::jit::Value* value);

// Gives the ops around the node, in the graph that torch is about to profile, a form that autodiff has a
// formula for, and back (differentiable_forms.cpp).
void make_differentiable(torch::jit::Node* node);
void plain_forms(torch::jit::Graph& graph);
// The plain forms of a graph that autodiff does not see, without the casts that serve it alone (vmap knows
// no such op).
void eager_forms(torch::jit::Graph& graph);
// Once a graph, at the first node that torch asks about: a cast for each reader of casts that several
// differentiable graphs would read (differentiable_forms.cpp).
void own_casts(torch::jit::Graph& graph, const torch::jit::Node* here);

// The functions of tsfuser._C that take or return graphs (pass_hook.cpp).
void bind_graphs(py::module_& m);

}  // namespace tsfuser
