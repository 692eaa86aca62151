// THE Lion formula: each CPU instruction set and CUDA call it, so all give the same bits. float32, rounded as adam_math.h says.
//
// Source: X. Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/fma.h"
#include "core/macros.h"

namespace shardcore {

// One tensor of a call.
struct LionSegment {
  void* param;       // numel elements of param_dtype; written, and read unless a master is given
  const void* grad;  // numel elements of grad_dtype
  void* exp_avg;     // numel elements of state_dtype
  float* master;     // numel elements; or null
  int64_t numel;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
};

// What the formula reads: made in double, rounded once.
struct LionScalars {
  float grad_scale;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float minus_lr;
  float decay;
};

SHARDCORE_HD LionScalars lion_scalars(double lr, double beta1, double beta2, double weight_decay, double grad_scale) {
  LionScalars s{};
  s.grad_scale = static_cast<float>(grad_scale);
  s.beta1 = static_cast<float>(beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.minus_lr = static_cast<float>(-lr);
  s.decay = static_cast<float>(1.0 - lr * weight_decay);
  return s;
}

// One element. A NaN stays one in the weight, too.
SHARDCORE_HD void lion_element(const LionScalars& s, float grad, float& p, float& m) {
  const float g = grad * s.grad_scale;
  const float direction = fma_f32(s.beta1, m, s.one_minus_beta1 * g);
  const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
  p = fma_f32(s.minus_lr, sign, p * s.decay);
  m = fma_f32(s.beta2, m, s.one_minus_beta2 * g);
}

}  // namespace shardcore
