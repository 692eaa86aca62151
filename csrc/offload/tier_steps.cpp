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
#include "offload/chunk_moves.h"

namespace shardcore {
namespace {

// A thread takes so many blocks of a chunk at a time: long enough for the streams that it reads, short enough that all end
// together.
constexpr int64_t kPartBlocks = 256;

}  // namespace

struct TierSteps::State {
  template <typename... Arguments>
  explicit State(Arguments&&... arguments) : moves(std::forward<Arguments>(arguments)...) {}

  ChunkMoves moves;  // begins and ends while nobody makes a step; chunks move where is_tended

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  int64_t fetched = 0, opened = 0, updated = 0;  // chunks
  std::unique_ptr<OpenChunk> open_chunks[2];     // from `updated` to `opened`, by their number
  bool is_tended = false;                        // a thread fetches, opens or sends one
  std::exception_ptr error;
  bool running = false, abandoned = false, quit = false;  // running: on the thread

  std::thread thread;
  int num_threads = 0;
  pid_t pid = 0;  // that started the thread; 0: none

  int64_t count() const { return moves.count(); }
  bool is_ending() const { return abandoned || error != nullptr; }
  OpenChunk& chunk(int64_t number) { return *open_chunks[number % 2]; }

  void begin(Step next);
  void advance(Executor& executor);
  void work();
  void take_parts();
  bool tend(std::unique_lock<std::mutex>& lock);
  OpenChunk* with_parts();
  enum class Act { none, open, send, fetch };
  Act next_act();
  // Of chunks for which that was done.
  int64_t& count_of(Act act) { return act == Act::open ? opened : act == Act::send ? updated : fetched; }
  void open(int64_t number);
  void stop();
};

void TierSteps::State::begin(Step next) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& open_chunk : open_chunks) open_chunk.reset();
  moves.begin(std::move(next));
  fetched = opened = updated = 0;
  error = nullptr;
  abandoned = false;
}

// What whoever waits makes next: every chunk is fetched before the one before it is updated.
void TierSteps::State::advance(Executor& executor) {
  const bool fetches = fetched < std::min(updated + 2, count());
  if (fetches) {
    moves.fetch(fetched);
  } else {
    open(updated);
    OpenChunk& open_chunk = chunk(updated);
    open_chunk.line->update(executor);
    open_chunk.end = Clock::now();
    moves.send(updated, open_chunk);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (!fetches) opened = updated + 1;
  ++(fetches ? fetched : updated);
  changed.notify_all();
}

// One of the threads that make a step together. No thread waits for others at the end of a chunk: whoever finds no part left
// goes on with the next chunk, and between two parts someone sends, fetches and opens what can be.
void TierSteps::State::take_parts() {
  moves.tier().enter_thread();
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    if (tend(lock)) continue;
    OpenChunk* const taken = with_parts();
    if (taken == nullptr) {
      const bool all_are_taken = opened == count() && !is_tended;
      if (all_are_taken || is_ending()) return;  // who is at the last parts sends them
      changed.wait(lock);
      continue;
    }
    const int64_t first = taken->taken;
    taken->taken = std::min(first + kPartBlocks, taken->line->num_blocks());
    const int64_t last = taken->taken;
    if (first == 0) taken->begin = Clock::now();
    lock.unlock();
    std::exception_ptr problem;
    try {
      taken->line->update(first, last);
    } catch (...) {
      problem = std::current_exception();
    }
    lock.lock();
    if (problem != nullptr) {
      error = problem;
      changed.notify_all();  // nobody sends this chunk, for which others may wait
    } else {
      taken->done += last - first;
    }
    if (taken->is_done()) taken->end = Clock::now();
  }
}

// An opened chunk with parts that nobody has taken yet, or null. Of a step that ends, those of a chunk that was begun.
OpenChunk* TierSteps::State::with_parts() {
  for (int64_t number = updated; number < opened; ++number) {
    OpenChunk& next = chunk(number);
    if (!next.is_taken() && (next.taken > 0 || !is_ending())) return &next;
  }
  return nullptr;
}

// What can be done now beside Adam. A chunk that has come is opened first, so that others go on with it meanwhile; the wait for
// one that has not comes last, when no part is left for anybody. Throws CopyError.
TierSteps::State::Act TierSteps::State::next_act() {
  const bool ending = is_ending();
  const bool may_open = !ending && opened < std::min(fetched, updated + 2);
  const OpenChunk* const current = with_parts();
  const int64_t parts_left = current == nullptr ? 0 : (current->line->num_blocks() - current->taken) / kPartBlocks;
  if (may_open && parts_left <= 2 * num_threads && moves.has_come(opened)) return Act::open;
  if (updated < opened && chunk(updated).is_done() && error == nullptr) return Act::send;
  if (!ending && fetched < std::min(updated + 2, count())) return Act::fetch;
  return may_open && current == nullptr ? Act::open : Act::none;
}

// Opens, sends or fetches a chunk, if one can be and nobody else is at it; returns whether it did.
bool TierSteps::State::tend(std::unique_lock<std::mutex>& lock) {
  if (is_tended) return false;
  Act act = Act::none;
  std::exception_ptr problem;
  try {
    act = next_act();
    if (act == Act::none) return false;
    is_tended = true;
    const int64_t number = count_of(act);
    lock.unlock();
    if (act == Act::open) open(number);
    if (act == Act::send) moves.send(number, chunk(number));
    if (act == Act::fetch) moves.fetch(number);
  } catch (...) {
    problem = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  is_tended = false;
  if (problem != nullptr) {
    error = problem;
  } else {
    ++count_of(act);
  }
  changed.notify_all();
  return true;
}

void TierSteps::State::open(int64_t number) {
  auto opening = moves.open(number);
  const std::lock_guard<std::mutex> lock(mutex);
  open_chunks[number % 2] = std::move(opening);
}

void TierSteps::State::work() {
  std::unique_ptr<ThreadPool> pool;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return quit || running; });
    if (quit) return;
    lock.unlock();
    std::exception_ptr problem;
    try {
      if (pool == nullptr) {
        moves.tier().enter_thread();
        pool = std::make_unique<ThreadPool>(num_threads);
      }
      pool->parallel_for(0, num_threads, 1, [this](int64_t, int64_t) { take_parts(); });
    } catch (...) {
      problem = std::current_exception();
    }
    lock.lock();
    if (problem != nullptr) error = problem;
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
  if (is_forked()) state_ = new State(std::as_const(state_->moves));  // while nobody made a step; but a mutex may be held
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

int64_t TierSteps::left(int64_t first, int64_t last) const { return state_->moves.left(first, last); }

void TierSteps::end() noexcept {
  if (is_forked()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->abandoned = true;
  state_->changed.wait(lock, [this] { return !state_->running; });
  if (state_->updated < state_->count()) state_->moves.tier().stream(Direction::to_tier).drain(/*hurry=*/false);
  state_->moves.end();
}

std::vector<TierEvent> TierSteps::events() const { return state_->moves.events(); }

}  // namespace shardcore
