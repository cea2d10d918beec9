// Complex numbers (placeholder until the arithmetic is here).
#pragma once

#include "types.h"

template <class T>
struct alignas(2 * sizeof(T)) complex_t {
  T re, im;
  complex_t() = default;
  DEVICE_MEMBER complex_t(T re, T im = T(0)) : re(re), im(im) {}
};
