// 8-bit states, and the random bits of reduced states. Element formulas, shared by every CPU instruction set and CUDA; they
// use only + * sqrt, compares and integers, so bits are the same.
//
// Each 256-element block has a float32 scale, its largest magnitude. A code c of the first moment (signed,
// -127..127) stands for scale * (c/127)*|c/127|, one of the second (0..255) for scale * (c/255)^4: relative steps near the
// scale of about 1.6 %, and a range of 4 and of 9 decades below it. (Block-wise scales and a map that is dense near zero:
// T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022; the power maps need no table.)
// Invariants: codes are rounded stochastically, so a slowly moving average moves. A second moment that is not zero is never
// stored as zero (the update would divide by eps alone). The largest element keeps its value. NaN makes its block NaN.
#pragma once

#include <cstdint>

#include "adam/adam_math.h"
#include "core/convert.h"
#include "core/macros.h"
#include "core/random.h"

namespace shardcore {

constexpr float kMaxCode1 = 127.0f;
constexpr float kMaxCode2 = 255.0f;

// The bits of |x|: as integers they order as the magnitudes do, with NaN above infinity.
SHARDCORE_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

// The scale of a block.
static inline float block_scale(const float* SHARDCORE_RESTRICT x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = magnitude_bits(x[i]) > largest ? magnitude_bits(x[i]) : largest;
  return bits_float(largest);
}

SHARDCORE_HD float decode_exp_avg(int8_t code, float scale) {
  const float q = static_cast<float>(code) * (1.0f / kMaxCode1);
  return (q * bits_float(magnitude_bits(q))) * scale;
}

SHARDCORE_HD float decode_exp_avg_sq(uint8_t code, float scale) {
  const float q = static_cast<float>(code) * (1.0f / kMaxCode2);
  const float q2 = q * q;
  return (q2 * q2) * scale;
}

// Where x lies between two neighbouring codes: above `low` by `part` of the step to the next, all in the map's own units.
// random: 16 uniform bits, compared with part/step; 0x8000 rounds to nearest.
SHARDCORE_HD int round_code(int low, float part, float step, uint32_t random) {
  return low + static_cast<int>(static_cast<float>(static_cast<int32_t>(random)) * step < part * 65536.0f);
}

// r clamped to [low, high] and cut to an integer; NaN becomes low.
SHARDCORE_HD int clamped_floor(float r, float low, float high) {
  float x = r < high ? r : high;
  x = r > low ? x : low;
  return static_cast<int>(x);
}

// inv_scale: 1 / scale, in float32.
SHARDCORE_HD int8_t encode_exp_avg(float x, float inv_scale, uint32_t random) {
  const float y = (bits_float(magnitude_bits(x)) * inv_scale) * (kMaxCode1 * kMaxCode1);
  const int low = clamped_floor(sqrt_f32(y), 0.0f, kMaxCode1 - 1.0f);
  const float k = static_cast<float>(low);
  const int magnitude = round_code(low, y - k * k, k + k + 1.0f, random);
  const int sign = -static_cast<int>(x < 0.0f);  // 0 or -1
  return static_cast<int8_t>((magnitude ^ sign) - sign);
}

SHARDCORE_HD uint8_t encode_exp_avg_sq(float x, float inv_scale, uint32_t random) {
  const float y = (x * inv_scale) * (kMaxCode2 * kMaxCode2 * kMaxCode2 * kMaxCode2);
  const int low = clamped_floor(sqrt_f32(sqrt_f32(y)), 1.0f, kMaxCode2 - 1.0f);
  const float k = static_cast<float>(low);
  const float k2 = k * k, k4 = k2 * k2;
  const float n2 = (k + 1.0f) * (k + 1.0f), n4 = n2 * n2;
  const int code = round_code(low, y - k4, n4 - k4, random);
  return static_cast<uint8_t>(code & -static_cast<int>(x != 0.0f));  // no branch: loops vectorize
}

// --- random bits of states: a stream beside the one of weights ------------------------------------------------------------

SHARDCORE_HD uint64_t state_key(uint64_t param_key) { return child_key(param_key, ~uint64_t{0}); }

// Of the 32 bits of an element, one half a state.
SHARDCORE_HD uint32_t exp_avg_noise(uint32_t random) { return random & 0xffffu; }
SHARDCORE_HD uint32_t exp_avg_sq_noise(uint32_t random) { return random >> 16; }

}  // namespace shardcore
