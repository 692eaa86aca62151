#include "copy/host_tier.h"

#include <iterator>
#include <system_error>

#include "copy/host_memory.h"

namespace shardcore {

void* HostTier::allocate(int64_t size_bytes, bool pinned, const std::vector<int>& nodes) {
  const int64_t mapped = mapped_bytes(size_bytes);
  void* const data = allocate_pages(size_bytes);
  int refused = 0;
  if (nodes.empty()) {
    backend_->place(data, mapped);
  } else {
    refused = place_on_nodes(data, mapped, nodes);
  }
  Allocation made{size_bytes, false, false};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (refused != 0 && node_refusal_.empty()) node_refusal_ = "mbind: " + std::generic_category().message(refused);
  if (pinned && pin_) {
    const std::string refusal = try_pin(data, mapped);
    made.pinned = refusal.empty();
    made.refused = !made.pinned;
    (made.pinned ? bytes_pinned_ : bytes_refused_) += mapped;
    if (made.refused && pin_refusal_.empty()) pin_refusal_ = refusal;
  }
  buffers_[reinterpret_cast<uintptr_t>(data)] = made;
  bytes_allocated_ += size_bytes;
  return data;
}

std::string HostTier::try_pin(void* data, int64_t mapped) {
  if (pin_limit_bytes_ >= 0 && mapped > pin_limit_bytes_ - bytes_pinned_) {
    return "pin_memory_limit is " + std::to_string(pin_limit_bytes_) + " bytes, of which " + std::to_string(bytes_pinned_) +
           " are pinned";
  }
  return backend_->pin(data, mapped);
}

void HostTier::release(void* data) noexcept {
  if (pin_ && getpid() != pid_) return;  // a forked child: pinned pages are not there, and a thread may have held the mutex
  Allocation made{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(reinterpret_cast<uintptr_t>(data));
    made = found->second;
    buffers_.erase(found);
    // Unpinned before it stops counting, so that the limit holds at every time.
    if (made.pinned) backend_->unpin(data);
    if (made.pinned) bytes_pinned_ -= mapped_bytes(made.size_bytes);
    if (made.refused) bytes_refused_ -= mapped_bytes(made.size_bytes);
  }
  bytes_allocated_ -= made.size_bytes;
  free_pages(data, made.size_bytes);
}

const HostTier::Buffers::value_type* HostTier::buffer_before(const void* data) const {
  const auto after = buffers_.upper_bound(reinterpret_cast<uintptr_t>(data));
  return after == buffers_.begin() ? nullptr : &*std::prev(after);
}

bool HostTier::owns(const void* data, int64_t size_bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* const buffer = buffer_before(data);
  if (buffer == nullptr) return false;
  const auto end = buffer->first + static_cast<uintptr_t>(buffer->second.size_bytes);
  return reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(size_bytes) <= end;
}

bool HostTier::queues(const void* data) const {
  if (!backend_->can_pin()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* const buffer = buffer_before(data);
  return buffer != nullptr && buffer->second.pinned;
}

int64_t HostTier::copy(Direction direction, void* dst, const void* src, int64_t size_bytes, void* stream) {
  const int64_t number = backend_->stream(direction).copy(dst, src, size_bytes, stream);
  bytes_copied_[static_cast<int>(direction)] += size_bytes;
  return number;
}

void HostTier::synchronize() {
  for (const Direction direction : kDirections) stream(direction).synchronize(stream(direction).queued());
}

void HostTier::drain() noexcept {
  for (const Direction direction : kDirections) stream(direction).drain();
}

std::string HostTier::pin_refusal() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pin_refusal_;
}

std::string HostTier::node_refusal() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return node_refusal_;
}

}  // namespace shardcore
