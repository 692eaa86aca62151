// The scalars of one Adam step: made in double, rounded once to float32, on the host or on the device, to the same bits.
//
// Source: D. Kingma and J. Ba, Adam (2015), algorithm 1; I. Loshchilov and F. Hutter, Decoupled Weight Decay (2019).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/int_pow.h"
#include "core/macros.h"
#include "core/random.h"

namespace shardcore {

// What the user chose, and the step count (from 1).
struct AdamHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double grad_scale = 1.0;  // multiplies the gradient
  int64_t step = 1;
  uint64_t seed = 0;
  bool adam_w_mode = true;
  bool bias_correction = true;
  bool maximize = false;
  bool stochastic_rounding = false;  // of bf16 parameters without a master
};

// What the formula reads.
struct AdamScalars {
  float grad_scale;  // negated for maximize: grad * -scale has the bits of -(grad * scale)
  float l2;          // weight decay of Adam mode; 0 switches its fma off
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float inv_sqrt_bc2;
  float eps;
  float minus_step_size;
  float decay;
  uint32_t stochastic_rounding;
  uint32_t skip;        // the step is skipped: nothing is written (made on the device only, device_step.h)
  uint64_t random_key;  // of (seed, step)
};

SHARDCORE_HD AdamScalars adam_scalars(const AdamHyper& h) {
  const double bc1 = h.bias_correction ? 1.0 - int_pow(h.beta1, h.step) : 1.0;
  const double bc2 = h.bias_correction ? 1.0 - int_pow(h.beta2, h.step) : 1.0;
  AdamScalars s{};
  s.grad_scale = static_cast<float>(h.maximize ? -h.grad_scale : h.grad_scale);
  s.l2 = static_cast<float>(h.adam_w_mode ? 0.0 : h.weight_decay);
  s.beta1 = static_cast<float>(h.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  s.beta2 = static_cast<float>(h.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  s.inv_sqrt_bc2 = static_cast<float>(1.0 / sqrt(bc2));
  s.eps = static_cast<float>(h.eps);
  s.minus_step_size = static_cast<float>(-(h.lr / bc1));
  s.decay = static_cast<float>(h.adam_w_mode ? 1.0 - h.lr * h.weight_decay : 1.0);
  s.stochastic_rounding = h.stochastic_rounding ? 1u : 0u;
  s.random_key = child_key(child_key(0, h.seed), static_cast<uint64_t>(h.step));
  return s;
}

}  // namespace shardcore
