// The fused multiply-add, rounded once, of every path.
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

}  // namespace shardcore
