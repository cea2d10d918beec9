// When a guard lets calls through whose types are others than those that its group was made for.
//
// In: the arguments of a call that the guard's types refuse. Out: whether it may pass. A group makes a plan
// for whatever comes, so that a guard is there to find better groups for other types, in its fallback, which
// has a guard of its own, and so on. A guard that has met more than `patterns` patterns of types *opens*: it
// passes all calls that a group can serve, and the chain of fallbacks below it ends. Not those with tensors
// that require a gradient, which a group would run one op at a time, without the differentiable graph that a
// fallback makes. If it lets a call in for which no plan can be made, the group runs that call unfused,
// and the guard sends later calls of its pattern to the fallback (up to `most_sent_back` patterns; later
// ones run so each time). Example: with `patterns` 4, the tensors float32[2 dims], which the group was made
// for, then int64[2], float32[3], float32[2] transposed, float64[2] and float32[4]: the last one opens it.
#pragma once

#include <ATen/core/ivalue.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace tsfuser {

class GuardWidening {
 public:
  // `scalars`: by input, whether it was profiled as a 0-dim CPU tensor.
  GuardWidening(size_t patterns, std::vector<bool> scalars);

  // Whether a call may pass that is not of the guard's types, and which pattern it is. Counts those that may
  // not.
  bool admits(at::ArrayRef<c10::IValue> inputs, bool grad_mode, uint64_t& pattern);
  // Admits no call of the pattern any more; false where too many were sent back before.
  bool send_back(uint64_t pattern);

 private:
  using Slot = std::atomic<uint64_t>;  // a pattern, or 0
  static constexpr size_t most_sent_back = 8;

  bool can_be_served(at::ArrayRef<c10::IValue> inputs, bool grad_mode) const;

  const std::vector<bool> scalars_;
  std::vector<Slot> met_;
  std::array<Slot, most_sent_back> sent_back_{};
  std::atomic<bool> open_{false};
};

// What the guard that this thread ran last has admitted, for the group behind it; null where its types
// agreed, or it was off. `agreed`: it was on, and all types agreed.
struct Admission {
  std::shared_ptr<GuardWidening> widening;
  uint64_t pattern = 0;
  bool agreed = false;
};
Admission& last_admission();

}  // namespace tsfuser
