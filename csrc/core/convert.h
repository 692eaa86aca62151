// Conversions between float32 and bfloat16 / float16, the same bits on every CPU and on CUDA.
//
// Invariants: no branches (so that loops vectorize), no dependence on FTZ/DAZ, NaN stays NaN.
//   bf16 store: to nearest, ties away from zero (a bf16 weight plus its int16 remainder is then the float32 master).
//   f16 store: to nearest, ties to even, with subnormals and infinities.
// The float16 conversions follow F. Giesen's method: for subnormals one float addition of a power of two makes the FPU
// shift and round the mantissa.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

SHARDCORE_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

SHARDCORE_HD float bf16_to_f32(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

// noise is added below the kept bits: 0x8000 rounds to nearest (ties away), a uniform 16-bit number rounds stochastically.
SHARDCORE_HD uint16_t f32_to_bf16_plus(float x, uint32_t noise) {
  const uint32_t u = float_bits(x);
  const uint32_t wide = x != x ? u | 0x400000u : u + noise;  // a NaN stays one, quiet
  return static_cast<uint16_t>(wide >> 16);
}

SHARDCORE_HD uint16_t f32_to_bf16(float x) { return f32_to_bf16_plus(x, 0x8000u); }

SHARDCORE_HD float f16_to_f32(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;  // one instruction instead of twelve
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  constexpr uint32_t kExponent = 0x7c00u << 13;
  const uint32_t shifted = (h & 0x7fffu) << 13;
  const uint32_t exponent = shifted & kExponent;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = normal + (112u << 23);                                                   // inf, nan
  const uint32_t subnormal = float_bits(bits_float(normal + (1u << 23)) - bits_float(113u << 23));  // and zero
  const uint32_t magnitude = exponent == kExponent ? special : (exponent == 0 ? subnormal : normal);
  return bits_float(magnitude | (static_cast<uint32_t>(h & 0x8000u) << 16));
#endif
}

SHARDCORE_HD uint16_t f32_to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;  // carries into infinity from 65520 on
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t h = magnitude >= (143u << 23) ? special : (magnitude < (113u << 23) ? subnormal : normal);
  return static_cast<uint16_t>(h | ((u >> 16) & 0x8000u));
}

// A split master: a bfloat16 weight (f32_to_bf16 of the master) and the int16 that makes it the float32 master again, lossless.
// The user may write the weight in between. Any value but zero is valid with any remainder; zero with a remainder below zero,
// which no master produces (it would have the bits of a NaN, which no other sum has), is zero.
SHARDCORE_HD float split_from_sum(uint32_t sum) {
  return bits_float(static_cast<int32_t>(sum & 0x7fffffffu) < 0x7fff8000 ? sum : ~sum & 0x80000000u);
}

SHARDCORE_HD float split_to_f32(uint16_t weight, int16_t remainder) {
  return split_from_sum((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(int32_t{remainder}));
}

SHARDCORE_HD int16_t split_remainder(float master) { return static_cast<int16_t>(float_bits(master) & 0xffffu); }

// Element i of an array of the given dtype, as float32.
SHARDCORE_HD float load_as_f32(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::bf16 ? bf16_to_f32(h) : f16_to_f32(h);
}

SHARDCORE_HD void store_from_f32(void* data, DType dtype, int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<uint16_t*>(data)[i] = dtype == DType::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
  }
}

}  // namespace shardcore
