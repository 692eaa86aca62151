// CRC-32C (Castagnoli, as in iSCSI, RFC 3720; reflected polynomial 0x82f63b78), of memory and of memory that is copied.
//
// crc: the checksum of the bytes before, 0 at the beginning; so a long run of bytes may come in parts. The CPU's instruction
// takes 3 cycles and a new one may begin in each, so three stretches of memory are summed side by side and joined.
// This checksum was chosen because x86-64 and 64-bit ARM have an instruction for it: it runs at the speed of memory.
#pragma once

#include <cstdint>

namespace shardcore {

// Returns the checksum of the bytes before and of these.
uint32_t crc32c(const void* data, int64_t size_bytes, uint32_t crc = 0);
// The same, and copies them to dst, which shares no memory with src, in the same pass.
uint32_t copy_crc32c(void* dst, const void* src, int64_t size_bytes, uint32_t crc = 0);

// The same by tables, for CPUs without the instruction (and where SHARDCORE_CPU_ISA=base asks for no instruction set).
uint32_t crc32c_by_table(const void* data, int64_t size_bytes, uint32_t crc = 0);
uint32_t copy_crc32c_by_table(void* dst, const void* src, int64_t size_bytes, uint32_t crc = 0);

}  // namespace shardcore
