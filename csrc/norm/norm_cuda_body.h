// The CUDA mapping of norm_block.h: one warp a 256-element block, lane l holds elements l, l + 32, ..., l + 224.
//
// The steps 128, 64, 32 of the tree are within a lane; 16 to 1 are warp shuffles. Host/device, so that tests/cpp can run it.
#pragma once

#include <cstdint>

#include "core/double_double.h"
#include "norm/norm_block.h"

namespace shardcore {

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / 32;
constexpr int64_t kNormChunk = 64 * kBlock;

// squares: of elements lane + 32 * k.
SHARDCORE_HD double sq_norm_lane(const double (&squares)[8]) {
  return ((squares[0] + squares[4]) + (squares[2] + squares[6])) + ((squares[1] + squares[5]) + (squares[3] + squares[7]));
}

// n: elements of the block, counted from data[first].
SHARDCORE_HD double load_sq_norm_lane(const void* data, DType dtype, int64_t first, int n, int lane) {
  double squares[8];
  for (int k = 0; k < 8; ++k) {
    const int i = lane + 32 * k;
    squares[k] = i < n ? square_f64(load_as_f32(data, dtype, first + i)) : 0.0;
  }
  return sq_norm_lane(squares);
}

}  // namespace shardcore
