// The calls that this thread has made before, by exact sizes: a hit costs a hash and a comparison.
//
// In: a group and the arguments of a call. Out: the prepared call, if this thread has it. Example: the
// second call of a group with the same sizes finds what the first one inserted. A thread has its own table
// because a shared one costs more than the rest of the lookup as soon as two threads hit it (lock and
// reference counts bounce between cores).
#pragma once

#include "call/plan.h"

#include <array>
#include <memory>

namespace tsfuser {

class Group;

class ExactTable {
 public:
  using Call = std::shared_ptr<const PreparedCall>;

  // What reset() leaves behind is of an older epoch and is not found any more.
  static uint64_t epoch();
  static void next_epoch();
  // Of the calling thread.
  static ExactTable& mine();

  // Null if there is none. What it points to lives until this thread's next `insert` or `clear`.
  const PreparedCall* find(const Group* group, const Arguments& arguments) const;
  // `epoch` is the one in which the call's plan was looked up.
  const PreparedCall* insert(const Group* group, uint64_t epoch, Call call);
  void clear() { entries_.reset(); }

 private:
  struct Entry {
    const Group* group = nullptr;
    uint64_t epoch = 0;
    Call call;
  };
  static constexpr size_t sets = 256, ways = 4;

  std::unique_ptr<std::array<Entry, sets * ways>> entries_;
  size_t next_victim_ = 0;
};

}  // namespace tsfuser
