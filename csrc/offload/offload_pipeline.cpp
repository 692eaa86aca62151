#include "offload/offload_pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/thread_pool.h"

namespace shardcore {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

bool weight_comes(const OffloadSpan& span) { return span.weight != nullptr && span.segment.master_kind != Master::f32; }

}  // namespace

struct OffloadPipeline::State {
  State(std::shared_ptr<HostTier> its_tier, std::vector<int64_t> last_copies)
      : tier(std::move(its_tier)), place_copy(std::move(last_copies)) {}

  // Used by the thread that runs the step, one at a time; it alone writes the counts of chunks.
  const std::shared_ptr<HostTier> tier;
  Step step;
  std::vector<int64_t> place_copy;  // the last copy from the tier of each place; 0: it is free
  std::vector<int64_t> arrival;     // the last copy to the tier of each chunk; 0: none

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  int64_t fetched = 0, updated = 0, updated_from_end = 0;  // chunks; see the diagram in the header
  std::vector<int64_t> chunk_copy;                         // the last copy from the tier of each chunk; 0: none
  std::vector<OffloadEvent> events;
  std::exception_ptr error;
  bool running = false, abandoned = false, quit = false;  // running: on the thread

  std::thread thread;
  int num_threads = 0;
  pid_t pid = 0;  // that started the thread; 0: none

  int64_t count() const { return static_cast<int64_t>(step.chunks.size()); }
  int64_t left() const { return count() - updated_from_end; }

  void begin(Step next);
  void advance(Executor& executor);
  bool last_chunk_is_next() const;
  void fetch(int64_t number);
  void update(int64_t number, Executor& executor);
  void work();
  bool is_over() const;
  void stop();

  int64_t copy(Direction direction, void* dst, const void* src, int64_t size_bytes);
  void wait_for(Direction direction, int64_t number);
  void wait_for_place(const OffloadChunk& chunk);
  void note(const char* what, Clock::time_point begin, int64_t amount);
};

void OffloadPipeline::State::begin(Step next) {
  const std::lock_guard<std::mutex> lock(mutex);
  step = std::move(next);
  arrival.clear();
  chunk_copy.assign(step.chunks.size(), 0);
  events.clear();
  size_t most = 0;  // three copies a span, three waits and an update a chunk: reserved, so that recording an event cannot fail
  for (const OffloadChunk& chunk : step.chunks) {
    arrival.push_back(chunk.arrival);
    most += 4 + 3 * chunk.spans.size();
    for (const OffloadSpan& span : chunk.spans) step.any_order = step.any_order && !span.grad_comes && !weight_comes(span);
  }
  events.reserve(most);
  fetched = updated = updated_from_end = 0;
  error = nullptr;
  abandoned = false;
}

