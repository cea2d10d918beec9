// x / y in float32 for many x and one y, rounded as a division. What takes a GPU's division longest is made
// of y alone, once; and no element takes a branch, between which no other element's work is done.
//
// In: y. From it come a `scale`, a power of two whose sign is opposite to y's, so that -0 / y keeps its
// sign; the `divisor`, y times the scale, which is negative and not so small that its reciprocal overflows;
// and its `reciprocal`. Out: quotients. One is off by a unit of its last place at most where |x| is below
// 2^-100, where x / y is subnormal, and where it is next to the largest number, which may become infinity.
// Example:
//
//     const float scale = divisor_scale(y), divisor = y * scale;
//     const float reciprocal = divisor_reciprocal(divisor);
//     ... = shared_quotient(x0, divisor, reciprocal, scale);   // x0 / y
#pragma once

#include "fast.h"

DEVICE float divisor_scale(float y) {
  return copysign(fabs(y) < 5.421011e-20f ? 1.8446744e19f : 1.0f, -y);  // 2^-64, 2^64
}

#if !defined(TSFUSER_CUDA)
DEVICE float near_reciprocal(float y) { return off_by(1 / y, 1.2e-7f); }
#endif

DEVICE float divisor_reciprocal(float divisor) {
  const float near = near_reciprocal(divisor), result = nearer_reciprocal(divisor, near);
  return is_nan(result) ? near : result;  // of 0 and infinity
}

// Of -0 the rest is 0, whose product with a negative number leaves -0 as it is.
DEVICE float shared_quotient(float x, float divisor, float reciprocal, float scale) {
  const float dividend = x * scale, near = dividend * reciprocal;
  const float result = nearer_quotient(dividend, divisor, reciprocal, near);
  return is_nan(result) ? near : result;  // an infinity leaves no rest
}

// Off by 2^-22.
DEVICE float fast_shared_quotient(float x, float, float reciprocal, float scale) {
  return x * scale * reciprocal;
}
