// THE Adam formula. Every path (each CPU instruction set, CUDA) calls this one function, so all give the same bits.
//
// float32 with explicit fused multiply-adds, correctly rounded square root and division; the build forbids the compiler to
// contract or approximate (csrc/flags.txt). NaN propagates.
#pragma once

#include "adam/adam_scalars.h"
#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float fma_f32(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SHARDCORE_HD float sqrt_f32(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// One element. p is the weight the formula owns: the parameter, or its float32 master.
// kL2: Adam mode with weight decay. kAmsgrad: vmax is read and written, else it is not touched.
template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_element(const AdamScalars& s, float grad, float& p, float& m, float& v, float* vmax) {
  float g = grad * s.grad_scale;
  if (kL2) g = fma_f32(s.l2, p, g);
  m = fma_f32(s.beta1, m, s.one_minus_beta1 * g);
  v = fma_f32(s.beta2, v, (s.one_minus_beta2 * g) * g);
  float second_moment = v;
  if (kAmsgrad) {
    const float old = *vmax;
    second_moment = (v > old || v != v) ? v : old;  // an old NaN stays too: v > NaN is false
    *vmax = second_moment;
  }
  const float denominator = fma_f32(sqrt_f32(second_moment), s.inv_sqrt_bc2, s.eps);
  p = fma_f32(s.minus_step_size, m / denominator, p * s.decay);
}

}  // namespace shardcore
