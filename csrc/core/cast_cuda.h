// Casts over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cast_cuda_body.h"

namespace shardcore {

// All pointers are device memory. chunks: make_chunks(..., kCastChunk). num_chunks > 0.
void cast_cuda(const CastSegment* segments, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream);

}  // namespace shardcore
