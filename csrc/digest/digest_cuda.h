// Digests of a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "digest/digest_cuda_body.h"

namespace shardcore {

// out[i] += the digest of the table's segment i. All pointers are device memory. table: of chunks of kDigestChunk; num_chunks
// of them, > 0.
void digest_cuda(const ChunkTable<DigestSegment>& table, int64_t num_chunks, uint64_t* out, cudaStream_t stream);

}  // namespace shardcore
