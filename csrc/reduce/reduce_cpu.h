// Ordered sum of the pieces that the ranks sent, with the squared norm of the result, on the CPU.
#pragma once

#include <cstdint>

#include "core/double_double.h"
#include "core/dtype.h"
#include "core/macros.h"

namespace shardcore {

class Executor;

struct OrderedSum {
  const void* pieces;  // (world_size, numel), contiguous; row own_rank is not read if own is given
  DType piece_dtype;
  int64_t world_size;
  int64_t numel;
  double scale;
  void* out;  // (numel,), f32 or bf16
  DType out_dtype;
  bool accumulate;
  const void* own;  // (numel,): the piece of own_rank, where it is already (out itself is allowed); or nullptr
  int64_t own_rank;
  const double* scale_at = nullptr;  // CUDA: device memory with what multiplies scale when the sum runs; or nullptr
};

SHARDCORE_HD const void* piece_of(const OrderedSum& op, int64_t rank) {
  if (op.own != nullptr && rank == op.own_rank) return op.own;
  return static_cast<const char*>(op.pieces) + rank * op.numel * itemsize(op.piece_dtype);
}

// out = [out +] float32(scale * (pieces[0] + pieces[1] + ...)): the sum in float32 in rank order, the product in float64,
// rounded once. Returns the squared norm of what out then holds (same blocks and sums as sq_norm_cpu).
DoubleDouble ordered_sum_cpu(const OrderedSum& op, Executor& executor);

// Blocks [first_block, last_block), their norm added to total, per instruction set (reduce_cpu_loop.h).
SHARDCORE_PER_ISA(void ordered_sum_span(const OrderedSum& op, int64_t first_block, int64_t last_block, DoubleDouble& total);)

}  // namespace shardcore
