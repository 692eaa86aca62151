// The CUDA backend of the cpu tier: exact-size pinned buffers and asynchronous copies on the caller's stream.
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "copy/host_memory.h"
#include "copy/host_tier.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    SHARDCORE_CUDA_CHECK(cudaGetDevice(&saved_));
    SHARDCORE_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceScope() { cudaSetDevice(saved_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int saved_ = 0;
};

class CudaBackend final : public CopyBackend {
 public:
  CudaBackend(int device, bool pinned) : device_(device), pinned_(pinned) {}
  ~CudaBackend() override {
    for (const Copies& copies : copies_) cudaEventDestroy(copies.last);
  }

  void* allocate(int64_t size_bytes) override {
    if (!pinned_) return allocate_pages(size_bytes);
    const DeviceScope scope(device_);
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(size_bytes), cudaHostAllocDefault);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    SHARDCORE_CUDA_CHECK(error);
    std::memset(data, 0, static_cast<size_t>(size_bytes));
    return data;
  }

  void release(void* data, int64_t size_bytes) noexcept override {
    if (pinned_) {
      cudaFreeHost(data);  // waits for copies that use it; at exit CUDA may be gone, and with it the memory
    } else {
      sync_quietly();
      free_pages(data, size_bytes);
    }
  }

  void to_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& /*executor*/) override {
    copy(dst, src, size_bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
  }
  void from_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& /*executor*/) override {
    copy(dst, src, size_bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream));
  }

  void synchronize() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Copies& copies : copies_) SHARDCORE_CUDA_CHECK(cudaEventSynchronize(copies.last));
  }

 private:
  struct Copies {
    cudaStream_t stream;
    cudaEvent_t last;  // after the last copy on stream
  };

  void copy(void* dst, const void* src, int64_t size_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const DeviceScope scope(device_);
    SHARDCORE_CUDA_CHECK(cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes), kind, stream));
    const std::lock_guard<std::mutex> lock(mutex_);
    SHARDCORE_CUDA_CHECK(cudaEventRecord(last_of(stream), stream));
  }

  cudaEvent_t last_of(cudaStream_t stream) {
    for (const Copies& copies : copies_) {
      if (copies.stream == stream) return copies.last;
    }
    Copies copies{stream, nullptr};
    SHARDCORE_CUDA_CHECK(cudaEventCreateWithFlags(&copies.last, cudaEventDisableTiming));
    copies_.push_back(copies);
    return copies.last;
  }

  void sync_quietly() noexcept {
    for (const Copies& copies : copies_) cudaEventSynchronize(copies.last);
  }

  const int device_;
  const bool pinned_;
  std::mutex mutex_;  // guards copies_
  std::vector<Copies> copies_;
};

}  // namespace

std::unique_ptr<CopyBackend> make_cuda_backend(int device_index, bool pinned) {
  return std::make_unique<CudaBackend>(device_index, pinned);
}

}  // namespace shardcore
