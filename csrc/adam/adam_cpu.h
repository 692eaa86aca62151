// Adam over a list of tensors on the CPU: one call, split over threads by elements.
#pragma once

#include <cstdint>

#include "adam/adam_scalars.h"
#include "adam/adam_segment.h"
#include "core/macros.h"

namespace shardcore {

class Executor;

// Updates segments[0:num_segments] in place. scalars[segments[i].hyper_index] are the scalars of segment i.
// Bits do not depend on the number of threads or on the instruction set.
void adam_cpu(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, Executor& executor);

// Elements [first, last) of one segment, per instruction set (adam_cpu_loop.h).
SHARDCORE_PER_ISA(void adam_span(const AdamSegment& segment, const AdamScalars& scalars, int64_t first, int64_t last);)

// How many elements ahead the loops prefetch, measured on a Xeon and on AMD's Zen 4 (docs/studies/adam_from_memory.md).
int64_t prefetch_elements();

}  // namespace shardcore
