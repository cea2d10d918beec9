// Batch norms update running statistics, which torch's passes do not know (kept_writes.cpp).
#pragma once

namespace torch::jit {
struct Graph;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

// Gives the result of each whose result nobody reads any more a reader that stays.
void keep_writes(torch::jit::Graph& graph);

// Keeps each in its place among those that read its statistics, too; a step of prepare.cpp. And its end.
void order_writes(torch::jit::Graph& graph, const torch::jit::Node*);
void forget_order(torch::jit::Graph& graph);

// Says that the value is written to behind the graph, which is part of a program; and its end.
void note_write(torch::jit::Value* value);
void forget_noted_writes(torch::jit::Graph& graph);

void register_kept_writes();  // the operators

}  // namespace tsfuser
