// Squared norm of a list of tensors on the CPU.
#pragma once

#include <cstdint>

#include "core/double_double.h"
#include "core/dtype.h"
#include "core/macros.h"

namespace shardcore {

class Executor;

struct NormSegment {
  const void* data;
  int64_t numel;
  DType dtype;
};

// Block sums (norm_block.h) added in double-double in list order, in groups of fixed size: the result does not depend on the
// number of threads. high is not finite if any element is not.
DoubleDouble sq_norm_cpu(const NormSegment* segments, int64_t num_segments, Executor& executor);

// Blocks [first_block, last_block) of one segment, added to total, per instruction set (norm_cpu_loop.h).
SHARDCORE_PER_ISA(void sq_norm_span(const NormSegment& segment, int64_t first_block, int64_t last_block, DoubleDouble& total);)

}  // namespace shardcore
