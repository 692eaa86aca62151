// What the threads of a warp do together. Kernel bodies take it as a template parameter, so that tests/cpp can run them with
// the host's stand-in.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

struct CudaWarp {
  // The largest of all 32 lanes, in every lane.
#if defined(__CUDACC__)
  __host__ __device__ __forceinline__ uint32_t max(uint32_t x) const {
#if defined(__CUDA_ARCH__)
    return __reduce_max_sync(0xffffffffu, x);
#else
    return x;  // never run: bodies on the host get the host's stand-in
#endif
  }
#endif
};

}  // namespace shardcore
