// Adam over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "adam/adam_cuda_body.h"
#include "adam/device_step.h"

namespace shardcore {

// All pointers are device memory. table: of chunks of kAdamChunk; num_chunks of them, > 0. form: adam_form_of its segments.
void adam_cuda(const ChunkTable<AdamSegment>& table, int64_t num_chunks, const AdamScalarsArg& scalars, int form,
               cudaStream_t stream);

// A device step: decides once per block, then makes the scalars, one thread per parameter. hypers, counts, state, scalars and
// what `terms` points to are device memory; `terms` itself and num_counts (> 0) are kept by a graph that captures the launch.
// Runs before adam_cuda of the same step.
void device_step_cuda(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, const DeviceStepTerms& terms,
                      DeviceStepState* state, AdamScalars* scalars, cudaStream_t stream);

}  // namespace shardcore
