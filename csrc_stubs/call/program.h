// Size programs: the integers of a plan (extents, strides, grid, checks) as functions of a call's leaf
// vector.
//
// In: the leaves of one call. Out: the leaves, followed by one value per instruction. Example: leaves [6]
// and the program {const 4; mul v0 v1} give [6, 4, 24]. tsfuser/ir/size.py documents the operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace tsfuser {

enum class SizeOp : uint8_t {
  Const,
  Add,
  Sub,
  Mul,
  Div,
  Mod,
  CeilDiv,
  Min,
  Max,
  Eq,
  Lt,
  Le,
  Pow2,
  NextPow2
};

struct Instruction {
  SizeOp op;
  int32_t b;  // index into the values
  int64_t a;  // index into the values, or the immediate of Const
};

// After `instructions` results, values[index] has to be `expected`, or the plan does not serve the call.
struct Check {
  int32_t instructions;
  int32_t index;
  int64_t expected;
};

struct Program {
  int32_t leaf_count = 0;
  std::vector<Instruction> instructions;
  std::vector<Check> checks;  // ordered by `instructions`
};

inline std::optional<SizeOp> size_op(const std::string& name) {
  static constexpr const char* names[] = {"const", "add", "sub", "mul", "div", "mod",  "ceildiv",
                                          "min",   "max", "eq",  "lt",  "le",  "pow2", "nextpow2"};
  for (size_t i = 0; i < std::size(names); ++i) {
    if (name == names[i]) {
      return static_cast<SizeOp>(i);
    }
  }
  return std::nullopt;
}

inline int64_t floor_div(int64_t a, int64_t b) {
  int64_t q = a / b;
  return q - ((a % b != 0) && ((a < 0) != (b < 0)));
}

// Sums and products wrap instead of being undefined; a plan that lets them wrap is the planner's fault.
inline int64_t apply(SizeOp op, int64_t a, int64_t b) {
  const auto ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
  switch (op) {
    case SizeOp::Const: return a;
    case SizeOp::Add: return static_cast<int64_t>(ua + ub);
    case SizeOp::Sub: return static_cast<int64_t>(ua - ub);
    case SizeOp::Mul: return static_cast<int64_t>(ua * ub);
    case SizeOp::Div: return b ? floor_div(a, b) : 0;
    case SizeOp::Mod: return b ? a - floor_div(a, b) * b : 0;
    case SizeOp::CeilDiv: return b ? floor_div(a, b) + (a % b != 0) : 0;
    case SizeOp::Min: return std::min(a, b);
    case SizeOp::Max: return std::max(a, b);
    case SizeOp::Eq: return a == b;
    case SizeOp::Lt: return a < b;
    case SizeOp::Le: return a <= b;
    case SizeOp::Pow2: return a ? static_cast<int64_t>(ua & (~ua + 1)) : int64_t{1} << 62;
    case SizeOp::NextPow2: {
      int64_t power = 1;
      while (power < a && power < (int64_t{1} << 62)) {
        power <<= 1;
      }
      return power;
    }
  }
  return 0;
}

// Fills `values` for one call; false at the first check that does not hold (values are then incomplete).
inline bool evaluate(const Program& program, const std::vector<int64_t>& leaves,
                     std::vector<int64_t>& values) {
  if (static_cast<int64_t>(leaves.size()) != program.leaf_count) {
    return false;
  }
  values.resize(leaves.size() + program.instructions.size());
  std::copy(leaves.begin(), leaves.end(), values.begin());
  int64_t* out = values.data() + leaves.size();
  const int64_t* v = values.data();
  size_t done = 0;
  const auto advance = [&](size_t end) {
    for (; done < end; ++done) {
      const Instruction& i = program.instructions[done];
      out[done] = i.op == SizeOp::Const ? i.a : apply(i.op, v[i.a], v[i.b]);
    }
  };
  for (const Check& check : program.checks) {
    advance(check.instructions);
    if (v[check.index] != check.expected) {
      return false;
    }
  }
  advance(program.instructions.size());
  return true;
}

}  // namespace tsfuser
