// The CPU loop of the squared norm, compiled once per instruction set by csrc/isa.
#include "norm/norm_block.h"
#include "norm/norm_cpu.h"

namespace shardcore {
namespace SHARDCORE_ISA {

void sq_norm_span(const NormSegment& t, int64_t first_block, int64_t last_block, DoubleDouble& total) {
  alignas(64) float tile[kBlock];
  DoubleDouble sum = total;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock;
    const int64_t n = t.numel - first < kBlock ? t.numel - first : kBlock;
    const float* x = tile;
    if (n == kBlock && t.dtype == DType::f32) {
      x = static_cast<const float*>(t.data) + first;
    } else {
      load_tile(tile, t.data, t.dtype, first, n);
      for (int64_t i = n; i < kBlock; ++i) tile[i] = 0.0f;
    }
    sum = dd_add(sum, sq_norm_block(x));
  }
  total = sum;
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
