// The ordered sum as the CUDA kernel does it, shared with the host tests of it; the CPU loop does the same steps a tile at a
// time.
#pragma once

#include "core/convert.h"
#include "core/macros.h"
#include "norm/norm_block.h"
#include "reduce/reduce_cpu.h"

namespace shardcore {

SHARDCORE_HD float scale_sum(float sum, double scale) { return static_cast<float>(static_cast<double>(sum) * scale); }

// What one CUDA lane does of a 256-element block: elements first + 32 * k that are below last. Returns their squares.
SHARDCORE_HD void ordered_sum_lane(const OrderedSum& op, int64_t first, int64_t last, double (&squares)[8]) {
  float sums[8];
  SHARDCORE_NO_UNROLL
  for (int64_t rank = 0; rank < op.world_size; ++rank) {
    const void* const piece = piece_of(op, rank);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      const int64_t i = first + 32 * k;
      const float x = i < last ? load_as_f32(piece, op.piece_dtype, i) : 0.0f;
      sums[k] = rank == 0 ? x : sums[k] + x;
    }
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const int64_t i = first + 32 * k;
    squares[k] = 0.0;
    if (i >= last) continue;
    float result = scale_sum(sums[k], op.scale);
    if (op.accumulate) result = load_as_f32(op.out, op.out_dtype, i) + result;
    store_from_f32(op.out, op.out_dtype, i, result);
    squares[k] = square_f64(op.out_dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(result)) : result);
  }
}

}  // namespace shardcore
