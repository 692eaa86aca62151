// What one CUDA thread does in the ordered sum's kernel, as a host/device function: tests/cpp runs it on the host. The CPU loop
// does the same steps a tile at a time.
//
// One warp a 256-element block, as the norm; a CUDA block has kNormChunk elements.
#pragma once

#include "norm/norm_cuda_body.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore {

// One lane's elements of the block that begins at element first, numel of them: their sum is stored, squares are of what was.
template <bool kVector>
SHARDCORE_HD void ordered_sum_lane(const OrderedSum& op, int64_t first, int numel, Octet at, double (&squares)[8]) {
  float sums[8]{}, x[8];
  SHARDCORE_NO_UNROLL
  for (int64_t rank = 0; rank < op.world_size; ++rank) {
    const char* const piece = static_cast<const char*>(piece_of(op, rank)) + first * itemsize(op.piece_dtype);
    load_octet<kVector>(piece, op.piece_dtype, at, numel, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) sums[k] = rank == 0 ? x[k] : sums[k] + x[k];  // 0 + x would lose the sign of -0
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) sums[k] = scale_sum(sums[k], op.scale);
  char* const out = static_cast<char*>(op.out) + first * itemsize(op.out_dtype);
  if (op.accumulate) {
    load_octet<kVector>(out, op.out_dtype, at, numel, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) sums[k] = x[k] + sums[k];
  }
  store_octet<kVector>(out, op.out_dtype, at, numel, sums);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const float stored = op.out_dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(sums[k])) : sums[k];
    squares[k] = kVector || octet_element(at, k) < numel ? square_f64(stored) : 0.0;
  }
}

template <bool kVector, typename Warp>
SHARDCORE_HD double ordered_sum_warp(const OrderedSum& op, int64_t first, int numel, int lane, const Warp& warp) {
  const bool f32_only = op.piece_dtype == DType::f32 && op.out_dtype == DType::f32;
  double squares[8];
  ordered_sum_lane<kVector>(op, first, numel, lane_octet(lane, f32_only), squares);
  return sq_norm_warp(squares, f32_only, lane, warp);
}

// Whether every stream starts on 16 bytes, each rank's piece too.
SHARDCORE_HD bool is_aligned16(const OrderedSum& op) {
  const bool rows = op.world_size == 1 || op.numel * itemsize(op.piece_dtype) % 16 == 0;
  return rows && is_aligned16(op.pieces) && is_aligned16(op.own) && is_aligned16(op.out);
}

template <typename Block>
SHARDCORE_HD void ordered_sum_body(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* shared, int64_t block_index,
                                   int thread, const Block& block) {
  const int lane = thread % 32;
  const int64_t begin = block_index * kNormChunk;
  const int numel = static_cast<int>(op.numel - begin < kNormChunk ? op.numel - begin : kNormChunk);
  const int vector_numel = is_aligned16(op) ? numel / kBlockSize * kBlockSize : 0;
  int first = thread / 32 * kBlockSize;
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (; first < vector_numel; first += kNormStride) {
    total = dd_add(total, ordered_sum_warp<true>(op, begin + first, kBlockSize, lane, block));
  }
  SHARDCORE_NO_UNROLL
  for (; first < numel; first += kNormStride) {
    total = dd_add(total, ordered_sum_warp<false>(op, begin + first, numel - first, lane, block));
  }
  total = add_warps(total, shared, thread, block);
  if (thread == 0) partial[block_index] = total;
}

}  // namespace shardcore
