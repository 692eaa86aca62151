// Ordered sum with the squared norm of its result, on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/double_double.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_cuda_body.h"

namespace shardcore {

// As ordered_sum_cpu, same bits in out. partial: scratch for ordered_sum_grid(op.numel) sums; sq_norm: where the squared norm
// goes; device memory. op.numel > 0.
void ordered_sum_cuda(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* sq_norm, cudaStream_t stream);

}  // namespace shardcore
