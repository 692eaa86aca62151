// Large host buffers on their own pages: zero-filled, exact size rounded up to pages, asking for huge pages when large.
#pragma once

#include <cstdint>

namespace shardcore {

// Throws std::bad_alloc. size_bytes > 0.
void* allocate_pages(int64_t size_bytes);
void free_pages(void* data, int64_t size_bytes) noexcept;
// size_bytes rounded up to whole pages.
int64_t mapped_bytes(int64_t size_bytes);

}  // namespace shardcore
