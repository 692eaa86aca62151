// The cpu tier: exact-size host buffers that are reached only through counted copies.
//
// HostTier keeps the list of buffers, counts, and decides what is pinned; a backend (copy_stream.h) moves bytes.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy/copy_stream.h"

namespace shardcore {

// Held by shared_ptr: buffers keep it alive, so they may outlive the object that allocated them.
class HostTier {
 public:
  // pin: whether buffers that ask for it are page-locked, which lets their copies overlap other work; at most
  // pin_limit_bytes of them, whole pages counted (-1: as many as the system allows).
  HostTier(std::unique_ptr<CopyBackend> backend, bool pin, int64_t pin_limit_bytes)
      : backend_(std::move(backend)), pin_(pin && backend_->can_pin()), pin_limit_bytes_(pin_limit_bytes) {}
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // Zero-filled whole pages. A buffer that may not be pinned, or that the system refuses to pin, is pageable. nodes: the NUMA
  // nodes that its pages are taken on by turns, if the system allows that; none: near the device.
  void* allocate(int64_t size_bytes, bool pinned, const std::vector<int>& nodes = {});
  // No copy of this buffer is in flight.
  void release(void* data) noexcept;
  // Whether [data, data + size_bytes) lies in one live buffer of this tier.
  bool owns(const void* data, int64_t size_bytes) const;
  // Whether copies of this owned memory are queued at once: CUDA may make those of pageable memory before it returns.
  bool queues(const void* data) const;

  // Queues a counted copy and returns its number in that direction's queue. dst (to_tier) or src (from_tier) must be owned;
  // the caller has checked. Both stay alive until the copy is done. stream: see CopyStream.
  int64_t copy(Direction direction, void* dst, const void* src, int64_t size_bytes, void* stream);
  CopyStream& stream(Direction direction) { return backend_->stream(direction); }
  void enter_thread() { backend_->enter_thread(); }
  // Waits on the host for all copies. Throws CopyError.
  void synchronize();
  void drain() noexcept;

  int64_t bytes_to_tier() const { return bytes_copied_[0]; }
  int64_t bytes_from_tier() const { return bytes_copied_[1]; }
  int64_t bytes_allocated() const { return bytes_allocated_; }  // asked for and not yet released
  int64_t bytes_pinned() const { return bytes_pinned_; }        // of those, in whole pages
  int64_t bytes_refused() const { return bytes_refused_; }      // that were to be pinned and are not, in whole pages
  std::string pin_refusal() const;                              // why: of the first buffer refused; empty if there is none
  std::string node_refusal() const;                             // why `nodes` was not heeded, likewise

 private:
  struct Allocation {
    int64_t size_bytes;
    bool pinned, refused;
  };

  using Buffers = std::map<uintptr_t, Allocation>;  // by start

  std::string try_pin(void* data, int64_t mapped);                   // why not, or an empty string
  const Buffers::value_type* buffer_before(const void* data) const;  // or at it; none: null. With the mutex held

  const std::unique_ptr<CopyBackend> backend_;
  const bool pin_;
  const pid_t pid_ = getpid();
  const int64_t pin_limit_bytes_;
  mutable std::mutex mutex_;  // guards the next three
  Buffers buffers_;
  std::string pin_refusal_, node_refusal_;
  std::atomic<int64_t> bytes_copied_[2] = {0, 0};  // by Direction
  std::atomic<int64_t> bytes_allocated_{0};
  std::atomic<int64_t> bytes_pinned_{0};
  std::atomic<int64_t> bytes_refused_{0};
};

}  // namespace shardcore
