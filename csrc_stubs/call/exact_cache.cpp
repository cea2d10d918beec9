#include "call/exact_cache.h"

#include <atomic>

namespace tsfuser {
namespace {

std::atomic<uint64_t> current_epoch{1};
std::atomic<CallKey> last_key{0};

}  // namespace

CallKey new_call_key() { return last_key.fetch_add(1, std::memory_order_relaxed) + 1; }

uint64_t ExactTable::epoch() { return current_epoch.load(std::memory_order_acquire); }

void ExactTable::next_epoch() { current_epoch.fetch_add(1, std::memory_order_acq_rel); }

ExactTable& ExactTable::mine() {
  static thread_local ExactTable table;
  return table;
}

const PreparedCall* ExactTable::find(CallKey key, const Arguments& arguments) const {
  if (!entries_) {
    return nullptr;
  }
  const uint64_t now = epoch();
  const Entry* set = entries_->data() + set_of(key, arguments.hash);
  for (size_t way = 0; way < ways; ++way) {
    if (set[way].key == key && set[way].epoch == now && set[way].call->serves(arguments)) {
      return set[way].call.get();
    }
  }
  return nullptr;
}

const PreparedCall* ExactTable::insert(CallKey key, uint64_t epoch, Call call) {
  if (!entries_) {
    entries_ = std::make_unique<std::array<Entry, sets * ways>>();
  }
  Entry* set = entries_->data() + set_of(key, call->hash);
  size_t way = 0;
  while (way < ways && set[way].epoch == epoch) {
    ++way;
  }
  Entry& entry = set[way < ways ? way : next_victim_++ % ways];
  entry = {key, epoch, std::move(call)};
  return entry.call.get();
}

}  // namespace tsfuser
