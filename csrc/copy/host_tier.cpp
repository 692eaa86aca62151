#include "copy/host_tier.h"

#include <algorithm>
#include <cstring>

#include "copy/host_memory.h"
#include "core/executor.h"

namespace shardcore {
namespace {

class ThreadBackend final : public CopyBackend {
 public:
  void* allocate(int64_t size_bytes) override { return allocate_pages(size_bytes); }
  void release(void* data, int64_t size_bytes) noexcept override { free_pages(data, size_bytes); }
  void to_tier(void* dst, const void* src, int64_t size_bytes, void* /*stream*/, Executor& executor) override {
    copy_parallel(dst, src, size_bytes, executor);
  }
  void from_tier(void* dst, const void* src, int64_t size_bytes, void* /*stream*/, Executor& executor) override {
    copy_parallel(dst, src, size_bytes, executor);
  }
  void synchronize() override {}
};

}  // namespace

std::unique_ptr<CopyBackend> make_thread_backend() { return std::make_unique<ThreadBackend>(); }

void copy_parallel(void* dst, const void* src, int64_t size_bytes, Executor& executor) {
  constexpr int64_t kPieceBytes = 64 << 10;
  executor.parallel_for(0, (size_bytes + kPieceBytes - 1) / kPieceBytes, 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPieceBytes;
    const int64_t last = std::min(size_bytes, end * kPieceBytes);
    std::memcpy(static_cast<char*>(dst) + first, static_cast<const char*>(src) + first, static_cast<size_t>(last - first));
  });
}

void* HostTier::allocate(int64_t size_bytes) {
  void* const data = backend_->allocate(size_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_[reinterpret_cast<uintptr_t>(data)] = size_bytes;
  bytes_allocated_ += size_bytes;
  return data;
}

void HostTier::release(void* data) noexcept {
  int64_t size_bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(reinterpret_cast<uintptr_t>(data));
    size_bytes = found->second;
    buffers_.erase(found);
  }
  bytes_allocated_ -= size_bytes;
  backend_->release(data, size_bytes);
}

bool HostTier::owns(const void* data, int64_t size_bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto after = buffers_.upper_bound(begin);
  if (after == buffers_.begin()) return false;
  --after;
  return begin + static_cast<uintptr_t>(size_bytes) <= after->first + static_cast<uintptr_t>(after->second);
}

void HostTier::to_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor) {
  backend_->to_tier(dst, src, size_bytes, stream, executor);
  bytes_to_tier_ += size_bytes;
}

void HostTier::from_tier(void* dst, const void* src, int64_t size_bytes, void* stream, Executor& executor) {
  backend_->from_tier(dst, src, size_bytes, stream, executor);
  bytes_from_tier_ += size_bytes;
}

}  // namespace shardcore
