// 8-bit states, and the random bits of reduced states. Element formulas, shared by every CPU instruction set and CUDA; they
// use multiplications by powers of two, compares and integers only, so bits are the same.
//
// Each 256-element block has a float32 scale: the smallest power of two that is not below its largest magnitude. A code is a
// small float relative to it with 3 bits of mantissa, exact to decode: for the first moment a sign, 4 bits of exponent and
// subnormals (5 decades below the scale), for the second 5 bits of exponent (10 decades). (Scales of blocks, and codes that
// are dense near zero: T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022. Floats need no table.)
// Invariants: codes are rounded stochastically, so a slowly moving average moves. A second moment that is not zero is never
// stored as zero (the update would divide by eps alone). What is not finite makes its block NaN.
#pragma once

#include <cstdint>

#include "core/convert.h"
#include "core/macros.h"
#include "core/random.h"

namespace shardcore {

constexpr int kMantissaBits = 3;
constexpr int kExpAvgBias = 15;    // code of 1.0: 15 << 3
constexpr int kExpAvgSqBias = 31;  // code of 1.0: 31 << 3

// The bits of |x|: as integers they order as the magnitudes do, with NaN above infinity.
SHARDCORE_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

// The scale of a block, from the largest magnitude_bits in it. At least the smallest normal float32, and at
// most 2^127 (what is above is cut), so that it has an inverse.
SHARDCORE_HD float scale_of(uint32_t largest_bits) {
  const uint32_t power = (largest_bits + 0x007fffffu) & 0x7f800000u;
  const uint32_t low = power < 0x00800000u ? 0x00800000u : power;
  const uint32_t normal = low < 0x7f000000u ? low : 0x7f000000u;
  return bits_float(largest_bits < 0x7f800000u ? normal : 0x7fc00000u);
}

static inline float block_scale(const float* SHARDCORE_RESTRICT x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = magnitude_bits(x[i]) > largest ? magnitude_bits(x[i]) : largest;
  return scale_of(largest);
}

// 2^exponent, for exponents of normal floats.
SHARDCORE_HD float power_of_two(int exponent) { return bits_float(static_cast<uint32_t>(127 + exponent) << 23); }

// The float that a code without sign stands for; 1.0 is bias << 3. Below 8 codes are subnormal: equal steps down to zero.
SHARDCORE_HD float small_float(int code, int bias) {
  const float normal = bits_float(static_cast<uint32_t>(code + ((127 - bias) << kMantissaBits)) << (23 - kMantissaBits));
  const float subnormal = static_cast<float>(code) * power_of_two(1 - bias - kMantissaBits);
  return code < (1 << kMantissaBits) ? subnormal : normal;
}

// The code of y (0 <= y <= 1), rounded by 16 random bits; 0x8000 rounds to nearest. NaN gives the code of 1.0.
SHARDCORE_HD int small_code(float y, int bias, uint32_t random) {
  const int top = bias << kMantissaBits;
  const int normal = static_cast<int>((float_bits(y) + (random << (7 - kMantissaBits))) >> (23 - kMantissaBits)) -
                     ((127 - bias) << kMantissaBits);
  const float steps = y * power_of_two(bias - 1 + kMantissaBits);
  const float below = steps < 8.0f ? steps : 0.0f;  // a number that every machine converts alike
  const int subnormal = static_cast<int>(below + static_cast<float>(static_cast<int32_t>(random)) * power_of_two(-16));
  const int code = y < power_of_two(1 - bias) ? subnormal : normal;
  return code < top ? code : top;
}

SHARDCORE_HD float decode_exp_avg(int8_t code, float scale) {
  const int sign = code >> 7;  // 0 or -1
  const float magnitude = small_float((code ^ sign) - sign, kExpAvgBias) * scale;
  return bits_float(float_bits(magnitude) ^ (static_cast<uint32_t>(sign) & 0x80000000u));
}

SHARDCORE_HD float decode_exp_avg_sq(uint8_t code, float scale) { return small_float(code, kExpAvgSqBias) * scale; }

// inv_scale: 1 / scale, exact.
SHARDCORE_HD int8_t encode_exp_avg(float x, float inv_scale, uint32_t random) {
  const int magnitude = small_code(bits_float(magnitude_bits(x)) * inv_scale, kExpAvgBias, random);
  const int sign = -static_cast<int>(x < 0.0f);  // no branches: loops vectorize
  return static_cast<int8_t>((magnitude ^ sign) - sign);
}

SHARDCORE_HD uint8_t encode_exp_avg_sq(float x, float inv_scale, uint32_t random) {
  const int code = small_code(bits_float(magnitude_bits(x)) * inv_scale, kExpAvgSqBias, random);
  return static_cast<uint8_t>(code + static_cast<int>(code == 0) * static_cast<int>(x != 0.0f));
}

// --- random bits of states: a stream beside the one of weights ------------------------------------------------------------

SHARDCORE_HD uint64_t state_key(uint64_t param_key) { return child_key(param_key, ~uint64_t{0}); }

// Of the 32 bits of an element, one half a state.
SHARDCORE_HD uint32_t exp_avg_noise(uint32_t random) { return random & 0xffffu; }
SHARDCORE_HD uint32_t exp_avg_sq_noise(uint32_t random) { return random >> 16; }

}  // namespace shardcore
