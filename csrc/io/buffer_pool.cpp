#include "io/buffer_pool.h"

#include <unistd.h>

#include <algorithm>

#include "copy/host_memory.h"

namespace shardcore {

BufferPool::BufferPool(int64_t keep_bytes) : keep_bytes_(keep_bytes), pid_(getpid()) {}

BufferPool::~BufferPool() {
  for (const Buffer& buffer : free_) free_pages(buffer.data, buffer.size_bytes);
}

BufferPool::Buffer BufferPool::acquire(int64_t size_bytes) {
  if (getpid() == pid_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fits = [&](const Buffer& b) { return b.size_bytes >= size_bytes && b.size_bytes / 2 <= size_bytes; };
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) {
      const Buffer buffer = *found;
      free_.erase(std::next(found).base());
      free_bytes_ -= buffer.size_bytes;
      return buffer;
    }
  }
  const int64_t mapped = mapped_bytes(size_bytes);
  return {static_cast<char*>(allocate_pages(mapped)), mapped};
}

void BufferPool::release(Buffer buffer) noexcept {
  if (getpid() != pid_ || buffer.size_bytes > keep_bytes_) return free_pages(buffer.data, buffer.size_bytes);
  std::vector<Buffer> dropped;  // the oldest, to stay within keep_bytes
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
    free_bytes_ += buffer.size_bytes;
    while (free_bytes_ > keep_bytes_) {
      free_bytes_ -= free_.front().size_bytes;
      dropped.push_back(free_.front());
      free_.erase(free_.begin());
    }
  }
  for (const Buffer& old : dropped) free_pages(old.data, old.size_bytes);
}

}  // namespace shardcore
