// The calls that this thread has made before, by exact sizes: a hit costs a hash and a comparison.
//
// In: a group, and the arguments of a call. Out: the prepared call, if this thread has it. Example: the
// second call of a group with the same sizes finds what the first one inserted. Each thread has a table of
// its own: as soon as two threads use a shared one, its lock and reference counts move between cores, which
// costs more than the rest of the lookup.
#pragma once

#include "call/plan.h"

#include <array>
#include <memory>

namespace tsfuser {

// Whose calls they are: a group's, or those of a group that one guard has let through. No number is given
// out twice.
using CallKey = uint64_t;
CallKey new_call_key();

class ExactTable {
 public:
  using Call = std::shared_ptr<const PreparedCall>;

  // What reset() leaves behind is of an older epoch and is not found any more.
  static uint64_t epoch();
  static void next_epoch();
  // Of the calling thread.
  static ExactTable& mine();

  // Null if there is none. What it points to lives until this thread's next `insert` or `clear`.
  const PreparedCall* find(CallKey key, const Arguments& arguments) const;
  // `epoch` is the one in which the call's plan was looked up.
  const PreparedCall* insert(CallKey key, uint64_t epoch, Call call);
  void clear() { entries_.reset(); }

 private:
  struct Entry {
    CallKey key = 0;
    uint64_t epoch = 0;
    Call call;
  };
  static constexpr size_t sets = 256, ways = 4;

  // The calls of equal groups, which have one hash, are not in one set.
  static size_t set_of(CallKey key, uint64_t hash) { return (hash + key) % sets * ways; }

  std::unique_ptr<std::array<Entry, sets * ways>> entries_;
  size_t next_victim_ = 0;
};

}  // namespace tsfuser
