// SGD, Adagrad, Lion and casts over a list of tensors on the CPU: one call, split over threads by elements.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "elementwise/element_math.h"

namespace shardcore {

class Executor;

// Updates segments[0:num_segments] in place. Bits do not depend on the number of threads or on the instruction set.
void update_elements_cpu(const ElementSegment* segments, int64_t num_segments, const ElementScalars& scalars,
                         Executor& executor);

// Elements [first, last) of one segment, per instruction set (element_cpu_loop.h).
SHARDCORE_PER_ISA(void element_span(const ElementSegment& segment, const ElementScalars& scalars, int64_t first, int64_t last);)

}  // namespace shardcore
