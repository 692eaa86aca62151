#include "offload/tier_steps.h"

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

}  // namespace

struct TierSteps::State {
  State(std::shared_ptr<HostTier> owner, int places, bool passing, double rate)
      : tier(std::move(owner)), passes(passing), adam_per_second(rate), place_left(static_cast<size_t>(places), 0) {}

  const std::shared_ptr<HostTier> tier;
  const bool passes;
  const double adam_per_second;

  // Of whoever makes the step.
  Step step;
  std::vector<int64_t> place_left;  // the last copy that leaves each place
  std::vector<int64_t> arrived;     // the last copy that comes for each chunk; 0: none

  std::mutex mutex;  // guards what follows; step is written while nobody makes one
  std::condition_variable changed;
  int64_t fetched = 0, updated = 0;  // chunks
  std::vector<int64_t> left;         // the last copy that leaves each chunk; 0: none
  std::vector<TierEvent> events;
  std::exception_ptr error;
  bool running = false, abandoned = false, quit = false;  // running: on the thread

  std::thread thread;
  int num_threads = 0;
  pid_t pid = 0;  // that started the thread; 0: none

  int64_t count() const { return static_cast<int64_t>(step.chunks.size()); }

  void begin(Step next);
  void work();
  void advance(Executor& executor);
  void fetch(size_t index);
  void update(size_t index, Executor& executor);
  int64_t copy(Direction direction, void* dst, const void* src, int64_t size_bytes);
  void wait_for(Direction direction, int64_t number);
  void stop();

  // Calls `act` and notes that it happened.
  template <typename Act>
  auto noted(const char* what, int64_t amount, const Act& act) {
    const struct Note {
      State& state;
      const char* what;
      int64_t amount;
      Clock::time_point begin = Clock::now();
      ~Note() {
        const std::lock_guard<std::mutex> lock(state.mutex);
        state.events.push_back({what, seconds(begin), seconds(Clock::now()), amount});
      }
    } note{*this, what, amount};
    return act();
  }
};

void TierSteps::State::begin(Step next) {
  const std::lock_guard<std::mutex> lock(mutex);
  step = std::move(next);
  arrived.assign(step.chunks.size(), 0);
  left.assign(step.chunks.size(), 0);
  fetched = updated = 0;
  events.clear();
  size_t most = 0;  // three copies of each span, two waits and Adam of each chunk: with room for all, to note one cannot fail
  for (const TierChunk& chunk : step.chunks) most += 3 + 3 * chunk.spans.size();
  events.reserve(most);
  error = nullptr;
  abandoned = false;
}

// Makes what comes next: every chunk is fetched before the one before it is updated.
void TierSteps::State::advance(Executor& executor) {
  const bool fetches = fetched < std::min(updated + 2, count());
  if (fetches && fetched == 0 && step.weights_leave) tier->synchronize();
  if (fetches) {
    fetch(static_cast<size_t>(fetched));
  } else {
    update(static_cast<size_t>(updated), executor);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  ++(fetches ? fetched : updated);
  changed.notify_all();
}

void TierSteps::State::fetch(size_t index) {
  if (passes) return;
  const TierChunk& chunk = step.chunks[index];
  bool place_is_free = false;
  for (const TierSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    if (span.weight != nullptr && !std::exchange(place_is_free, true)) {
      wait_for(Direction::from_tier, place_left[static_cast<size_t>(chunk.place)]);
    }
    if (span.grad_comes) {
      arrived[index] = copy(Direction::to_tier, const_cast<void*>(t.grad), span.grad, t.numel * itemsize(t.grad_dtype));
    }
    if (span.weight != nullptr && t.master_kind != Master::f32) {
      arrived[index] = copy(Direction::to_tier, t.param, span.weight, t.numel * itemsize(t.param_dtype));
    }
  }
}

void TierSteps::State::update(size_t index, Executor& executor) {
  wait_for(Direction::to_tier, arrived[index]);
  const TierChunk& chunk = step.chunks[index];
  std::vector<AdamSegment> segments;
  std::vector<AdamHome> homes;
  int64_t numel = 0;
  for (const TierSpan& span : chunk.spans) {
    segments.push_back(span.segment);
    if (!span.grad_comes) segments.back().grad = span.grad;
    homes.push_back({span.grad_comes ? span.grad : nullptr, span.weight});
    numel += span.segment.numel;
  }
  const auto num_segments = static_cast<int64_t>(segments.size());
  noted("adam", numel, [&] {
    const Clock::time_point begin = Clock::now();
    if (passes) {
      const auto copies = [this](Direction direction) {
        return [this, direction](void* dst, const void* src, int64_t size) { tier->copy_now(direction, dst, src, size); };
      };
      adam_cpu_passing(segments.data(), homes.data(), num_segments, step.scalars.data(),
                       {copies(Direction::to_tier), copies(Direction::from_tier)}, executor);
    } else {
      adam_cpu(segments.data(), num_segments, step.scalars.data(), executor);
    }
    if (adam_per_second > 0) {
      const std::chrono::duration<double> takes(static_cast<double>(numel) / adam_per_second);
      std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(takes));
    }
  });
  if (passes) return;
  for (const TierSpan& span : chunk.spans) {
    const AdamSegment& t = span.segment;
    if (span.weight == nullptr) continue;
    const int64_t number = copy(Direction::from_tier, span.weight, t.param, t.numel * itemsize(t.param_dtype));
    place_left[static_cast<size_t>(chunk.place)] = number;
    const std::lock_guard<std::mutex> lock(mutex);
    left[index] = number;
  }
}

