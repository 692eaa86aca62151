// The ordered sum of one element, shared by the CUDA kernel and the host tests of it; the CPU loop does the same steps a tile
// at a time.
#pragma once

#include "core/convert.h"
#include "core/macros.h"
#include "reduce/reduce_cpu.h"

namespace shardcore {

SHARDCORE_HD float scale_sum(float sum, double scale) { return static_cast<float>(static_cast<double>(sum) * scale); }

// Stores element i of out; returns what was stored.
SHARDCORE_HD float ordered_sum_element(const OrderedSum& op, int64_t i) {
  float sum = load_as_f32(piece_of(op, 0), op.piece_dtype, i);
  for (int64_t rank = 1; rank < op.world_size; ++rank) sum += load_as_f32(piece_of(op, rank), op.piece_dtype, i);
  float result = scale_sum(sum, op.scale);
  if (op.accumulate) result = load_as_f32(op.out, op.out_dtype, i) + result;
  store_from_f32(op.out, op.out_dtype, i, result);
  return op.out_dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(result)) : result;
}

}  // namespace shardcore
