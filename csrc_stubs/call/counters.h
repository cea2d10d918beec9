// Counters of what the groups of this process have done, for `tsfuser.stats()`.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace tsfuser {

enum class Count : uint8_t {
  PlansBuilt,
  ExactHits,
  ClassHits,
  Launches,
  GraphCalls,
  PythonCalls,
  DirectCalls
};
constexpr size_t count_kinds = 7;

// Threads count in lines of their own, so that a hot path that counts is not a hot path that waits.
class Counters {
 public:
  void add(Count what, int64_t n = 1) {
    shards_[shard()].values[static_cast<size_t>(what)].fetch_add(n, std::memory_order_relaxed);
  }
  int64_t total(Count what) const;

  void add_fallback(const std::string& reason);
  std::map<std::string, int64_t> fallbacks();

  void clear();
  void after_fork();

 private:
  static constexpr size_t shard_count = 32, most_reasons = 1024;
  struct alignas(128) Shard {
    std::array<std::atomic<int64_t>, count_kinds> values{};
  };
  static size_t shard();

  std::array<Shard, shard_count> shards_;
  std::mutex mutex_;
  std::map<std::string, int64_t> fallbacks_;
};

Counters& counters();

}  // namespace tsfuser
