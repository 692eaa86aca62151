// The sum of squares of one 256-element block, in one fixed order: each element squared in float64 (exact), then a halving
// tree over the zero-padded block. CPU and CUDA map it differently and add in the same tree.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/tile.h"

namespace shardcore {

SHARDCORE_HD double square_f64(float x) { return static_cast<double>(x) * static_cast<double>(x); }

// x^2 + y^2, rounded once. Both squares are exact, so fused or not the sum has the same bits.
SHARDCORE_HD double sum_of_squares(float x, float y) {
#if defined(__CUDA_ARCH__)
  const double wide = x;
  return __fma_rn(wide, wide, square_f64(y));
#else
  return square_f64(x) + square_f64(y);
#endif
}

// x: kBlock floats (zero-padded).
static inline double sq_norm_block(const float* SHARDCORE_RESTRICT x) {
  alignas(64) double a[kBlock / 2];
  for (int j = 0; j < 128; ++j) a[j] = sum_of_squares(x[j], x[j + 128]);
  for (int j = 0; j < 64; ++j) a[j] += a[j + 64];
  for (int j = 0; j < 32; ++j) a[j] += a[j + 32];
  for (int j = 0; j < 16; ++j) a[j] += a[j + 16];
  for (int j = 0; j < 8; ++j) a[j] += a[j + 8];
  for (int j = 0; j < 4; ++j) a[j] += a[j + 4];
  return (a[0] + a[2]) + (a[1] + a[3]);
}

}  // namespace shardcore
