// Pieces of memory that processes of one machine read from each other: no socket, and one copy instead of two.
//
// A process tells another where a piece lies (send); the other reads it from there (receive, process_vm_readv) and says so.
// What belongs together has the same tag; of several with the same, the first goes to the first. Tickets say when the memory of
// either side is free again. One thread a process does all this in the background, in whatever order pieces come.
//
// Processes find each other's boards through /proc, and may read each other's memory if they may trace each other
// (ptrace(2)): same user, and not forbidden by the kernel's settings or a container's. Where they may not, connect() says so.
//
// A process that ends, or lets go of its end, fails the tickets that wait for it, within a fraction of a second.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "copy/copy_stream.h"

namespace shardcore {

// Where others find this process's end.
struct NeighbourAddress {
  int64_t pid = 0;
  int64_t file = 0;                  // descriptor of the board
  int64_t board = 0;                 // where it lies
  std::array<int64_t, 2> mark = {};  // what stands there, and nowhere else
};

class Ticket {
 public:
  virtual ~Ticket() = default;
  // Waits until the piece was read. Throws CopyError: the other process is gone, or took longer than the timeout.
  virtual void wait() = 0;
  // Lets go of the owners of all pieces that are done by now, as the next send() and receive() do: never the thread, since
  // memory may belong to Python.
  virtual void let_go() = 0;
};

class NeighbourReads {
 public:
  // This process is number `own` of `count`. timeout_ns: what a wait may take. Nothing that nobody waits for is given up.
  // Throws std::runtime_error where the system has no memory or descriptor for the board.
  NeighbourReads(int count, int own, int64_t timeout_ns);
  // Pieces that are not there by then never are. In a forked child, nothing happens.
  ~NeighbourReads();
  NeighbourReads(const NeighbourReads&) = delete;
  NeighbourReads& operator=(const NeighbourReads&) = delete;

  NeighbourAddress address() const;
  // Finds process `number` by its address. Returns why it cannot be read, or an empty string.
  std::string connect(int number, const NeighbourAddress& address);

  // `owner` keeps the memory until the piece was read, or the ticket failed. The other process must be connected.
  std::shared_ptr<Ticket> send(int to, int64_t tag, const void* data, int64_t size_bytes, std::shared_ptr<void> owner);
  std::shared_ptr<Ticket> receive(int from, int64_t tag, void* data, int64_t size_bytes, std::shared_ptr<void> owner);

  struct State;

 private:
  std::shared_ptr<Ticket> start(bool sends, int other, int64_t tag, void* data, int64_t size_bytes,
                                std::shared_ptr<void> owner);

  std::shared_ptr<State> state_;
};

}  // namespace shardcore
