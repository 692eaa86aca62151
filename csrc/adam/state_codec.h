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

constexpr int kDroppedBits = 20;                         // of a float32's mantissa: 3 bits of it stay
constexpr uint32_t kNearest = 1u << (kDroppedBits - 1);  // the noise that rounds to nearest
constexpr int kExpAvgBias = 15;                          // code of 1.0: 15 << 3
constexpr int kExpAvgSqBias = 31;                        // code of 1.0: 31 << 3

// The bits of |x|: as integers they order as the magnitudes do, with NaN above infinity.
SHARDCORE_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

SHARDCORE_HD uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The scale of a block, from the largest magnitude_bits in it. At least the smallest normal float32, and at
// most 2^127 (what is above is cut), so that it has an inverse.
SHARDCORE_HD float scale_of(uint32_t largest_bits) {
  const uint32_t power = (largest_bits + 0x007fffffu) & 0x7f800000u;
  const uint32_t low = power < 0x00800000u ? 0x00800000u : power;
  const uint32_t normal = low < 0x7f000000u ? low : 0x7f000000u;
  return bits_float(largest_bits < 0x7f800000u ? normal : 0x7fc00000u);
}

// 1 / scale of a scale_of, exact, without a division: 2^-127 is subnormal, so half of what the exponents give.
SHARDCORE_HD float inverse_of_scale(float scale) { return bits_float(0x7f800000u - float_bits(scale)) * 0.5f; }

static inline float block_scale(const float* SHARDCORE_RESTRICT x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = larger(largest, magnitude_bits(x[i]));
  return scale_of(largest);
}

// 2^exponent, for exponents of normal floats.
SHARDCORE_HD float power_of_two(int exponent) { return bits_float(static_cast<uint32_t>(127 + exponent) << 23); }

// Codes number the floats with 3 bits of mantissa upwards from zero, in equal steps (subnormals) up to the smallest normal one.
// Where a code or a float may be normal or subnormal, both formulas are evaluated and the right one is always the smaller
// (decoding) or the larger (encoding): no compare, no select, so that it costs little in every instruction set.
//
// On CUDA the multiplier does it: scaled by a power of two, codes are float32's own subnormal and normal numbers. The same bits
// (state_codec_test.cpp) in half the instructions, but CPUs take long for subnormals, and may be set to flush them.
SHARDCORE_HD float small_float_by_scaling(uint32_t wide_code, int bias) {
  return bits_float(wide_code) * power_of_two(127 - bias);
}

// What is above kDroppedBits is small_code.
SHARDCORE_HD uint32_t wide_code_by_scaling(float y, int bias, uint32_t noise) {
  const uint32_t code = float_bits(y * power_of_two(bias - 127)) + noise;
  const uint32_t top = (static_cast<uint32_t>(bias << 3) << kDroppedBits) | ((1u << kDroppedBits) - 1);
  return code < top ? code : top;
}

// The float that a code without sign stands for, given code << kDroppedBits; 1.0 is bias << 3.
SHARDCORE_HD float small_float(uint32_t wide_code, int bias) {
#if defined(__CUDA_ARCH__)
  return small_float_by_scaling(wide_code, bias);
#else
  const float normal = bits_float(wide_code + (static_cast<uint32_t>(127 - bias) << 23));
  const float above = normal - power_of_two(1 - bias);  // below zero for a subnormal code: it is that much too large
  return normal + (above < 0.0f ? above : 0.0f);
#endif
}

// The code of y (0 <= y <= 1), rounded by noise, 20 uniform bits (kNearest rounds to nearest). What is above 1, or NaN, gives
// the code of 1.0.
SHARDCORE_HD int small_code(float y, int bias, uint32_t noise) {
#if defined(__CUDA_ARCH__)
  return static_cast<int>(wide_code_by_scaling(y, bias, noise) >> kDroppedBits);
#else
  const uint32_t normal = float_bits(y);
  const uint32_t subnormal = float_bits(y + power_of_two(1 - bias)) - (1u << 23);
  const auto rounded = static_cast<uint16_t>((larger(normal, subnormal) + noise) >> kDroppedBits);
  const auto code = static_cast<uint16_t>(rounded - ((127 - bias) << 3));  // 16 bits: twice as many per vector
  const auto top = static_cast<uint16_t>(bias << 3);
  return code < top ? code : top;
#endif
}

SHARDCORE_HD float decode_exp_avg(int8_t code, float scale) {
  const int32_t wide = static_cast<int32_t>(code) * (1 << kDroppedBits);
  const float magnitude = small_float(static_cast<uint32_t>(wide < 0 ? -wide : wide), kExpAvgBias) * scale;
  return bits_float(float_bits(magnitude) | (static_cast<uint32_t>(wide) & 0x80000000u));
}

SHARDCORE_HD float decode_exp_avg_sq(uint8_t code, float scale) {
  return small_float(static_cast<uint32_t>(code) << kDroppedBits, kExpAvgSqBias) * scale;
}

// The code of a second moment, but at least 1 unless the moment is zero.
SHARDCORE_HD uint32_t not_zero_unless(uint32_t magnitude, uint32_t code) {
  const uint32_t smallest = magnitude < 1u ? magnitude : 1u;
  return larger(code, smallest);
}

// inv_scale: 1 / scale, exact.
SHARDCORE_HD int8_t encode_exp_avg(float x, float inv_scale, uint32_t noise) {
  const int magnitude = small_code(bits_float(magnitude_bits(x)) * inv_scale, kExpAvgBias, noise);
  return static_cast<int8_t>(x < 0.0f ? -magnitude : magnitude);
}

SHARDCORE_HD uint8_t encode_exp_avg_sq(float x, float inv_scale, uint32_t noise) {
  const uint32_t magnitude = magnitude_bits(x);
  const auto code = static_cast<uint32_t>(small_code(bits_float(magnitude) * inv_scale, kExpAvgSqBias, noise));
  return static_cast<uint8_t>(not_zero_unless(magnitude, code));
}

// --- random bits of states: a stream beside the one of weights ------------------------------------------------------------

SHARDCORE_HD uint64_t state_key(uint64_t param_key) { return child_key(param_key, ~uint64_t{0}); }

// Of an element's random32: the low 20 bits for the first 8-bit moment, the high 20 for the second. The 8 bits that both use
// are the highest of one and the lowest of the other, where they hardly ever decide. A bfloat16 second moment takes random16.
SHARDCORE_HD uint32_t exp_avg_noise(uint32_t random) { return random & ((1u << kDroppedBits) - 1); }
SHARDCORE_HD uint32_t exp_avg_sq_noise(uint32_t random) { return random >> (32 - kDroppedBits); }

}  // namespace shardcore
