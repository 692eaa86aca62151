// Ordered sum with the squared norm of its result, on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/double_double.h"
#include "reduce/reduce_cpu.h"

namespace shardcore {

// How many partial sums ordered_sum_cuda needs.
int64_t ordered_sum_partials(int64_t numel);

// As ordered_sum_cpu, same bits in out. partial: scratch; sq_norm: where the squared norm goes; device memory. op.numel > 0.
void ordered_sum_cuda(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* sq_norm, cudaStream_t stream);

}  // namespace shardcore
