// The scaling of the ordered sum, shared by the CPU loop and the CUDA body.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float scale_sum(float sum, double scale) { return static_cast<float>(static_cast<double>(sum) * scale); }

// Where float32 holds the scale (1/2, 1/4, ...) the product in float64 is exact, so a float32 product has the same bits.
SHARDCORE_HD void scale_sums(float* sums, int64_t numel, double scale) {
  const auto rounded = static_cast<float>(scale);
  if (static_cast<double>(rounded) == scale) {
    SHARDCORE_UNROLL
    for (int64_t i = 0; i < numel; ++i) sums[i] *= rounded;
  } else {
    SHARDCORE_UNROLL
    for (int64_t i = 0; i < numel; ++i) sums[i] = scale_sum(sums[i], scale);
  }
}

}  // namespace shardcore
