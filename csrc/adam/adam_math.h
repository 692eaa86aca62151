// THE Adam formula. Every path (each CPU instruction set, CUDA) calls this one function, so all give the same bits.
//
// float32 with explicit fused multiply-adds, correctly rounded square root and division; the build forbids the compiler to
// contract or approximate (csrc/flags.txt). NaN propagates.
#pragma once

#include "adam/adam_scalars.h"
#include "core/float_ops.h"
#include "core/macros.h"

namespace shardcore {

// How the root and the division are made: this way for all floats; adam_roots.h has another, with the same bits.
struct ExactRoots {};
SHARDCORE_HD float square_root(const ExactRoots&, float x) { return sqrt_f32(x); }
SHARDCORE_HD float quotient(const ExactRoots&, float a, float b) { return a / b; }

// The formula in three parts. The moments; returns what the square root is taken of. p is the weight the formula owns: the
// parameter, or its float32 master.
// l2: Adam mode with weight decay. kAmsgrad: vmax is read and written, else it is not touched.
template <bool kAmsgrad>
SHARDCORE_HD float adam_moments(const AdamScalars& s, bool l2, float grad, float p, float& m, float& v, float* vmax) {
  float g = grad * s.grad_scale;
  if (l2) g = fma_f32(s.l2, p, g);
  m = fma_f32(s.beta1, m, s.one_minus_beta1 * g);
  v = fma_f32(s.beta2, v, (s.one_minus_beta2 * g) * g);
  if (!kAmsgrad) return v;
  const float old = *vmax;
  return *vmax = (v > old || v != v) ? v : old;  // an old NaN stays too: v > NaN is false
}

// The new weight.
template <typename Roots>
SHARDCORE_HD float adam_direction(const AdamScalars& s, float m, float second_moment, Roots& roots) {
  return quotient(roots, m, fma_f32(square_root(roots, second_moment), s.inv_sqrt_bc2, s.eps));
}

SHARDCORE_HD float adam_weight(const AdamScalars& s, float p, float direction) {
  return fma_f32(s.minus_step_size, direction, p * s.decay);
}

// One element.
template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_element(const AdamScalars& s, float grad, float& p, float& m, float& v, float* vmax) {
  const float second_moment = adam_moments<kAmsgrad>(s, kL2, grad, p, m, v, vmax);
  ExactRoots roots;
  p = adam_weight(s, p, adam_direction(s, m, second_moment, roots));
}

}  // namespace shardcore
