// Adam over a list of tensors on CUDA: one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "adam/adam_cuda_body.h"
#include "adam/device_scalars.h"
#include "adam/step_verdict.h"

namespace shardcore {

// All pointers are device memory. chunks: make_chunks(..., kAdamChunk) over the segments. num_chunks > 0.
// kinds: moment_kinds_of them.
void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalarsArg& scalars,
               MomentKinds kinds, cudaStream_t stream);

// device_scalars_body, a thread a tensor. hypers, counts, scalars and what `decision` points to are device memory; `decision`
// itself and num_tensors (> 0) are kept by a graph that captures the launch. Runs before adam_cuda of the same step.
void device_scalars_cuda(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars, cudaStream_t stream);

// step_verdict_body, then verdict_scalars_body, a thread each of num_hypers (> 0). All pointers are device memory.
void step_verdict_cuda(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms, const VerdictHyper* hypers,
                       int64_t num_hypers, StepVerdict* verdict, AdamScalars* scalars, cudaStream_t stream);

}  // namespace shardcore
