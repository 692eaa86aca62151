#include "core/cuda_check.h"
#include "core/cuda_warp.h"
#include "digest/digest_cuda.h"

namespace shardcore {
namespace {

__global__ void __launch_bounds__(kDigestThreads) digest_kernel(ChunkTable<DigestSegment> table, uint64_t* out) {
  digest_body(table, out, blockIdx.x, static_cast<int>(threadIdx.x), CudaBlock());
}

}  // namespace

void digest_cuda(const ChunkTable<DigestSegment>& table, int64_t num_chunks, uint64_t* out, cudaStream_t stream) {
  digest_kernel<<<grid_size("digest", num_chunks), kDigestThreads, 0, stream>>>(table, out);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore
