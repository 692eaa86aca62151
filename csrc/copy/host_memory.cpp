#include "copy/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace shardcore {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

int64_t mapped_bytes(int64_t size_bytes) { return round_up(size_bytes, sysconf(_SC_PAGESIZE)); }

void* allocate_pages(int64_t size_bytes) {
  const int64_t mapped = mapped_bytes(size_bytes);
  const bool large = mapped >= kHugePageBytes;
  // The kernel gives a huge page only where one fits whole: map more, then return what lies outside an aligned start.
  const int64_t reserved = large ? mapped + kHugePageBytes : mapped;
  void* const raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  if (!large) return raw;
  char* const begin = static_cast<char*>(raw);
  char* const data = begin + (round_up(reinterpret_cast<intptr_t>(raw), kHugePageBytes) - reinterpret_cast<intptr_t>(raw));
  if (data > begin) munmap(begin, data - begin);
  char* const end = begin + reserved;
  if (end > data + mapped) munmap(data + mapped, end - (data + mapped));
  madvise(data, mapped, MADV_HUGEPAGE);  // advice: a kernel without huge pages may refuse it
  return data;
}

void free_pages(void* data, int64_t size_bytes) noexcept { munmap(data, mapped_bytes(size_bytes)); }

}  // namespace shardcore
