// Large host buffers on their own pages: zero-filled, exact size rounded up to pages, asking for huge pages when large; and
// which NUMA node pages are taken on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardcore {

// Throws std::bad_alloc. size_bytes > 0.
void* allocate_pages(int64_t size_bytes);
void free_pages(void* data, int64_t size_bytes) noexcept;
// size_bytes rounded up to whole pages.
int64_t mapped_bytes(int64_t size_bytes);

// The node of the device with this PCI address ("0000:65:00.0"), or -1 where the machine has one node or does not say.
int numa_node_of(std::string pci_address, const std::string& sys = "/sys");

// Asks that the untouched pages of [data, data + size_bytes), which starts on a page, be taken on these nodes by turns, and
// elsewhere where they are full. Does nothing where the calling thread has a policy of its own (numactl). Returns 0, or the
// errno with which the system refuses (containers may forbid it).
int place_on_nodes(void* data, int64_t size_bytes, const std::vector<int>& nodes) noexcept;

}  // namespace shardcore
