// What one CUDA thread does in the norm's kernels, as host/device functions: tests/cpp runs them on the host. Also the parts
// that the ordered sum shares: the tree of norm_block.h over a warp, and the sum over a CUDA block.
//
// A warp takes a 256-element block, a lane 8 elements of it in 16-byte accesses. The tree's steps are made where its elements
// are: within a lane, or between two lanes. Addition commutes, so both of them get the same bits.
#pragma once

#include <cstdint>

#include "core/chunks.h"
#include "core/double_double.h"
#include "core/vector_io.h"
#include "norm/norm_block.h"
#include "norm/norm_cpu.h"

namespace shardcore {

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / 32;
constexpr int kBlockSize = static_cast<int>(kBlock);
constexpr int kNormStride = kNormWarps * kBlockSize;  // what a CUDA block does at a time
constexpr int64_t kNormChunk = 64 * kBlock;

// A step of the tree between lanes that differ in the bits of mask. Of a[0:2 * kKept] the lower lane keeps the sums of the
// lower half, the upper lane those of the upper half.
template <int kKept, typename Warp>
SHARDCORE_HD void add_halves(double (&a)[8], int mask, int lane, const Warp& warp) {
  const bool upper = (lane & mask) != 0;
  SHARDCORE_UNROLL
  for (int k = 0; k < kKept; ++k) {
    const double kept = upper ? a[k + kKept] : a[k], given = upper ? a[k] : a[k + kKept];
    a[k] = kept + warp.shfl_xor(given, mask);
  }
}

// The squared norm of a block, in every lane. squares: of the lane's lane_octet, 0 for what is not there.
template <typename Warp>
SHARDCORE_HD double sq_norm_warp(double (&squares)[8], bool f32_only, int lane, const Warp& warp) {
  double(&a)[8] = squares;
  if (f32_only) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) a[k] += a[k + 4];  // step 128
    add_halves<2>(a, 16, lane, warp);              // 64; the upper half of lanes goes on with elements 2 and 3 of its 4
    add_halves<1>(a, 8, lane, warp);               // 32
    SHARDCORE_UNROLL
    for (int mask = 4; mask >= 1; mask /= 2) a[0] += warp.shfl_xor(a[0], mask);  // 16, 8, 4
  } else {
    add_halves<4>(a, 16, lane, warp);  // 128; the upper half of lanes goes on with elements 4 to 7 of its 8
    add_halves<2>(a, 8, lane, warp);   // 64
    add_halves<1>(a, 4, lane, warp);   // 32
    a[0] += warp.shfl_xor(a[0], 2);    // 16
    a[0] += warp.shfl_xor(a[0], 1);    // 8
    a[0] += warp.shfl_xor(a[0], 16);   // 4
  }
  a[0] += warp.shfl_xor(a[0], f32_only ? 16 : 8);       // 2
  return a[0] + warp.shfl_xor(a[0], f32_only ? 8 : 4);  // 1
}

// Adds the totals of all warps in warp order; the result is right in thread 0. shared: kNormWarps sums in shared memory.
template <typename Block>
SHARDCORE_HD DoubleDouble add_warps(DoubleDouble total, DoubleDouble* shared, int thread, const Block& block) {
  if (thread % 32 == 0) shared[thread / 32] = total;
  block.sync();
  if (thread == 0) {
    for (int warp = 1; warp < kNormWarps; ++warp) total = dd_add(total, shared[warp]);
  }
  return total;
}

// data: of the block, numel elements.
template <bool kVector, typename Warp>
SHARDCORE_HD double load_sq_norm(const void* data, DType dtype, int numel, int lane, const Warp& warp) {
  float x[8];
  load_octet<kVector>(data, dtype, lane_octet(lane, dtype == DType::f32), numel, x);
  double squares[8];
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) squares[k] = square_f64(x[k]);
  return sq_norm_warp(squares, dtype == DType::f32, lane, warp);
}

// CUDA block block_index: one chunk of one tensor.
template <typename Block>
SHARDCORE_HD void sq_norm_body(const NormSegment* segments, const Chunk* chunks, DoubleDouble* partial, DoubleDouble* shared,
                               int64_t block_index, int thread, const Block& block) {
  const Chunk chunk = chunks[block_index];
  const NormSegment t = segments[chunk.tensor];
  const int lane = thread % 32;
  const int numel = static_cast<int>(t.numel - chunk.first < kNormChunk ? t.numel - chunk.first : kNormChunk);
  const int vector_numel = is_aligned16(t.data) ? numel / kBlockSize * kBlockSize : 0;
  const int itemsize_bytes = static_cast<int>(itemsize(t.dtype));
  const char* const data = static_cast<const char*>(t.data) + chunk.first * itemsize_bytes;
  SHARDCORE_ASSUME_GLOBAL(data);
  int first = thread / 32 * kBlockSize;
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (; first < vector_numel; first += kNormStride) {
    total = dd_add(total, load_sq_norm<true>(data + first * itemsize_bytes, t.dtype, kBlockSize, lane, block));
  }
  SHARDCORE_NO_UNROLL
  for (; first < numel; first += kNormStride) {
    total = dd_add(total, load_sq_norm<false>(data + first * itemsize_bytes, t.dtype, numel - first, lane, block));
  }
  total = add_warps(total, shared, thread, block);
  if (thread == 0) partial[block_index] = total;
}

// out[0] = the sum of partial[0:count], in an order that count fixes. One CUDA block.
template <typename Block>
SHARDCORE_HD void add_partials_body(const DoubleDouble* partial, int64_t count, DoubleDouble* out, DoubleDouble* shared,
                                    int thread, const Block& block) {
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (int64_t i = thread; i < count; i += kNormThreads) total = dd_add(total, partial[i]);
  SHARDCORE_UNROLL
  for (int mask = 16; mask >= 1; mask /= 2) {
    total = dd_add(total, DoubleDouble{block.shfl_xor(total.high, mask), block.shfl_xor(total.low, mask)});
  }
  total = add_warps(total, shared, thread, block);
  if (thread == 0) *out = total;
}

}  // namespace shardcore
