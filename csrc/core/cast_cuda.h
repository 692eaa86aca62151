// Casts over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cast_cuda_body.h"

namespace shardcore {

// All pointers are device memory. table: of chunks of kCastChunk; num_chunks of them, > 0.
void cast_cuda(const ChunkTable<CastSegment>& table, int64_t num_chunks, cudaStream_t stream);

}  // namespace shardcore
