// THE formulas of SGD, Adagrad and Lion, and casts as one that takes the gradient for the weight: each CPU instruction set and
// CUDA call them, so all give the same bits. float32, rounded where the steps of torch.optim's SGD and Adagrad and of
// shardcore.Lion round on the CPU (torch's root may not be the nearest).
//
// Source: torch.optim.SGD and Adagrad as documented; X. Chen et al., Symbolic Discovery of Optimization Algorithms (2023),
// algorithm 2 (Lion).
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/float_ops.h"
#include "core/macros.h"

namespace shardcore {

enum class Formula : uint8_t { sgd, momentum, nesterov, adagrad, lion, assign };

// One tensor of a call.
struct ElementSegment {
  void* param;       // numel elements of param_dtype; written, and read unless a master is given, or assigned
  const void* grad;  // numel elements of grad_dtype
  void* state;       // numel elements of state_dtype: the momentum, or Adagrad's sum; null for sgd and assign
  float* master;     // numel elements; or null
  int64_t numel;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
};

// What the formulas read.
struct ElementScalars {
  Formula formula;
  float grad_scale;         // negated for maximize
  float l2;                 // weight decay that is added to the gradient; 0 switches its fma off
  float decay;              // Lion: what weights are multiplied by
  float minus_lr;           // Adagrad: with its decay
  float beta1, one_minus1;  // of the direction (Lion); of nesterov the first is the momentum
  float beta2, one_minus2;  // of the state: Lion's average; the momentum and 1 - dampening, in the first step -0 and 1
  float eps;
};

// A cast: param = grad, rounded as core/convert.h has it. No l2, no master.
inline ElementSegment assignment(void* param, DType param_dtype, const void* grad, DType grad_dtype, int64_t numel) {
  return {param, grad, nullptr, nullptr, numel, param_dtype, grad_dtype, DType::f32};
}
constexpr ElementScalars kAssign{Formula::assign, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};

// One element. l2: s.l2 is not 0. A NaN stays one in the weight, too.
template <Formula kFormula>
SHARDCORE_HD void update_element(const ElementScalars& s, bool l2, float grad, float& p, float& state) {
  float g = grad * s.grad_scale;
  if (l2) g = fma_f32(s.l2, p, g);
  if (kFormula == Formula::assign) {
    p = g;
  } else if (kFormula == Formula::lion) {
    const float direction = fma_f32(s.one_minus1, g, s.beta1 * state);
    const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
    p = fma_f32(s.minus_lr, sign, p * s.decay);
    state = fma_f32(s.one_minus2, g, s.beta2 * state);
  } else if (kFormula == Formula::adagrad) {
    state = fma_f32(g, g, state);
    p = p + s.minus_lr * g / (sqrt_f32(state) + s.eps);
  } else {
    if (kFormula != Formula::sgd) {
      state = fma_f32(s.one_minus2, g, s.beta2 * state);
      g = kFormula == Formula::nesterov ? fma_f32(s.beta1, state, g) : state;
    }
    p = fma_f32(s.minus_lr, g, p);
  }
}

}  // namespace shardcore
