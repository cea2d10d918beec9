#include "group/resolved.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <new>

namespace tsfuser {
namespace {

bool is_lazy_tensor(const c10::IValue& value) {
  return value.isTensor() && is_lazy(refuse_tensor(value.toTensor()));
}

}  // namespace

const char* gather_resolved(at::ArrayRef<c10::IValue> inputs, Arguments& arguments,
                            torch::jit::Stack& resolved) {
  resolved.assign(inputs.begin(), inputs.end());
  try {
    for (c10::IValue& value : resolved) {
      if (is_lazy_tensor(value)) {
        value = value.toTensor().resolve_conj().resolve_neg();
      }
    }
  } catch (const c10::Error&) {
    return "not enough memory for copies of lazy conjugates or negatives";
  } catch (const std::bad_alloc&) {
    return "not enough memory for copies of lazy conjugates or negatives";
  }
  return gather(resolved, arguments);
}

const char* refuse_copies(const Plan& plan, at::ArrayRef<c10::IValue> inputs) {
  const auto is_returned = [&](const Result& result) {
    return result.kind == ResultKind::Input && is_lazy_tensor(inputs[result.index]);
  };
  if (std::any_of(plan.results.begin(), plan.results.end(), is_returned)) {
    return "a lazy conjugate or negative is returned as it is";
  }
  const auto shares_with_lazy = [&](const Update& update) {
    const at::Tensor& written = inputs[update.index].toTensor();
    return std::any_of(inputs.begin(), inputs.end(), [&](const c10::IValue& value) {
      return is_lazy_tensor(value) && value.toTensor().is_alias_of(written);
    });
  };
  return std::any_of(plan.updates.begin(), plan.updates.end(), shares_with_lazy)
             ? "the memory of a lazy conjugate or negative is written"
             : nullptr;
}

}  // namespace tsfuser
