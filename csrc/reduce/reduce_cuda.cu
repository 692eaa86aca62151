#include "core/cuda_check.h"
#include "norm/norm_cuda.h"
#include "norm/norm_cuda_warp.cuh"
#include "reduce/reduce_cuda.h"
#include "reduce/reduce_math.h"

namespace shardcore {
namespace {

// One warp a 256-element block, as the norm; a CUDA block has kNormChunk elements.
__global__ void __launch_bounds__(kNormThreads) ordered_sum_kernel(const OrderedSum op, DoubleDouble* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t chunk_first = blockIdx.x * kNormChunk;
  const int64_t last = op.numel < chunk_first + kNormChunk ? op.numel : chunk_first + kNormChunk;
  DoubleDouble total{0.0, 0.0};
  for (int64_t first = chunk_first + threadIdx.x / 32 * kBlock; first < last; first += kNormWarps * kBlock) {
    double squares[8];
    ordered_sum_lane(op, first + lane, last, squares);
    total = dd_add(total, sq_norm_warp(sq_norm_lane(squares)));
  }
  total = add_warps(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

}  // namespace

int64_t ordered_sum_partials(int64_t numel) { return (numel + kNormChunk - 1) / kNormChunk; }

void ordered_sum_cuda(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* sq_norm, cudaStream_t stream) {
  const int64_t count = ordered_sum_partials(op.numel);
  ordered_sum_kernel<<<grid_size("ordered_sum", count), kNormThreads, 0, stream>>>(op, partial);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  add_partials_cuda(partial, count, sq_norm, stream);
}

}  // namespace shardcore
