// Casts between float32, bfloat16 and float16 with the rounding of core/convert.h, over a list of tensors, on the CPU.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/macros.h"

namespace shardcore {

class Executor;

struct CastSegment {
  void* dst;
  const void* src;
  int64_t numel;
  DType dst_dtype;
  DType src_dtype;
};

void cast_cpu(const CastSegment* segments, int64_t num_segments, Executor& executor);

// Elements [first, last) of one segment, per instruction set (cast_cpu_loop.h).
SHARDCORE_PER_ISA(void cast_span(const CastSegment& segment, int64_t first, int64_t last);)

}  // namespace shardcore
