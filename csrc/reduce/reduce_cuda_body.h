// What one CUDA thread does in the ordered sum's kernel, as a host/device function: tests/cpp runs it on the host. The CPU loop
// does the same steps a tile at a time.
//
// A warp takes several 256-element blocks at once, as in the norm; a CUDA block has kNormChunk elements.
#pragma once

#include <type_traits>

#include "norm/norm_cuda_body.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore {

// A lane's elements of a rank's piece, in the block that begins at element first and has numel. One branch for all of them, so
// that no load waits for another.
template <bool kVector, typename L>
SHARDCORE_HD void load_piece(const OrderedSum& op, int64_t rank, int64_t first, int numel, int lane, float (&x)[L::kNumel]) {
  const char* const piece = static_cast<const char*>(piece_of(op, rank)) + first * itemsize(op.piece_dtype);
  if (std::is_same_v<L, LanesF32> || op.piece_dtype == DType::f32) {
    load_lane<kVector, L>(piece, DType::f32, numel, lane, x);
  } else if (op.piece_dtype == DType::bf16) {
    load_lane<kVector, L>(piece, DType::bf16, numel, lane, x);
  } else {
    load_lane<kVector, L>(piece, DType::f16, numel, lane, x);
  }
}

// The same of a block's sum: what is added to it, and where it is stored. sums: after it, what was stored (0 past the end).
template <bool kVector, typename L, DType kDType>
SHARDCORE_HD void store_sums(const OrderedSum& op, int64_t first, int numel, int lane, float (&sums)[L::kNumel]) {
  char* const out = static_cast<char*>(op.out) + first * itemsize(kDType);
  if (op.accumulate) {
    float x[L::kNumel];
    load_lane<kVector, L>(out, kDType, numel, lane, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < L::kNumel; ++k) sums[k] = x[k] + sums[k];
  }
  SHARDCORE_UNROLL
  for (int i = 0; i < L::kNumel / 8; ++i) {
    const Octet at = L::octet(lane, i);
    float octet[8];
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) octet[k] = sums[8 * i + k];
    store_octet<kVector>(out, kDType, at, numel, octet);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      const float stored = kDType == DType::bf16 ? bf16_to_f32(f32_to_bf16(octet[k])) : octet[k];
      sums[8 * i + k] = kVector || octet_element(at, k) < numel ? stored : 0.0f;
    }
  }
}

template <bool kVector, typename L>
SHARDCORE_HD void ordered_sum_lane(const OrderedSum& op, double scale, int64_t first, int numel, int lane,
                                   float (&sums)[L::kNumel]) {
  load_piece<kVector, L>(op, 0, first, numel, lane, sums);  // not added to 0, which would lose the sign of -0
  SHARDCORE_NO_UNROLL
  for (int64_t rank = 1; rank < op.world_size; ++rank) {
    float x[L::kNumel];
    load_piece<kVector, L>(op, rank, first, numel, lane, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < L::kNumel; ++k) sums[k] += x[k];
  }
  scale_sums(sums, L::kNumel, scale);
  if (std::is_same_v<L, LanesF32> || op.out_dtype == DType::f32) {
    store_sums<kVector, L, DType::f32>(op, first, numel, lane, sums);
  } else {
    store_sums<kVector, L, DType::bf16>(op, first, numel, lane, sums);
  }
}

// Whether every stream starts on 16 bytes, each rank's piece too.
SHARDCORE_HD bool is_aligned16(const OrderedSum& op) {
  const bool rows = op.world_size == 1 || op.numel * itemsize(op.piece_dtype) % 16 == 0;
  return rows && is_aligned16(op.pieces) && is_aligned16(op.own) && is_aligned16(op.out);
}

// What a warp does of the chunk of numel elements that begins at element begin.
template <typename L, typename Block>
SHARDCORE_HD DoubleDouble ordered_sum_chunk(const OrderedSum& op, int64_t begin, int numel, int thread, const Block& block) {
  const int lane = thread % 32, warp = thread / 32;
  const int whole = is_aligned16(op) ? numel / kBlockSize : 0;
  const double scale = op.scale_at == nullptr ? op.scale : op.scale * *op.scale_at;
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (int first = warp * L::kBlocks; first < whole; first += L::kStride) {
    const int own = first + lane / L::kLanes;
    float stored[L::kNumel]{};
    if (own < whole) ordered_sum_lane<true, L>(op, scale, begin + own * kBlockSize, kBlockSize, lane, stored);
    total = dd_add(total, sq_norm_lanes<L>(stored, lane, block));
  }
  total = add_lanes(total, L::kLanes, 32, block);
  SHARDCORE_NO_UNROLL
  for (int at = whole + warp; at * kBlockSize < numel; at += kNormWarps) {
    float stored[LanesUnaligned::kNumel];
    const int first = at * kBlockSize;
    ordered_sum_lane<false, LanesUnaligned>(op, scale, begin + first, numel - first, lane, stored);
    total = dd_add(total, sq_norm_lanes<LanesUnaligned>(stored, lane, block));
  }
  return total;
}

template <typename Block>
SHARDCORE_HD void ordered_sum_body(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* shared, int64_t block_index,
                                   int thread, const Block& block) {
  const int64_t begin = block_index * kNormChunk;
  const int numel = static_cast<int>(op.numel - begin < kNormChunk ? op.numel - begin : kNormChunk);
  const bool f32_only = op.piece_dtype == DType::f32 && op.out_dtype == DType::f32;
  DoubleDouble total = f32_only ? ordered_sum_chunk<LanesF32>(op, begin, numel, thread, block)
                                : ordered_sum_chunk<LanesMixed>(op, begin, numel, thread, block);
  total = add_warps<kNormWarps>(total, shared, thread, block);
  if (thread == 0) partial[block_index] = total;
}

}  // namespace shardcore
