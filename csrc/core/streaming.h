// Stores past the caches, for what is written whole and read once, later: a plain store first reads the line that it fills.
//
// Invariant: whoever streams calls stream_fence() before another thread may read.
#pragma once

#include <cstdint>

#include "core/macros.h"

#if SHARDCORE_X86
#include <xmmintrin.h>
#endif

namespace shardcore {

class Executor;

constexpr int64_t kStreamBytes = 256 * 1024;  // what is smaller may still be in a cache when it is read

SHARDCORE_HD bool streams(const void* out, int64_t bytes) {
  return SHARDCORE_X86 && bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

// out[0:n] = x[0:n]; out as `streams` has it, n a multiple of 16.
SHARDCORE_HD void stream_floats(float* out, const float* x, int64_t n) {
#if SHARDCORE_X86
  for (int64_t i = 0; i < n; i += 16) {  // a line at a time
    for (int64_t j = i; j < i + 16; j += 4) _mm_stream_ps(out + j, _mm_loadu_ps(x + j));
  }
#else
  for (int64_t i = 0; i < n; ++i) out[i] = x[i];
#endif
}

SHARDCORE_HD void stream_fence() {
#if SHARDCORE_X86
  _mm_sfence();
#endif
}

// dst[0:bytes] = src[0:bytes], which share no memory; past the caches if it is large.
void stream_copy(void* dst, const void* src, int64_t bytes, Executor& executor);

}  // namespace shardcore
