#include "copy/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>

namespace shardcore {
namespace {

constexpr int kMaxNodes = 1024;  // the kernel's own bound
constexpr int kPreferred = 1;    // MPOL_PREFERRED of linux/mempolicy.h

}  // namespace

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

bool prefer_node(void* data, int64_t size_bytes, int node) noexcept {
#ifdef SYS_mbind
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kMaxNodes / kBits] = {};
  nodes[node / kBits] = 1UL << (node % kBits);
  // The kernel reads one bit less than it is told.
  return syscall(SYS_mbind, data, static_cast<unsigned long>(size_bytes), kPreferred, nodes, kMaxNodes + 1UL, 0U) == 0;
#else
  static_cast<void>(data), static_cast<void>(size_bytes), static_cast<void>(node);
  return false;
#endif
}

}  // namespace shardcore
