// The cpu tier: exact-size host buffers that are reached only through counted copies.
//
// A backend allocates and moves bytes; HostTier knows which buffers exist and counts. Both backends have one meaning: the
// thread backend's copies are complete on return, the CUDA backend's are queued on a stream and synchronize() waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace shardcore {

class Executor;

class CopyBackend {
 public:
  virtual ~CopyBackend() = default;
  virtual void* allocate(int64_t size_bytes) = 0;  // zero-filled
  virtual void release(void* data, int64_t size_bytes) noexcept = 0;
  // stream: a cudaStream_t of the CUDA backend, unused by threads.
  virtual void to_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor) = 0;
  virtual void from_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor) = 0;
  virtual void synchronize() = 0;
};

std::unique_ptr<CopyBackend> make_thread_backend();
// device_index: where the other side of every copy lives. pinned: page-locked buffers, needed for copies that overlap compute.
std::unique_ptr<CopyBackend> make_cuda_backend(int device_index, bool pinned);

// Held by shared_ptr: buffers keep it alive, so they may outlive whoever asked for them.
class HostTier {
 public:
  explicit HostTier(std::unique_ptr<CopyBackend> backend) : backend_(std::move(backend)) {}
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  void* allocate(int64_t size_bytes);
  void release(void* data) noexcept;
  // Whether [data, data + size_bytes) lies in one live buffer of this tier.
  bool owns(const void* data, int64_t size_bytes) const;

  // dst (to_tier) or src (from_tier) must be owned; the caller has checked.
  void to_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor);
  void from_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor);
  void synchronize() { backend_->synchronize(); }

  int64_t bytes_to_tier() const { return bytes_to_tier_; }
  int64_t bytes_from_tier() const { return bytes_from_tier_; }
  int64_t bytes_allocated() const { return bytes_allocated_; }  // asked for and not yet released

 private:
  const std::unique_ptr<CopyBackend> backend_;
  mutable std::mutex mutex_;              // guards buffers_
  std::map<uintptr_t, int64_t> buffers_;  // start -> size_bytes
  std::atomic<int64_t> bytes_to_tier_{0};
  std::atomic<int64_t> bytes_from_tier_{0};
  std::atomic<int64_t> bytes_allocated_{0};
};

// memcpy split over threads.
void copy_parallel(void* dst, const void* src, int64_t size_bytes, Executor& executor);

}  // namespace shardcore
