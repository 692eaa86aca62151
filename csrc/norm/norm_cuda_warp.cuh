// Reductions of the norm within a warp and a CUDA block; shared by the norm and the ordered sum.
#pragma once

#include "norm/norm_cuda_body.h"

namespace shardcore {

// The steps 16 to 1 of the tree. The result is right in lane 0.
__device__ __forceinline__ double sq_norm_warp(double a) {
  for (int s = 16; s > 0; s >>= 1) a += __shfl_down_sync(0xffffffffu, a, s);
  return a;
}

// Adds the totals of all warps (each in its lane 0) in warp order; the result is right in thread 0.
__device__ __forceinline__ DoubleDouble add_warps(DoubleDouble total) {
  __shared__ double high[kNormWarps];
  __shared__ double low[kNormWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) {
    high[warp] = total.high;
    low[warp] = total.low;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kNormWarps; ++w) total = dd_add(total, DoubleDouble{high[w], low[w]});
  }
  return total;
}

}  // namespace shardcore
