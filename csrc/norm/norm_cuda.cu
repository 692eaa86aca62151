#include "core/cuda_check.h"
#include "core/cuda_warp.h"
#include "norm/norm_counters.h"
#include "norm/norm_cuda.h"

namespace shardcore {
namespace {

constexpr int32_t kCounters = 1 << 14;
__device__ uint32_t counters[kCounters];  // of each device; 0 whenever no norm runs

// kNormResident blocks a multiprocessor: up to 64 registers, 128 KiB of float32 loads or of copies in flight.
__global__ void __launch_bounds__(kNormThreads, kNormResident)
    sq_norm_kernel(const __grid_constant__ NormItems items, int64_t num_chunks, DoubleDouble* partial, DoubleDouble* out,
                   int32_t counter) {
  __shared__ NormShared shared;
  uint32_t* const arrived = counter == NormCounters::kNone ? nullptr : counters + counter;
  sq_norm_body(items, num_chunks, partial, out, arrived, shared, blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x),
               CudaBlock{});
}

__global__ void __launch_bounds__(kNormThreads)
    add_partials_kernel(const DoubleDouble* partial, int64_t count, DoubleDouble* out) {
  __shared__ DoubleDouble shared[kSumWarps];
  add_partials_body(partial, count, out, shared, static_cast<int>(threadIdx.x), CudaBlock{});
}

int multiprocessors() {
  int device = 0, count = 0;
  SHARDCORE_CUDA_CHECK(cudaGetDevice(&device));
  SHARDCORE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace

void sq_norm_cuda(const NormItems& items, int64_t num_chunks, DoubleDouble* partial, DoubleDouble* out, cudaStream_t stream) {
  static auto& book = *new NormCounters(kCounters);
  grid_size("sq_norm", num_chunks);  // raises where NormItem::first_chunk cannot count them
  const int32_t counter = book.acquire(stream, is_capturing(stream));
  const auto grid = static_cast<unsigned>(norm_grid(num_chunks, multiprocessors()));
  sq_norm_kernel<<<grid, kNormThreads, 0, stream>>>(items, num_chunks, partial, out, counter);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  if (counter == NormCounters::kNone) add_partials_cuda(partial, num_chunks, out, stream);
}

void add_partials_cuda(const DoubleDouble* partial, int64_t count, DoubleDouble* out, cudaStream_t stream) {
  add_partials_kernel<<<1, kNormThreads, 0, stream>>>(partial, count, out);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore
