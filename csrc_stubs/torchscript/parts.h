// What the twin of parts (part_twin.cpp), its operators (part_ops.cpp) and what its nodes become at the end
// (part_restore.cpp) have in common: how an op divides its operand.
#pragma once

#include "torchscript/nodes.h"

#include <ATen/core/interned_strings.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/ir/ir.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tsfuser {

using Sizes = std::vector<int64_t>;

// How the op divides its operand: into parts of one size; into parts of given sizes; into parts without the
// dim; into a number of parts; not at all. Then the dims from `dim` to `count` become one, or `dim` becomes
// those given; or the elements are shifted as given along `dim`, `count` and `index`; or so many zeros as
// given lie around them. With `kPaddedOrSame` the result may be the operand (whole_parts.cpp).
enum How : int64_t { kEqual, kSizes, kUnbound, kChunks, kFlat, kUnflat, kRolled, kPadded, kPaddedOrSame };

// Where there are fewer dims to shift along than places for them.
constexpr int64_t kNoDim = std::numeric_limits<int64_t>::min();
constexpr size_t kMostRolled = 3;

inline bool is_whole(int64_t how) { return how >= kFlat; }

c10::Symbol kind_of(int64_t how);  // part_twin.cpp: of the op that gives parts in that way

// part_ops.cpp: the dims that are there, of the three numbers of a roll.
Sizes rolled_dims(int64_t dim, int64_t count, int64_t index);
Sizes negated(Sizes numbers);
void run_part(torch::jit::Stack& stack);

void restore_part(torch::jit::Node* node, Walk& walk);  // part_restore.cpp

}  // namespace tsfuser
