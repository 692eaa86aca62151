// What processes that read each other's memory share: boards in memory that each maps, with bells to wait at.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include "copy/neighbour_reads.h"

namespace shardcore {

constexpr uint32_t kSlots = 1024;                  // pieces on offer to one process at a time; more wait for their turn
constexpr int64_t kReadAtMost = int64_t{1} << 30;  // the kernel reads less than 2 GiB at a time

// A piece on offer. The sender fills free slots; the receiver frees them, or the sender, if it gives the piece up: what was
// read of a slot, or from there, holds if the slot has the same number after that.
struct Slot {
  std::atomic<uint64_t> number;  // of the offer, from 1 in the sender's order; 0: free. Says that the rest is valid
  std::atomic<int64_t> tag, address, size_bytes;
};

// What a process offers to one other. What nobody takes, after errors, stays: there is room for more than is on its way at
// once.
struct Row {
  std::atomic<uint32_t> used;  // slots from here on never were: nobody needs to look at them
  alignas(64) Slot slots[kSlots];
};

// What a process shows the others: memory that they map. Then a row for each of them.
struct Board {
  std::array<int64_t, 2> mark;
  std::atomic<uint32_t> bell;  // rung (futex) at what concerns its owner
  alignas(64) Row rows[];

  static size_t size_bytes(int count) { return sizeof(Board) + sizeof(Row) * static_cast<size_t>(count); }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "processes share these");

inline void ring(Board* board) {
  board->bell.fetch_add(1);
  syscall(SYS_futex, &board->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void await_bell(Board* board, uint32_t seen, int64_t at_most_ns) {
  const timespec time{at_most_ns / 1'000'000'000, at_most_ns % 1'000'000'000};
  syscall(SYS_futex, &board->bell, FUTEX_WAIT, seen, &time, nullptr, 0);
}

// Returns 0 or the error. Of memory that is not all there, an unknown part is read.
inline int read_memory(int64_t pid, int64_t address, void* data, int64_t size_bytes) {
  auto* to = static_cast<char*>(data);
  while (size_bytes > 0) {
    iovec here{to, static_cast<size_t>(std::min(size_bytes, kReadAtMost))};
    iovec there{reinterpret_cast<void*>(address), here.iov_len};
    const ssize_t got = process_vm_readv(static_cast<pid_t>(pid), &here, 1, &there, 1, 0);
    if (got <= 0) return got < 0 ? errno : EFAULT;
    to += got, address += got, size_bytes -= got;
  }
  return 0;
}

inline Board* map_board(int file, int count) {
  void* const memory = mmap(nullptr, Board::size_bytes(count), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
}

}  // namespace shardcore
