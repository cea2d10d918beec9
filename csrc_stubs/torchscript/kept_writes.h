// Batch norms whose result nobody reads any more, but which update running statistics (kept_writes.cpp).
#pragma once

namespace torch::jit {
struct Graph;
}  // namespace torch::jit

namespace tsfuser {

// Gives the result of each a reader that stays.
void keep_writes(torch::jit::Graph& graph);

void register_kept_writes();  // the operator of that reader

}  // namespace tsfuser
