#include "torchscript/op_facts.h"

#include <mutex>
#include <utility>

namespace tsfuser {
namespace {

OpFacts& told() {
  static OpFacts* facts = new OpFacts;  // leaked: threads may ask as long as they run
  return *facts;
}

}  // namespace

const OpFacts& op_facts() { return told(); }

void set_op_facts(OpFacts facts) {
  static std::once_flag once;
  std::call_once(once, [&facts] { told() = std::move(facts); });
}

void leave_to_torch(const Kinds& kinds, const Kinds& in_place) {
  static std::once_flag once;
  std::call_once(once, [&] {
    for (const c10::Symbol kind : kinds) {
      told().computed.erase(kind);
      told().handed_on.erase(kind);
    }
    for (const c10::Symbol kind : in_place) {
      told().in_place.erase(kind);
    }
  });
}

}  // namespace tsfuser
