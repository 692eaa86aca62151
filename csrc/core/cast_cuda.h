// Casts over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cast.h"
#include "core/chunks.h"

namespace shardcore {

constexpr int64_t kCastChunk = 8192;

// All pointers are device memory. chunks: make_chunks(..., kCastChunk). num_chunks > 0.
void cast_cuda(const CastSegment* segments, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream);

}  // namespace shardcore
