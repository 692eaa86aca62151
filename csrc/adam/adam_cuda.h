// Adam over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "adam/adam_cuda_body.h"

namespace shardcore {

// All pointers are device memory. chunks: make_chunks(..., kAdamChunk) over the segments. num_chunks > 0.
// reduced: whether any segment has moments that are not float32, or a split master.
void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalars* scalars, bool reduced,
               cudaStream_t stream);

}  // namespace shardcore
