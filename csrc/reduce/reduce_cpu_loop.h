// The CPU loop of the ordered sum, compiled once per instruction set by reduce_cpu_{avx512,avx2,base}.cpp.
#include "norm/norm_block.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

template <typename T, typename ToFloat>
void add_piece(float* SHARDCORE_RESTRICT sum, const T* SHARDCORE_RESTRICT x, int64_t n, const ToFloat& to_float) {
  for (int64_t i = 0; i < n; ++i) sum[i] += to_float(x[i]);
}

void add_tile(float* sum, const void* data, DType dtype, int64_t first, int64_t n) {
  if (dtype == DType::f32) {
    add_piece(sum, static_cast<const float*>(data) + first, n, [](float x) { return x; });
  } else if (dtype == DType::bf16) {
    add_piece(sum, static_cast<const uint16_t*>(data) + first, n, [](uint16_t h) { return bf16_to_f32(h); });
  } else {
    add_piece(sum, static_cast<const uint16_t*>(data) + first, n, [](uint16_t h) { return f16_to_f32(h); });
  }
}

}  // namespace

void ordered_sum_span(const OrderedSum& op, int64_t first_block, int64_t last_block, DoubleDouble& total) {
  alignas(64) float sum[kBlock];
  alignas(64) float old[kBlock];
  DoubleDouble norm = total;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock;
    const int64_t n = op.numel - first < kBlock ? op.numel - first : kBlock;
    load_tile(sum, piece_of(op, 0), op.piece_dtype, first, n);
    for (int64_t rank = 1; rank < op.world_size; ++rank) add_tile(sum, piece_of(op, rank), op.piece_dtype, first, n);
    scale_sums(sum, n, op.scale);
    if (op.accumulate) {
      load_tile(old, op.out, op.out_dtype, first, n);
      for (int64_t i = 0; i < n; ++i) sum[i] = old[i] + sum[i];
    }
    store_tile(op.out, op.out_dtype, first, n, sum);
    if (op.out_dtype != DType::f32) load_tile(sum, op.out, op.out_dtype, first, n);  // the norm of what was stored
    for (int64_t i = n; i < kBlock; ++i) sum[i] = 0.0f;
    norm = dd_add(norm, sq_norm_block(sum));
  }
  total = norm;
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
