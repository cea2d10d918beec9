#include "call/counters.h"

#include <new>

namespace tsfuser {

// Leaked, as all that is shared here: other threads may run groups while the process exits.
Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

size_t Counters::shard() {
  static std::atomic<size_t> next{0};
  static thread_local const size_t mine = next.fetch_add(1) % shard_count;
  return mine;
}

int64_t Counters::total(Count what) const {
  int64_t sum = 0;
  for (const Shard& shard : shards_) {
    sum += shard.values[static_cast<size_t>(what)].load(std::memory_order_relaxed);
  }
  return sum;
}

void Counters::add_fallback(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = fallbacks_.find(reason);
  if (known != fallbacks_.end()) {
    ++known->second;
  } else {
    ++fallbacks_[fallbacks_.size() < most_reasons ? reason : "other reasons"];
  }
}

std::map<std::string, int64_t> Counters::fallbacks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fallbacks_;
}

void Counters::clear() {
  for (Shard& shard : shards_) {
    for (auto& value : shard.values) {
      value.store(0, std::memory_order_relaxed);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  fallbacks_.clear();
}

void Counters::after_fork() { new (&mutex_) std::mutex; }

}  // namespace tsfuser
