// The square root and the division of the formula, without branches, for the numbers that occur: the same bits as ExactRoots.
//
// They are the steps that nvcc itself makes of a correctly rounded root and division: an approximation of the GPU (a few units
// in the last place), a Newton step, and a correction by the exact remainder (P. Markstein, IA-64 and Elementary Functions,
// 2000, ch. 8 and 9). nvcc tests each number for its range at once and branches; here one test serves many elements, so
// their long chains of operations overlap. The ranges are such that no step overflows and every remainder is exact.
#pragma once

#include <cmath>
#include <cstdint>

#include "adam/adam_math.h"
#include "adam/adam_scalars.h"
#include "core/convert.h"
#include "core/cuda_tuning.h"
#include "core/macros.h"

namespace shardcore {

// 1 / sqrt(x) and 1 / x, nearly; x is normal and positive.
SHARDCORE_HD float approximate_rsqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrtf(x);
#endif
}

SHARDCORE_HD float approximate_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// 2^exponent as bits, for exponents of normal floats.
constexpr uint32_t power_bits(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

constexpr uint32_t kRadicand = power_bits(-100), kRadicands = power_bits(30) - kRadicand;
constexpr uint32_t kNumerator = power_bits(-98), kNumerators = power_bits(60) - kNumerator;

struct FastRoots {
  uint32_t radicands = 0, numerators = 0;  // how far above the least of the range the largest was
};

SHARDCORE_HD float square_root(FastRoots& roots, float x) {
  const uint32_t above = float_bits(x) - kRadicand;  // negative numbers and NaN are far above
  roots.radicands = above > roots.radicands ? above : roots.radicands;
  const float r = approximate_rsqrt(x);
  const float root = x * r;
  return fma_f32(fma_f32(-root, root, x), 0.5f * r, root);
}

// b: of a root, and sure_scalars.
SHARDCORE_HD float quotient(FastRoots& roots, float a, float b) {
  const uint32_t above = (float_bits(a) & 0x7fffffffu) - kNumerator;
  roots.numerators = above > roots.numerators ? above : roots.numerators;
  const float r0 = approximate_reciprocal(b);
  const float r = fma_f32(r0, fma_f32(-b, r0, 1.0f), r0);
  const float q = a * r;
  return fma_f32(r, fma_f32(-b, q, a), q);
}

// Whether every result since the start is right. If not, all must be made anew by ExactRoots.
SHARDCORE_HD bool sure(const FastRoots& roots) { return roots.radicands <= kRadicands && roots.numerators <= kNumerators; }

// Whether denominators are between 2^-50 and 2^26 if radicands are in FastRoots' range.
SHARDCORE_HD bool sure_scalars(const AdamScalars& s) {
  return s.inv_sqrt_bc2 >= 1.0f && s.inv_sqrt_bc2 <= 1024.0f && s.eps >= 0.0f && s.eps <= 1024.0f;
}

// 4 elements, as adam_element. fast: sure_scalars.
template <bool kAmsgrad>
SHARDCORE_HD void adam_quartet(const AdamScalars& s, bool fast, const float* g, float* p, float* m, float* v, float* vmax) {
  float second_moment[4], direction[4];
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) {
    second_moment[k] = adam_moments<kAmsgrad>(s, s.l2 != 0.0f, g[k], p[k], m[k], v[k], kAmsgrad ? vmax + k : nullptr);
  }
#if SHARDCORE_FAST_ROOTS
  FastRoots roots;
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) direction[k] = adam_direction(s, m[k], second_moment[k], roots);
  if (!(fast && sure(roots)))
#endif
  {
    ExactRoots exact;
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) direction[k] = adam_direction(s, m[k], second_moment[k], exact);
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) p[k] = adam_weight(s, p[k], direction[k]);
}

}  // namespace shardcore
