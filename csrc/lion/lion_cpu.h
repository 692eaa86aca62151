// Lion over a list of tensors on the CPU: one call, split over threads by elements.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "lion/lion_math.h"

namespace shardcore {

class Executor;

// Updates segments[0:num_segments] in place. Bits do not depend on the number of threads or on the instruction set.
void lion_cpu(const LionSegment* segments, int64_t num_segments, const LionScalars& scalars, Executor& executor);

// Elements [first, last) of one segment, per instruction set (lion_cpu_loop.h).
SHARDCORE_PER_ISA(void lion_span(const LionSegment& segment, const LionScalars& scalars, int64_t first, int64_t last);)

}  // namespace shardcore
