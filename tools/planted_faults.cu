// Three faults, one for each tool of compute-sanitizer: a tool that does not find its own proves nothing about our kernels.
// Built and run by tools/sanitize.py: planted_faults memcheck | racecheck | initcheck.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace {

__global__ void write_behind_the_end(int* data, int count) { data[threadIdx.x + count / 2] = 1; }

__global__ void miss_a_barrier(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = shared[63 - threadIdx.x];  // the other warp may not have written it yet
}

__global__ void read_what_nobody_wrote(const int* data, int* out) { out[threadIdx.x] = data[threadIdx.x] + 1; }

}  // namespace

int main(int argc, char** argv) {
  const char* const tool = argc > 1 ? argv[1] : "";
  int *data = nullptr, *out = nullptr;
  if (cudaMalloc(&data, 64 * sizeof(int)) != cudaSuccess || cudaMalloc(&out, 64 * sizeof(int)) != cudaSuccess) return 1;
  if (std::strcmp(tool, "memcheck") == 0) write_behind_the_end<<<1, 64>>>(data, 64);
  if (std::strcmp(tool, "racecheck") == 0) miss_a_barrier<<<1, 64>>>(out);
  if (std::strcmp(tool, "initcheck") == 0) read_what_nobody_wrote<<<1, 64>>>(data, out);
  std::printf("planted_faults: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
