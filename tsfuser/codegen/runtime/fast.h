// Forms of functions of math.h and activations.h that take fewer instructions of a GPU, and are off by more.
//
// In: float registers. Out: the function, off by at most the `error` that its symbol states (`Fast` in
// ir/symbols.py), relative to the result, or to the operands where the formula cancels. NaN, infinities,
// zeros and subnormals are those of the exact form. Example: `fast_sigmoid(x)` takes 5 instructions,
// `sigmoid(x)` 25.
//
// Beside float arithmetic they use instructions of the GPU's unit for special functions, 16 of which a
// multiprocessor starts in a cycle, where it starts 128 others. The errors are those that the PTX ISA states
// (section "Floating Point Instructions"). On the host the instructions are emulated, each result off by as
// much as it may be, in the direction that a hash of it says; for tests TSFUSER_APPROX_ERROR (-1, 0 or 1)
// says the direction for all.
#pragma once

#include "activations.h"

// ---- instructions

#if defined(TSFUSER_CUDA)

#define APPROXIMATE(NAME, INSTRUCTION)                   \
  DEVICE float NAME(float x) {                           \
    float result;                                        \
    asm(INSTRUCTION " %0, %1;" : "=f"(result) : "f"(x)); \
    return result;                                       \
  }
APPROXIMATE(approx_exp2, "ex2.approx.ftz.f32")        // 2 ulp; subnormal results are 0
APPROXIMATE(approx_reciprocal, "rcp.approx.ftz.f32")  // 1 ulp; subnormal operands and results are 0
APPROXIMATE(approx_log2, "lg2.approx.f32")   // 2^-22: absolute between 0.5 and 2, elsewhere relative
APPROXIMATE(approx_sqrt, "sqrt.approx.f32")  // 2^-23 relative
#undef APPROXIMATE

