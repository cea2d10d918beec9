// The number that an argument of a group is.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/complex.h>

#include <cstdint>

namespace tsfuser {

inline c10::complex<double> number_of(const c10::IValue& value) {
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isComplexDouble()) {
    return value.toComplexDouble();
  }
  return static_cast<double>(value.isInt() ? value.toInt() : static_cast<int64_t>(value.toBool()));
}

inline int64_t integer_of(const c10::IValue& value) {
  if (value.isInt()) {
    return value.toInt();
  }
  return value.isBool() ? static_cast<int64_t>(value.toBool())
                        : static_cast<int64_t>(number_of(value).real());
}

}  // namespace tsfuser
