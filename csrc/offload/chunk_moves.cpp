#include "offload/chunk_moves.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace shardcore {
namespace {

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

}  // namespace

ChunkMoves::ChunkMoves(std::shared_ptr<HostTier> tier, int places, bool passes, double adam_per_second)
    : tier_(std::move(tier)),
      passes_(passes),
      adam_per_second_(adam_per_second),
      passing_copies_{copy_now(Direction::to_tier), copy_now(Direction::from_tier)},
      place_left_(static_cast<size_t>(places), 0) {}

ChunkMoves::ChunkMoves(const ChunkMoves& parent) : ChunkMoves(parent.tier_, 0, parent.passes_, parent.adam_per_second_) {
  place_left_ = parent.place_left_;
}

void ChunkMoves::begin(TierSteps::Step next) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = std::move(next);
  arrived_.assign(step_.chunks.size(), 0);
  left_.assign(step_.chunks.size(), 0);
  events_.clear();
  size_t most = 0;  // three copies of each span, two waits and Adam of each chunk: with room for all, to note one cannot fail
  for (const TierChunk& chunk : step_.chunks) most += 3 + 3 * chunk.spans.size();
  events_.reserve(most);
}

void ChunkMoves::fetch(int64_t number) {
  if (number == 0 && step_.weights_leave) tier_->synchronize();
  if (passes_) return;
  const TierChunk& chunk = step_.chunks[static_cast<size_t>(number)];
  bool place_is_free = false;
  for (const TierSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    int64_t& last = arrived_[static_cast<size_t>(number)];
    if (span.weight != nullptr && !std::exchange(place_is_free, true)) {
      wait_for(Direction::from_tier, place_left_[static_cast<size_t>(chunk.place)]);
    }
    if (span.grad_comes) {
      last = copy(Direction::to_tier, const_cast<void*>(t.grad), span.grad, t.numel * itemsize(t.grad_dtype));
    }
    if (span.weight != nullptr && t.master_kind != Master::f32) {
      last = copy(Direction::to_tier, t.param, span.weight, t.numel * itemsize(t.param_dtype));
    }
  }
}

bool ChunkMoves::has_come(int64_t number) {
  return tier_->stream(Direction::to_tier).query(arrived_[static_cast<size_t>(number)]);
}

std::unique_ptr<OpenChunk> ChunkMoves::open(int64_t number) {
  const auto index = static_cast<size_t>(number);
  wait_for(Direction::to_tier, arrived_[index]);
  return std::make_unique<OpenChunk>(step_.chunks[index], step_.scalars, passes_ ? &passing_copies_ : nullptr);
}

void ChunkMoves::send(int64_t number, OpenChunk& sent) {
  if (adam_per_second_ > 0) {
    const std::chrono::duration<double> takes(static_cast<double>(sent.numel) / adam_per_second_);
    sent.begin = std::max(sent.begin, adam_is_free_);
    adam_is_free_ = sent.end = sent.begin + std::chrono::duration_cast<Clock::duration>(takes);
    std::this_thread::sleep_until(sent.end);
  }
  note("adam", sent.begin, sent.end, sent.numel);
  if (passes_) return;
  const TierChunk& chunk = step_.chunks[static_cast<size_t>(number)];
  for (const TierSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    if (span.weight == nullptr) continue;
    const int64_t last = copy(Direction::from_tier, span.weight, t.param, t.numel * itemsize(t.param_dtype));
    place_left_[static_cast<size_t>(chunk.place)] = last;
    const std::lock_guard<std::mutex> lock(mutex_);
    left_[static_cast<size_t>(number)] = last;
  }
}

int64_t ChunkMoves::left(int64_t first, int64_t last) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first == last ? 0 : *std::max_element(left_.begin() + first, left_.begin() + last);
}

std::vector<TierEvent> ChunkMoves::events() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_;
}

int64_t ChunkMoves::copy(Direction direction, void* dst, const void* src, int64_t size_bytes) {
  const auto begin = Clock::now();
  const int64_t number = tier_->copy(direction, dst, src, size_bytes, step_.stream);
  note(direction_name(direction), begin, Clock::now(), size_bytes);
  return number;
}

AdamCopies::Copy ChunkMoves::copy_now(Direction direction) const {
  return [this, direction](void* dst, const void* src, int64_t size) { tier_->copy_now(direction, dst, src, size); };
}

void ChunkMoves::wait_for(Direction direction, int64_t number) {
  if (number == 0) return;
  const auto begin = Clock::now();
  tier_->stream(direction).synchronize(number);
  note(direction == Direction::to_tier ? "to_tier.synchronize" : "from_tier.synchronize", begin, Clock::now(), 0);
}

void ChunkMoves::note(const char* what, Clock::time_point begin, Clock::time_point end, int64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back({what, seconds(begin), seconds(end), amount});
}

}  // namespace shardcore
