#include "copy/host_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <new>

#include "core/round_up.h"

namespace shardcore {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int kMaxNodes = 1024;  // the kernel's own bound
// Of linux/mempolicy.h: MPOL_DEFAULT, MPOL_PREFERRED, MPOL_INTERLEAVE.
constexpr int kDefault = 0, kPreferred = 1, kInterleave = 3;

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

int numa_node_of(std::string pci_address, const std::string& sys) {
  std::string online;  // "0", or "0-1" and the like
  if (!(std::ifstream(sys + "/devices/system/node/online") >> online)) return -1;
  if (std::all_of(online.begin(), online.end(), [](unsigned char c) { return std::isdigit(c) != 0; })) return -1;
  std::transform(pci_address.begin(), pci_address.end(), pci_address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  int node = -1;
  if (!(std::ifstream(sys + "/bus/pci/devices/" + pci_address + "/numa_node") >> node)) return -1;
  return node >= 0 && node < kMaxNodes ? node : -1;
}

int place_on_nodes(void* data, int64_t size_bytes, const std::vector<int>& nodes) noexcept {
#ifdef SYS_mbind
  int given = kDefault;
  if (syscall(SYS_get_mempolicy, &given, nullptr, 0UL, nullptr, 0UL) == 0 && given != kDefault) return 0;
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMaxNodes / kBits] = {};
  for (const int node : nodes) {
    if (node < 0 || node >= kMaxNodes) return EINVAL;
    mask[node / kBits] |= 1UL << (node % kBits);
  }
  const int policy = nodes.size() > 1 ? kInterleave : kPreferred;
  // The kernel reads one bit less than the number passed.
  return syscall(SYS_mbind, data, static_cast<unsigned long>(size_bytes), policy, mask, kMaxNodes + 1UL, 0U) == 0 ? 0 : errno;
#else
  static_cast<void>(data), static_cast<void>(size_bytes), static_cast<void>(nodes);
  return ENOSYS;
#endif
}

}  // namespace shardcore
