// The plans of one group, found by the class of a call, and dropped if there are too many.
//
// In: the arguments of a call. Out: the plan whose checks hold for them.
//
// A process may get new classes for days, so the plans of a group are limited in number. If the process has
// reached its own limit, a group may keep only its share of that. If there is no room for a new plan, plans
// that were not used for a long time are dropped. Time is counted in misses. Otherwise, a program that goes
// round more classes than there is room for would drop in each round the plans that it needs in the next
// one. A call that is running, or that a thread remembers (exact_cache.h), keeps its plan alive.
#pragma once

#include "call/plan.h"

#include <atomic>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace tsfuser {

struct PlanLimits {
  std::atomic<size_t> process{8192};  // of all groups; but each may have `least`
  std::atomic<size_t> group{256};     // the most of one group
  static constexpr size_t least = 16;
};
PlanLimits& plan_limits();

class PlanTable {
 public:
  using PlanPtr = std::shared_ptr<const Plan>;

  // Null if no plan serves the call; else `values` holds the plan's values for it.
  PlanPtr find(const Arguments& arguments, std::vector<int64_t>& values);
  // Called at each miss: a ticket for `add`, or none where there is no room for one more plan. `groups`:
  // how many there are.
  std::optional<uint64_t> make_room(size_t groups);
  // Nothing where the table was cleared since the ticket was given.
  void add(uint64_t ticket, const Arguments& arguments, PlanPtr plan);
  // A call uses the plan now.
  void use(const Plan& plan) const {
    const uint64_t now = misses_.load(std::memory_order_relaxed);
    if (plan.last_used.load(std::memory_order_relaxed) != now) {
      plan.last_used.store(now, std::memory_order_relaxed);
    }
  }
  // Whether there is a plan for calls of this structure: then their sizes vary.
  bool has_structure(const Arguments& arguments);
  std::vector<PlanPtr> all();
  void clear();
  void after_fork();

 private:
  // Calls whose arguments have the same kinds, dtypes, devices and ranks; their plans differ by class.
  struct Structure {
    std::vector<uint64_t> key;
    std::vector<PlanPtr> plans;
  };
  // How many limits of misses a plan must have been of no use for.
  static constexpr uint64_t patience = 4;

  std::vector<PlanPtr> take_unused(uint64_t before);

  std::shared_mutex mutex_;  // of what follows, never held while waiting for the GIL
  std::vector<Structure> structures_;
  size_t count_ = 0;  // plans of all structures
  uint64_t clears_ = 0;
  std::atomic<uint64_t> misses_{0};
};

}  // namespace tsfuser
