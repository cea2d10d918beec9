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

void leave_in_place(const Kinds& kinds) {
  static std::once_flag once;
  std::call_once(once, [&] {
    for (const c10::Symbol kind : kinds) {
      told().in_place.erase(kind);
    }
  });
}

}  // namespace tsfuser
