// Lion over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lion/lion_cuda_body.h"

namespace shardcore {

// All pointers are device memory. table: of chunks of kLionChunk; num_chunks of them, > 0.
void lion_cuda(const ChunkTable<LionSegment>& table, int64_t num_chunks, const LionScalars& scalars, cudaStream_t stream);

}  // namespace shardcore
