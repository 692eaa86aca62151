// Memory for transfers: whole pages, kept for the next transfers.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace shardcore {

// Buffers of any size. A buffer that comes back is kept for the next that is at least half as large, up to keep_bytes.
// In a child that was forked, where the mutex may be held, nothing is kept.
class BufferPool {
 public:
  explicit BufferPool(int64_t keep_bytes);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  struct Buffer {
    char* data = nullptr;
    int64_t size_bytes = 0;  // as it was made
  };
  // At least size_bytes (> 0). Throws std::bad_alloc.
  Buffer acquire(int64_t size_bytes);
  void release(Buffer buffer) noexcept;

 private:
  const int64_t keep_bytes_;
  const pid_t pid_;
  std::mutex mutex_;
  std::vector<Buffer> free_;  // the one given last is at the end
  int64_t free_bytes_ = 0;
};

}  // namespace shardcore
