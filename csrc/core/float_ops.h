// Operations of float32 that every path rounds once, correctly.
#pragma once

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float fma_f32(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SHARDCORE_HD float sqrt_f32(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

}  // namespace shardcore
