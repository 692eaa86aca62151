// Digests of a list of tensors on the CPU.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "digest/digest_math.h"

namespace shardcore {

class Executor;

// out[i]: the digest of segments[i].
void digest_cpu(const DigestSegment* segments, int64_t num_segments, uint64_t* out, Executor& executor);

// Blocks [first_block, last_block) of one segment, counted within it, per instruction set (digest_cpu_loop.h).
SHARDCORE_PER_ISA(uint64_t digest_span(const DigestSegment& segment, int64_t first_block, int64_t last_block);)

}  // namespace shardcore