int64_t TierSteps::State::copy(Direction direction, void* dst, const void* src, int64_t size_bytes) {
  return noted(direction_name(direction), size_bytes, [&] { return tier->copy(direction, dst, src, size_bytes, step.stream); });
}

void TierSteps::State::wait_for(Direction direction, int64_t number) {
  if (number == 0) return;
  noted(direction == Direction::to_tier ? "to_tier.synchronize" : "from_tier.synchronize", 0,
        [&] { tier->stream(direction).synchronize(number); });
}

void TierSteps::State::work() {
  std::unique_ptr<ThreadPool> pool;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return quit || running; });
    if (quit) return;
    while (!abandoned && error == nullptr && updated < count()) {
      lock.unlock();
      std::exception_ptr problem;
      try {
        if (pool == nullptr) {
          tier->enter_thread();
          pool = std::make_unique<ThreadPool>(num_threads);
        }
        advance(*pool);
      } catch (...) {
        problem = std::current_exception();
      }
      lock.lock();
      error = problem;
    }
    running = false;
    changed.notify_all();
  }
}

// Ends the thread, which makes nothing.
void TierSteps::State::stop() {
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

TierSteps::TierSteps(std::shared_ptr<HostTier> tier, int places, bool passes, double adam_per_second)
    : state_(new State(std::move(tier), places, passes, adam_per_second)) {}

TierSteps::~TierSteps() {
  if (is_forked()) return;  // leaked: its thread cannot be joined here
  end();
  state_->stop();
  delete state_;
}

bool TierSteps::is_forked() const { return state_->pid != 0 && state_->pid != getpid(); }

void TierSteps::begin(Step step, int num_threads) {
  if (is_forked()) {  // while nobody made a step; but its mutex may be held for good
    const State& old = *state_;
    auto fresh = std::make_unique<State>(old.tier, 0, old.passes, old.adam_per_second);
    fresh->place_left = old.place_left;
    state_ = fresh.release();
  }
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

void TierSteps::wait_fetched(int64_t count, Executor& executor) {
  advance_to([count](const State& state) { return state.fetched >= std::min(count, state.count()); }, executor);
}

void TierSteps::wait_updated(int64_t count, Executor& executor) {
  advance_to([count](const State& state) { return state.updated >= count; }, executor);
}

void TierSteps::advance_to(const std::function<bool(const State&)>& reached, Executor& executor) {
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

int64_t TierSteps::left(int64_t first, int64_t last) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const std::vector<int64_t>& left = state_->left;
  return first == last ? 0 : *std::max_element(left.begin() + first, left.begin() + last);
}

void TierSteps::end() noexcept {
  if (is_forked()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->abandoned = true;
  state_->changed.wait(lock, [this] { return !state_->running; });
  if (state_->updated < state_->count()) state_->tier->stream(Direction::to_tier).drain(/*hurry=*/false);
  state_->step = {};
}

std::vector<TierEvent> TierSteps::events() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->events;
}

}  // namespace shardcore
