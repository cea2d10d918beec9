// When a guard accepts calls with other types than those for which its group was made.
//
// In: the arguments of a call that does not have the guard's types. Out: whether the call may pass.
//
// A group can make a plan for any types. A guard only exists because other types may have better groups:
// those of the fallback, which has a guard of its own, and so on. Types that differ from those of the guard
// only in the order of the dims in memory have none, so calls with these pass. After calls with more than
// `patterns` patterns of types the guard *opens*: it accepts all calls that a group can serve, and the chain
// of fallbacks ends. It still refuses tensors that require a gradient: only a fallback makes a
// differentiable graph for them; the group would run them one op at a time.
//
// If an open guard accepts a call for which no plan can be made, the group runs that call unfused, and the
// guard sends later calls of the same pattern to the fallback. It remembers up to `most_sent_back` such
// patterns; calls of further ones always run unfused.
//
// Example with `patterns` 4: the group was made for tensors of type float32[2 dims]. Calls come with
// int64[2], float32[3], float32[2] with gaps, float64[2] and float32[4]: the last one opens the guard.
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

  // Whether a call may pass that is not of the guard's types, and which pattern it is. Counts those that
  // may not. `nearly`: the types differ so little that a closed guard lets the call pass, too.
  bool admits(at::ArrayRef<c10::IValue> inputs, bool grad_mode, bool nearly, uint64_t& pattern);
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
