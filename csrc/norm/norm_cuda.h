// Squared norm of a list of tensors on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/double_double.h"
#include "norm/norm_cpu.h"
#include "norm/norm_cuda_body.h"

namespace shardcore {

// items: of a NormPlan; all pointers are device memory. partial: num_chunks sums, scratch. num_chunks > 0. One launch, which
// may be captured in a graph and run beside others on other streams. The block sums have the CPU's bits; their double-double
// total agrees to about 100 bits, whatever the grouping.
void sq_norm_cuda(const NormItems& items, int64_t num_chunks, DoubleDouble* partial, DoubleDouble* out, cudaStream_t stream);

// out[0] = partial[0] + partial[1] + ... in a fixed order.
void add_partials_cuda(const DoubleDouble* partial, int64_t count, DoubleDouble* out, cudaStream_t stream);

}  // namespace shardcore
