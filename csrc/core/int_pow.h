// beta^t for an integer t, by squaring: only multiplications, so the same bits on the host and on CUDA.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD double int_pow(double base, int64_t exponent) {
  double result = 1.0;
  for (int64_t n = exponent; n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace shardcore
