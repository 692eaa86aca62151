// A direction of the tier: a queue of asynchronous copies, done one after the other. Both backends have the same semantics.
//
// A copy is known by its number in its queue, from 1. Since a queue is done in order, copy n is done when n copies are; so a
// number is all that a user holds, and the events behind it (CUDA's, or a condition variable) have one owner, the queue.
//
// Hand-over: a copy begins after all that was queued on the given compute stream before it. Before its result is used, or
// its source is written again, wait for its number: the host by synchronize(), later work of a compute stream by wait(). On the
// thread backend the host is the compute stream. Memory of a copy must live until it is done; the caller sees to that.
//
// A copy that cannot be queued throws, and its queue is as it was. One that fails on its way is never done: every wait for it
// throws, as do later copies and the waits for them (the error of a CUDA device stays; on host threads none fails).
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace shardcore {

enum class Direction { to_tier = 0, from_tier = 1 };
constexpr Direction kDirections[] = {Direction::to_tier, Direction::from_tier};

inline const char* direction_name(Direction direction) { return direction == Direction::to_tier ? "to_tier" : "from_tier"; }

// What a failed copy, and one that cannot be made or waited for, is reported as.
class CopyError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CopyStream {
 public:
  virtual ~CopyStream() = default;  // carries out what is queued, at once
  CopyStream() = default;
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Queues a copy and returns its number; 0 is done already. stream: a cudaStream_t of the CUDA backend, unused by threads.
  virtual int64_t copy(void* dst, const void* src, int64_t size_bytes, void* stream) = 0;
  // Waits on the host. Throws CopyError.
  virtual void synchronize(int64_t number) = 0;
  // What is queued on `stream` from now on begins after the copy. The thread backend waits on the host. Throws CopyError.
  virtual void wait(int64_t number, void* stream) = 0;
  // Whether the copy is done. Throws CopyError.
  virtual bool query(int64_t number) = 0;
  // The number of the last copy that is known to be over; copies up to it use no memory any more. Never waits.
  virtual int64_t completed() noexcept = 0;
  // The number of the last copy that was queued.
  virtual int64_t queued() const noexcept = 0;
  // Waits until nothing is in flight, whatever became of it.
  virtual void drain() noexcept = 0;
};

// What the machine offers a tier: memory near its device, and page-locking.
class CopyBackend {
 public:
  virtual ~CopyBackend() = default;
  virtual CopyStream& stream(Direction direction) = 0;
  // Is called first by a thread that only works for the tier: a new thread would have CUDA open its first device, too.
  virtual void enter_thread() {}
  // Asks that untouched pages be taken near the device. Advice only.
  virtual void place(void* /*data*/, int64_t /*size_bytes*/) noexcept {}
  // Whether page-locked memory makes a difference here.
  virtual bool can_pin() const noexcept { return false; }
  // Locks whole pages in memory for the device; returns why not, or an empty string.
  virtual std::string pin(void* /*data*/, int64_t /*size_bytes*/) { return ""; }
  virtual void unpin(void* /*data*/) noexcept {}
};

// The host-thread backend, where there is no GPU: one thread per direction, which starts with the first copy. In a child that
// was forked afterwards, where it does not exist, copies are made by the caller, and waiting for one that was in flight in the
// parent is a CopyError.
std::unique_ptr<CopyBackend> make_thread_backend();

// device_index: where the other side of every copy lives.
std::unique_ptr<CopyBackend> make_cuda_backend(int device_index);

}  // namespace shardcore
