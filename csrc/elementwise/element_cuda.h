// SGD, Adagrad, Lion and casts over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "elementwise/element_cuda_body.h"

namespace shardcore {

// All pointers are device memory. table: of chunks of kElementChunk; num_chunks of them, > 0.
void update_elements_cuda(const ChunkTable<ElementSegment>& table, int64_t num_chunks, const ElementScalars& scalars,
                          cudaStream_t stream);

}  // namespace shardcore