// Fetches the next chunk, or updates one: each is fetched before the one before it is updated. Throws CopyError.
void OffloadPipeline::State::advance(Executor& executor) {
  int64_t* advanced = &updated;
  if (fetched < std::min(updated + 2, left())) {
    advanced = &fetched;
    fetch(fetched);
  } else if (last_chunk_is_next()) {
    advanced = &updated_from_end;
    update(left() - 1, executor);
  } else {
    update(updated, executor);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  ++*advanced;
  changed.notify_all();
}

// Whether the last chunk that is left comes sooner than the next one, which is not there yet.
bool OffloadPipeline::State::last_chunk_is_next() const {
  if (!step.any_order || left() <= fetched) return false;
  const int64_t next = arrival[static_cast<size_t>(updated)], last = arrival[static_cast<size_t>(left() - 1)];
  return last < next && !tier->stream(Direction::to_tier).query(next);
}

void OffloadPipeline::State::fetch(int64_t number) {
  if (number == 0 && step.weights_leave) {
    CopyStream& leaving = tier->stream(Direction::from_tier);
    leaving.synchronize(leaving.queued());
  }
  const OffloadChunk& chunk = step.chunks[static_cast<size_t>(number)];
  for (const OffloadSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    int64_t& last = arrival[static_cast<size_t>(number)];
    if (span.weight != nullptr) wait_for_place(chunk);
    if (span.grad_comes) {
      last = copy(Direction::to_tier, const_cast<void*>(t.grad), span.grad, t.numel * itemsize(t.grad_dtype));
    }
    if (weight_comes(span)) {
      last = copy(Direction::to_tier, t.param, span.weight, t.numel * itemsize(t.param_dtype));
    }
  }
}

void OffloadPipeline::State::update(int64_t number, Executor& executor) {
  const OffloadChunk& chunk = step.chunks[static_cast<size_t>(number)];
  wait_for(Direction::to_tier, arrival[static_cast<size_t>(number)]);
  std::vector<AdamSegment> segments;
  int64_t numel = 0;
  for (const OffloadSpan& span : chunk.spans) {
    if (span.weight != nullptr) wait_for_place(chunk);  // one from the end is not fetched; it may share a fetched one's
    segments.push_back(span.segment);
    if (!span.grad_comes) segments.back().grad = span.grad;
    numel += span.segment.numel;
  }
  const auto begin = Clock::now();
  step.update(number, segments, executor);
  note("update", begin, numel);
  for (const OffloadSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    if (span.weight == nullptr) continue;
    const int64_t last = copy(Direction::from_tier, span.weight, t.param, t.numel * itemsize(t.param_dtype));
    place_copy[static_cast<size_t>(chunk.place)] = last;
    const std::lock_guard<std::mutex> lock(mutex);
    chunk_copy[static_cast<size_t>(number)] = last;
  }
}

int64_t OffloadPipeline::State::copy(Direction direction, void* dst, const void* src, int64_t size_bytes) {
  const auto begin = Clock::now();
  const int64_t number = tier->copy(direction, dst, src, size_bytes, step.stream);
  note(direction_name(direction), begin, size_bytes);
  return number;
}

void OffloadPipeline::State::wait_for(Direction direction, int64_t number) {
  if (number == 0) return;
  const auto begin = Clock::now();
  tier->stream(direction).synchronize(number);
  note(direction == Direction::to_tier ? "to_tier.synchronize" : "from_tier.synchronize", begin, number);
}

// Waits until no weights leave the chunk's place any more.
void OffloadPipeline::State::wait_for_place(const OffloadChunk& chunk) {
  int64_t& last = place_copy[static_cast<size_t>(chunk.place)];
  wait_for(Direction::from_tier, last);
  last = 0;
}

void OffloadPipeline::State::note(const char* what, Clock::time_point begin, int64_t amount) {
  const auto end = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back({what, seconds(begin), seconds(end), amount});
}

// What the thread does: steps, until it is stopped. Its pool's other threads only run kernels.
void OffloadPipeline::State::work() {
  std::unique_ptr<ThreadPool> pool;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return quit || running; });
    if (quit) return;
    lock.unlock();
    std::exception_ptr problem;
    try {
      if (pool == nullptr) {
        tier->enter_thread();
        pool = std::make_unique<ThreadPool>(num_threads);
      }
      while (!is_over()) advance(*pool);
    } catch (...) {
      problem = std::current_exception();
    }
    lock.lock();
    error = problem;
    running = false;
    changed.notify_all();
  }
}

bool OffloadPipeline::State::is_over() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return abandoned || updated == left();
}

// Ends the thread, which makes nothing.
void OffloadPipeline::State::stop() {
  if (pid == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    quit = true;
  }
  changed.notify_all();
  thread.join();
  quit = false;
  pid = 0;
}

OffloadPipeline::OffloadPipeline(std::shared_ptr<HostTier> tier, int places)
    : state_(new State(std::move(tier), std::vector<int64_t>(static_cast<size_t>(places)))) {}

OffloadPipeline::~OffloadPipeline() {
  if (is_forked()) return;  // leaked: its thread cannot be joined here
  end();
  state_->stop();
  delete state_;
}

bool OffloadPipeline::is_forked() const { return state_->pid != 0 && state_->pid != getpid(); }

void OffloadPipeline::begin(Step step, int num_threads) {
  if (is_forked()) state_ = new State(state_->tier, state_->place_copy);  // a mutex of the parent's may be held for good
  end();
  State& state = *state_;
  state.begin(std::move(step));
  if (num_threads == 0) return;
  if (state.num_threads != num_threads) state.stop();
  state.num_threads = num_threads;
  if (state.pid == 0) {
    state.thread = start_thread([&state] { state.work(); });
    state.pid = getpid();
  }
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.running = true;
  state.changed.notify_all();
}

void OffloadPipeline::wait_fetched(int64_t count, Executor& executor) {
  advance_to([count](const State& state) { return state.fetched >= std::min(count, state.left()); }, executor);
}

void OffloadPipeline::wait_updated(int64_t count, Executor& executor) {
  advance_to([count](const State& state) { return state.updated >= std::min(count, state.left()); }, executor);
}

void OffloadPipeline::advance_to(const std::function<bool(const State&)>& reached, Executor& executor) {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (state.running) state.changed.wait(lock, [&] { return reached(state) || !state.running; });
  if (!reached(state) && state.error != nullptr) std::rethrow_exception(state.error);
  while (!reached(state)) {
    lock.unlock();
    state.advance(executor);
    lock.lock();
  }
}

int64_t OffloadPipeline::last_copy(int64_t first, int64_t last) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto& copies = state_->chunk_copy;
  return first == last ? 0 : *std::max_element(copies.begin() + first, copies.begin() + last);
}

void OffloadPipeline::end() noexcept {
  if (is_forked()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->abandoned = true;
  state_->changed.wait(lock, [this] { return !state_->running; });
  if (state_->updated < state_->left()) state_->tier->stream(Direction::to_tier).drain();
  state_->step = {};
}

std::vector<OffloadEvent> OffloadPipeline::events() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->events;
}

}  // namespace shardcore