DEVICE float approx_divide(float x, float y) {  // 2 ulp
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

#else

// 1 or -1: whether an approximation of `x` is too large or too small.
DEVICE float side_of(float x) {
#if defined(TSFUSER_APPROX_ERROR)
  return TSFUSER_APPROX_ERROR;
#else
  return bit_cast<uint32_t>(x) * 2654435761u >> 31 ? 1.0f : -1.0f;
#endif
}
DEVICE float flushed(float x) { return fabs(x) < 1.17549435e-38f ? copysign(0.0f, x) : x; }
DEVICE float off_by(float x, float error) { return is_finite(x) ? x + x * (side_of(x) * error) : x; }

DEVICE float approx_exp2(float x) {  // exact of whole numbers, as a GPU's is
  const float result = exp2(x);
  return flushed(x == rint(x) ? result : off_by(result, 2.4e-7f));
}
DEVICE float approx_reciprocal(float x) {  // exact of powers of two, as a GPU's is
  const float result = 1 / flushed(x);
  return flushed((bit_cast<uint32_t>(x) & 0x7fffff) == 0 ? result : off_by(result, 1.2e-7f));
}
DEVICE float approx_log2(float x) {
  const float result = log2(x);
  return x > 0.5f && x < 2.0f ? result + side_of(x) * 2.4e-7f : off_by(result, 2.4e-7f);
}
DEVICE float approx_sqrt(float x) { return off_by(sqrt(x), 1.2e-7f); }
DEVICE float approx_divide(float x, float y) { return off_by(x / y, 2.4e-7f); }

#endif

// ---- exponentials

DEVICE float fast_exp(float x) {  // the square of a root that is never subnormal
  const float root = approx_exp2(x * 0.72134752f);
  return root * root;
}
// 2^24 / (1 + exp(-x)), which neither overflows nor is subnormal where 1 / (1 + exp(-x)) is; in: 2^-24
// exp(-x).
DEVICE float scaled_sigmoid(float power) { return approx_reciprocal(power + 5.9604645e-8f); }
DEVICE float fast_sigmoid(float x) {
  return scaled_sigmoid(approx_exp2(x * -1.44269504f - 24.0f)) * 5.9604645e-8f;
}
DEVICE float fast_tanh(float x) {
  const float by_exp = -2.0f * (approx_reciprocal(approx_exp2(x * 2.88539008f) + 1.0f)) + 1.0f;
  return fabs(x) < 0.09f ? x * (x * x * -0.3325f + 1.0f) : by_exp;
}
DEVICE float fast_expm1(float x) {
  const float series = (x * 0.041666668f + 0.16666667f) * x + 0.5f;
  return fabs(x) < 0.09f ? x * (series * x + 1.0f) : fast_exp(x) - 1.0f;
}

// ---- logarithms

// log(1 + t) for a small t.
DEVICE float log1p_series(float t) {
  float series = t * 0.2f - 0.25f;
  series = series * t + 0.33333334f;
  series = series * t - 0.5f;
  return t * (series * t + 1.0f);
}
DEVICE float fast_log(float x) {
  const float t = x - 1.0f;
  return fabs(t) < 0.06f ? log1p_series(t) : approx_log2(x) * 0.69314718f;
}
DEVICE float fast_log1p(float x) {
  return fabs(x) < 0.06f ? log1p_series(x) : approx_log2(1.0f + x) * 0.69314718f;
}

// ---- quotients and roots

DEVICE float fast_divide(float x, float y) { return approx_divide(x, y); }
DEVICE float fast_sqrt(float x) { return approx_sqrt(x); }

// ---- activations

DEVICE float fast_silu(float x) { return x * fast_sigmoid(x); }
DEVICE float fast_hardsigmoid(float x) { return clamp(x + 3, 0, 6) * 0.16666667f; }
DEVICE float fast_hardswish(float x) { return x * clamp(x + 3, 0, 6) * 0.16666667f; }
DEVICE float fast_elu(float x, float alpha, float scale, float input_scale) {
  return is_scaled_by_elu(x) ? x * scale : fast_expm1(x * input_scale) * (alpha * scale);
}
DEVICE float fast_selu(float x) { return fast_elu(x, 1.6732632423543772f, 1.0507009873554805f, 1); }
DEVICE float fast_celu(float x, float alpha) {
  return is_scaled_by_elu(x) ? x : fast_expm1(approx_divide(x, alpha)) * alpha;
}
DEVICE float fast_softplus(float x, float beta, float threshold) {
  const float z = x * beta;
  const float result = approx_divide(nan_max(z, 0) + fast_log1p(fast_exp(-fabs(z))), beta);
  return z > threshold ? x : result;
}
DEVICE float fast_log_sigmoid(float x) { return nan_min(x, 0) - fast_log1p(fast_exp(-fabs(x))); }

// With n = exp(x) and w = n (n + 2): tanh(log(1 + n)) = w / (w + 2). From x = 20 on that is 1.
DEVICE float fast_mish(float x) {
  const float n = fast_exp(x < 20.0f ? x : 20.0f);
  const float w = n * (n + 2.0f);
  return x * (w * approx_reciprocal(w + 2.0f));
}

// 2^24 exp(-x^2 / 2), which is not subnormal where exp(-x^2 / 2) is.
DEVICE float scaled_bell(float x) { return approx_exp2(x * x * -0.72134752f + 24.0f); }
// The normal distribution function of -|x|: exp(-x^2 / 2) P(t), t = 1 / (1 + p |x|), the form of Abramowitz
// and Stegun 7.1.26; P is fitted to a relative error of 2^-17.7, and its coefficients are times 2^-24.
DEVICE float normal_tail(float x, float bell) {
  const float t = approx_reciprocal(fabs(x) * 0.31f + 1.0f);
  float p = t * -4.40646885e-09f + 1.0755533e-08f;
  p = p * t + 9.38615352e-10f;
  p = p * t + 7.95295447e-09f;
  p = p * t + 7.17887884e-09f;
  p = p * t + 7.38267142e-09f;
  return bell * (p * t);
}
DEVICE float fast_gelu(float x) {
  const float tail = normal_tail(x, scaled_bell(x));
  return x * (x < 0 ? tail : 1.0f - tail);
}
// Of gelu's approximation x (1 + tanh(u)) / 2, which is x sigmoid(2 u): log2(exp(-2 u)).
DEVICE float gelu_tanh_exponent(float x) { return x * (x * x * -0.10294324f - 2.3022082f); }
DEVICE float fast_gelu_tanh(float x) {
  return x * (scaled_sigmoid(approx_exp2(gelu_tanh_exponent(x) - 24.0f)) * 5.9604645e-8f);
}

// ---- derivatives

DEVICE float fast_gelu_backward(float grad, float x) {
  const float bell = scaled_bell(x);
  const float tail = normal_tail(x, bell);
  const float cdf = x < 0 ? tail : 1.0f - tail;
  return grad * (x * (bell * 2.37788129e-08f) + cdf);
}
// sigmoid(x) and 1 - sigmoid(x), from log2(exp(-x)). The latter is exactly 0 where x is large, and the
// former, which is 2^-32 times a number, where x is far below 0, since both may be multiplied by x.
struct sigmoids {
  float lower, upper;
};
DEVICE sigmoids sigmoids_of(float exponent) {
  const float shifted = exponent - 32.0f;
  const float power = approx_exp2(shifted < 125.0f ? shifted : 125.0f);
  const float scaled = approx_reciprocal(power + 2.3283064e-10f);
  return {scaled * 2.3283064e-10f, power * scaled};
}
DEVICE float fast_gelu_tanh_backward(float grad, float x) {
  const sigmoids s = sigmoids_of(gelu_tanh_exponent(x));
  return grad * (x * s.lower * s.upper * 1.5957691f * (0.134145f * x * x + 1.0f) + s.lower);
}
DEVICE float fast_silu_backward(float grad, float x) {
  const sigmoids s = sigmoids_of(x * -1.44269504f);
  return grad * s.lower * (1.0f + x * s.upper);
}
DEVICE float fast_softplus_backward(float grad, float x, float beta, float threshold) {
  const float z = fast_exp(x * beta);
  return x * beta > threshold ? grad : approx_divide(grad * z, z + 1);
}
DEVICE float fast_elu_backward(float grad, float x, float alpha, float scale, float input_scale) {
  return is_above(x, 0.0f) ? grad * scale : grad * input_scale * (alpha * scale) * fast_exp(x * input_scale);
}
