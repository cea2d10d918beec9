// Rewrites of a graph that torch is about to profile, and their inverses.
#pragma once

#include <ATen/core/symbol.h>

#include <string>
#include <vector>

namespace torch::jit {
struct Graph;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

// Once a graph, at the first node that torch asks about (prepare.cpp).
void prepare_for_profiling(torch::jit::Graph& graph, const torch::jit::Node* first);
// Those of its steps that a program gets before joint graphs differentiate its regions (joint_program.cpp).
void prepare_for_regions(torch::jit::Graph& graph);
// The names of its steps, in order.
std::vector<std::string> preparing_steps();

// The steps of it that have files of their own. Code behind a check leaves the branch that it is in
// (checked_branches.cpp). Loops that multiply sizes become one op (products.cpp), and so does batch norm's
// check of its batch (batch_checks.cpp); lists that grow become a list for each join (grown_lists.cpp); ops
// in place become functional where nobody can tell (in_place.cpp), checks of their dtypes are hidden from
// autodiff (written_dtypes.cpp), and numbers that are written to parts of tensors are filled in
// (number_writes.cpp); paddings by nothing and slices of the whole return their operand (whole_parts.cpp),
// and parts of a copy are copied one by one (copied_parts.cpp), in the layout that convolutions read
// (convolution_operands.cpp); a join of an earlier join's operands reads that join (nested_joins.cpp); sizes
// are computed from those of inputs of groups (early_sizes.cpp), and dtypes are asked of tensors that they
// follow from (early_dtypes.cpp); convolutions move out of the way of batch norms (early_convolutions.cpp),
// and their biases are added behind them (late_biases.cpp); ops are written in forms that autodiff has a
// formula for (differentiable_forms.cpp), views that several graphs would read stay out of them
// (views_apart.cpp), and single ops are paired with a cast that changes nothing (lone_ops.cpp); attentions
// with one mask share its conversions (shared_masks.cpp).
void inline_checked_branches(torch::jit::Graph& graph, const torch::jit::Node* first);
void fold_products(torch::jit::Graph& graph, const torch::jit::Node* first);
void check_batches(torch::jit::Graph& graph, const torch::jit::Node* first);
void part_grown_lists(torch::jit::Graph& graph, const torch::jit::Node* first);
void make_functional(torch::jit::Graph& graph, const torch::jit::Node* first);
void hide_dtype_checks(torch::jit::Graph& graph, const torch::jit::Node* first);
void fill_parts_at_once(torch::jit::Graph& graph, const torch::jit::Node* first);
void fill_numbers(torch::jit::Graph& graph, const torch::jit::Node* first);
void drop_whole_slices(torch::jit::Graph& graph, const torch::jit::Node* first);
void copy_parts_alone(torch::jit::Graph& graph, const torch::jit::Node* first);
void copy_as_convolutions_read(torch::jit::Graph& graph, const torch::jit::Node* first);
void nest_joins(torch::jit::Graph& graph, const torch::jit::Node* first);
void ask_sizes_early(torch::jit::Graph& graph, const torch::jit::Node* first);
void ask_dtypes_early(torch::jit::Graph& graph, const torch::jit::Node* first);
void move_convolutions(torch::jit::Graph& graph, const torch::jit::Node* first);
void add_biases_late(torch::jit::Graph& graph, const torch::jit::Node* first);
void write_differentiable_forms(torch::jit::Graph& graph, const torch::jit::Node* first);
void keep_views_apart(torch::jit::Graph& graph, const torch::jit::Node* first);
void pair_single_ops_with_identity_cast(torch::jit::Graph& graph, const torch::jit::Node* first);
void share_masks(torch::jit::Graph& graph, const torch::jit::Node* first);

// Says of a graph, and of its copies, that its calls may record gradients (nested_joins.cpp).
void record_joins(torch::jit::Graph& graph);

void register_early_sizes();           // the operators of ask_sizes_early
void register_early_dtypes();          // and of ask_dtypes_early
void register_convolution_operands();  // those of copy_as_convolutions_read
void register_grown_lists();           // and of part_grown_lists
void register_nested_joins();          // and of nest_joins

void register_pad();  // the operator of drop_whole_slices

void register_rows();              // an operator of corrected formulas of autodiff (rows.cpp)
void register_matmul_gradients();  // the gradients of matmul, mm and bmm
void register_room_products();     // products of operands that have room (room_products.cpp)

void register_shared_masks();  // the operators of share_masks

void register_late_biases();  // the operator of add_biases_late

// Keeps loops out of the operands of their results' readers, in a graph that is to be run (loop_ends.cpp).
void end_loops(torch::jit::Graph& graph);
void register_loop_end();            // its operator
void register_operators_of_fills();  // of fill_parts_at_once

// The inverse of the forms, in a graph that is profiled, or differentiated, by now.
void plain_forms(torch::jit::Graph& graph);
// The same, of a graph that autodiff does not see any more: without the casts that serve it alone.
void eager_forms(torch::jit::Graph& graph);
// The names of the forms, in order.
std::vector<std::string> differentiable_forms();

// Whether the node is a cast of autocast that is off, which gives its operand back.
bool is_idle_cast(const torch::jit::Node* node);
// Whether the node is `aten::to(%x, dtype, 0, 0, None)` to a floating dtype, and nothing but ops that make
// new tensors reads its result.
bool is_read_cast(const torch::jit::Node* node);
// Gives the readers of such a cast one of the overload with a device, of that kind: autodiff knows it.
void replace_cast(torch::jit::Node* node, c10::Symbol kind);
// Whether autodiff takes the node into a differentiable graph.
bool may_be_inside(const torch::jit::Node* node);

// Lets an op in place write to tensors of no elements, of the same dtypes, so that it raises for those as
// before; torch's dead code elimination drops it (in_place.cpp).
void disarm(torch::jit::Node* node);

// Lets the gradient of an operand come in the operand's own dtype: autodiff's formulas for two tensors hand
// on the gradient of the result, of whatever dtype. A cast that is switched off changes nothing forward,
// while its backward casts to the dtype that its operand had (in_place.cpp).
void keep_dtype_of_gradient(torch::jit::Node* made, size_t operand);

// Of ops that were in place (written_dtypes.cpp). Marks a functional op that has one tensor only.
void mark_written(torch::jit::Node* op);
// Behind each that may change the dtype, a check of it, for a graph that autodiff does not see any more.
void check_written(torch::jit::Graph& graph);

// Whether the node asks tensors for no more than dtype, device, and whether they have dims
// (early_dtypes.cpp).
bool asks_for_type(const torch::jit::Node* node);
// The tensor and, where it stands for another one that is only asked for dtype and device, what that is
// promoted of, or a cast of, and so on: where one of these is fractional, so is what it stands for.
std::vector<const torch::jit::Value*> parts_of_type(const torch::jit::Value* tensor);
// Whether something reads the value besides queries of its sizes, dtype or device, so that errors of its
// node are still raised without these queries (early_sizes.cpp).
bool is_read(const torch::jit::Value* value);

// Whether the reader makes new tensors of its operands, or numbers; and whether all that reads the value
// does (in_place.cpp).
bool only_reads(const torch::jit::Node& reader);
bool is_only_read(const torch::jit::Value* value);

}  // namespace tsfuser
