// Memory near a device: which NUMA node a PCI device hangs on, and pages that are taken there.
#pragma once

#include <cstdint>
#include <string>

namespace shardcore {

// The node of the device with this PCI address ("0000:65:00.0"), or -1 where the machine has one node or does not say.
int numa_node_of(std::string pci_address, const std::string& sys = "/sys");

// Asks that the untouched pages of [data, data + size_bytes), which starts on a page, be taken on this node, and elsewhere
// when it is full. Returns whether the kernel accepts that (containers may forbid it).
bool prefer_node(void* data, int64_t size_bytes, int node) noexcept;

}  // namespace shardcore
