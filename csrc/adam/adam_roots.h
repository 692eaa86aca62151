// The square root and the division of the formula on CUDA, without branches, for the numbers that occur: the same bits as
// sqrt_f32 and / have.
//
// They are the very steps that nvcc makes of a correctly rounded root and division (machine code of sm_80 and sm_90): an
// approximation of the GPU, a Newton step, and a correction by the exact remainder (P. Markstein, IA-64 and Elementary
// Functions, 2000, ch. 8 and 9). nvcc tests the range of each number at once and branches; here one test serves four elements,
// so that their long chains of operations overlap. The ranges are such that no step overflows and every remainder is exact. On
// an H200 every root in range, and 5e9 quotients of random numbers, had the bits of the compiler's.
#pragma once

#include <cstdint>

#include "adam/adam_math.h"
#include "adam/adam_scalars.h"
#include "core/convert.h"
#include "core/macros.h"

namespace shardcore {

// 1 / sqrt(x) and 1 / x, nearly; x is normal and positive. The host has no such instructions, but the corrections must do with
// its numbers, too.
SHARDCORE_HD float approximate_rsqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrt_f32(x);
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

struct FastRoots {
  static constexpr uint32_t kRadicand = power_bits(-100), kRadicands = power_bits(30) - kRadicand;
  static constexpr uint32_t kNumerator = power_bits(-98), kNumerators = power_bits(60) - kNumerator;
  uint32_t radicands = 0, numerators = 0;  // how far above the least of its range the largest was
};

SHARDCORE_HD float square_root(FastRoots& roots, float x) {
  const uint32_t above = float_bits(x) - FastRoots::kRadicand;  // negative numbers and NaN are far above
  roots.radicands = above > roots.radicands ? above : roots.radicands;
  const float r = approximate_rsqrt(x);
  const float root = x * r;
  return fma_f32(fma_f32(-root, root, x), 0.5f * r, root);
}

// b: of a root in range, and sure_scalars.
SHARDCORE_HD float quotient(FastRoots& roots, float a, float b) {
  const uint32_t above = (float_bits(a) & 0x7fffffffu) - FastRoots::kNumerator;
  roots.numerators = above > roots.numerators ? above : roots.numerators;
  const float r0 = approximate_reciprocal(b);
  const float r = fma_f32(r0, fma_f32(-b, r0, 1.0f), r0);
  const float q = a * r;
  return fma_f32(r, fma_f32(-b, q, a), q);
}

// Whether every result since the start is right. If not, all must be made anew by ExactRoots.
SHARDCORE_HD bool sure(const FastRoots& roots) {
  return roots.radicands <= FastRoots::kRadicands && roots.numerators <= FastRoots::kNumerators;
}

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
  FastRoots roots;
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) direction[k] = adam_direction(s, m[k], second_moment[k], roots);
  if (!(fast && sure(roots))) {
    ExactRoots exact;
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) direction[k] = adam_direction(s, m[k], second_moment[k], exact);
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) p[k] = adam_weight(s, p[k], direction[k]);
}

}  // namespace shardcore
