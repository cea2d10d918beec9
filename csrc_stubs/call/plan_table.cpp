#include "call/plan_table.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

namespace tsfuser {
namespace {

std::atomic<size_t> plans_of_process{0};

size_t limit_of_group(size_t groups) {
  const PlanLimits& limits = plan_limits();
  const size_t most = limits.group, all = limits.process;
  const size_t share = std::max(all / std::max<size_t>(groups, 1), limits.least);
  return plans_of_process < all ? most : std::min(most, share);
}

}  // namespace

// Leaked, as all that is shared here: other threads may run groups while the process exits.
PlanLimits& plan_limits() {
  static PlanLimits* limits = new PlanLimits;
  return *limits;
}

PlanTable::PlanPtr PlanTable::find(const Arguments& arguments, std::vector<int64_t>& values) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const Structure& structure : structures_) {
    if (structure.key != arguments.structure) {
      continue;
    }
    for (const PlanPtr& plan : structure.plans) {
      if (evaluate(plan->program, arguments.leaves, values)) {
        return plan;
      }
    }
    break;
  }
  return nullptr;
}

std::optional<uint64_t> PlanTable::make_room(size_t groups) {
  const uint64_t now = misses_.fetch_add(1, std::memory_order_relaxed) + 1;
  const size_t limit = limit_of_group(groups);
  std::vector<PlanPtr> unused;  // destroyed after the lock is gone
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (count_ >= limit && now > patience * limit) {
    unused = take_unused(now - patience * limit);
  }
  return count_ < limit ? std::make_optional(clears_) : std::nullopt;
}

// Takes the plans out that were last used before.
std::vector<PlanTable::PlanPtr> PlanTable::take_unused(uint64_t before) {
  std::vector<PlanPtr> taken;
  for (Structure& structure : structures_) {
    auto& plans = structure.plans;
    const auto kept = std::stable_partition(plans.begin(), plans.end(), [before](const PlanPtr& plan) {
      return plan->last_used.load(std::memory_order_relaxed) >= before;
    });
    taken.insert(taken.end(), std::make_move_iterator(kept), std::make_move_iterator(plans.end()));
    plans.erase(kept, plans.end());
  }
  structures_.erase(std::remove_if(structures_.begin(), structures_.end(),
                                   [](const Structure& structure) { return structure.plans.empty(); }),
                    structures_.end());
  count_ -= taken.size();
  plans_of_process -= taken.size();
  return taken;
}

void PlanTable::add(uint64_t ticket, const Arguments& arguments, PlanPtr plan) {
  use(*plan);
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (ticket != clears_) {
    return;
  }
  auto structure = std::find_if(structures_.begin(), structures_.end(),
                                [&](const Structure& s) { return s.key == arguments.structure; });
  if (structure == structures_.end()) {
    structure = structures_.insert(structures_.end(), {arguments.structure, {}});
  }
  structure->plans.push_back(std::move(plan));
  ++count_;
  ++plans_of_process;
}

bool PlanTable::has_structure(const Arguments& arguments) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return std::any_of(structures_.begin(), structures_.end(),
                     [&](const Structure& s) { return s.key == arguments.structure; });
}

std::vector<PlanTable::PlanPtr> PlanTable::all() {
  std::vector<PlanPtr> all;
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const Structure& structure : structures_) {
    all.insert(all.end(), structure.plans.begin(), structure.plans.end());
  }
  return all;
}

void PlanTable::clear() {
  std::vector<Structure> structures;  // destroyed after the lock is gone
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  structures.swap(structures_);
  plans_of_process -= std::exchange(count_, 0);
  ++clears_;
}

void PlanTable::after_fork() { new (&mutex_) std::shared_mutex; }

}  // namespace tsfuser
