// A small pool of std::threads. The calling thread works too, so ThreadPool(n) starts n - 1 threads.
//
// Invariants: parallel_for may be called from one thread at a time and not from inside fn. In a forked child, where the
// threads do not exist, it runs serially.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/executor.h"

namespace shardcore {

// A thread that runs `run`. Throws std::system_error that says what to do if the system starts no more.
std::thread start_thread(std::function<void()> run);

class ThreadPool final : public Executor {
 public:
  // Starts a thread that runs the loop given. Tests give one that fails.
  using Spawn = std::function<std::thread(std::function<void()> loop)>;

  // Throws what spawn throws, with every started thread ended.
  explicit ThreadPool(int num_threads, const Spawn& spawn = start_thread);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) override;

 private:
  struct State;

  const int num_threads_;
  const pid_t pid_;
  State* state_;  // leaked in a forked child: its threads cannot be joined there
};

}  // namespace shardcore
