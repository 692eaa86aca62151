// The threads of one CUDA block on the host, which wait for each other at barriers. Two kinds with one interface:
//
//   ThreadTeam: a real thread each. The thread sanitizer sees what CUDA's threads would race for.
//   FiberTeam: all on the caller's thread, in an order that is shuffled at each barrier: a hundred times faster, the same with
//     each run, and it finds barriers that only some threads reach.
//
// Both stay from block to block: making threads takes longer than what a block does.
#pragma once

#include <pthread.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shardcore::testing {

class HostBarrier {
 public:
  virtual ~HostBarrier() = default;
  // turn: 0 and 1 alternately, the same for all threads of a meeting.
  virtual void wait(int turn) = 0;
};

class HostTeam {
 public:
  virtual ~HostTeam() = default;
  // work(thread) on every thread at once.
  virtual void run(const std::function<void(int)>& work) = 0;
  virtual std::unique_ptr<HostBarrier> make_barrier(int count) = 0;
};

class ThreadTeam : public HostTeam {
 public:
  explicit ThreadTeam(int count) : start_(count + 1), end_(count + 1) {
    for (int thread = 0; thread < count; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
  }
  ~ThreadTeam() override {
    work_ = nullptr;
    start_.wait(0);
    for (std::thread& thread : threads_) thread.join();
  }
  void run(const std::function<void(int)>& work) override {
    work_ = &work;
    start_.wait(0);
    end_.wait(0);
  }
  std::unique_ptr<HostBarrier> make_barrier(int count) override { return std::make_unique<Barrier>(count); }

 private:
  // pthread's, since the thread sanitizer knows it: leaving orders a thread after all who have come (a mutex would also order
  // it after whoever has locked it meanwhile, and hide races). One for each turn: who leaves late would else be ordered after
  // those who have come to the next meeting already, too, which hides what they did in between.
  class Barrier : public HostBarrier {
   public:
    explicit Barrier(int count) {
      for (pthread_barrier_t& barrier : barriers_) pthread_barrier_init(&barrier, nullptr, static_cast<unsigned>(count));
    }
    ~Barrier() override {
      for (pthread_barrier_t& barrier : barriers_) pthread_barrier_destroy(&barrier);
    }
    Barrier(const Barrier&) = delete;
    void wait(int turn) override { pthread_barrier_wait(&barriers_[turn]); }

   private:
    pthread_barrier_t barriers_[2];
  };

  void serve(int thread) {
    for (start_.wait(0); work_ != nullptr; start_.wait(0)) {
      (*work_)(thread);
      end_.wait(0);
    }
  }

  Barrier start_, end_;
  const std::function<void(int)>* work_ = nullptr;
  std::vector<std::thread> threads_;
};

class FiberTeam : public HostTeam {
 public:
  explicit FiberTeam(int count) {
    for (int thread = 0; thread < count; ++thread) {
      Fiber& fiber = fibers_.emplace_back();
      fiber.thread = thread;
      fiber.stack.reset(new char[kStackBytes]);
      order_.push_back(&fiber);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.context, &FiberTeam::enter, 0);
    }
  }

  // Throws std::logic_error, and cannot run again, if threads wait at barriers that the others never reach.
  void run(const std::function<void(int)>& work) override {
    work_ = &work;
    for (Fiber& fiber : fibers_) fiber.done = false;
    for (size_t left = fibers_.size(); left != 0;) {
      bool progressed = false;
      std::shuffle(order_.begin(), order_.end(), random_);
      for (Fiber* fiber : order_) {
        if (fiber->done || (fiber->waits != nullptr && fiber->waits->meeting == fiber->meeting)) continue;
        fiber->waits = nullptr;
        resume(*fiber);
        progressed = true;
        left -= fiber->done;
      }
      if (!progressed) throw std::logic_error("threads of a CUDA block wait at a barrier that others do not reach");
    }
  }
  std::unique_ptr<HostBarrier> make_barrier(int count) override { return std::make_unique<Barrier>(*this, count); }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;

  struct Barrier : HostBarrier {
    Barrier(FiberTeam& owner, int threads) : team(owner), count(threads) {}
    void wait(int) override {
      if (++arrived == count) {
        arrived = 0;
        ++meeting;
        return;
      }
      team.current_->waits = this;
      team.current_->meeting = meeting;
      team.pause();
    }
    FiberTeam& team;
    int count, arrived = 0;
    uint64_t meeting = 0;  // how many were completed
  };

  struct Fiber {
    int thread = 0;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    const Barrier* waits = nullptr;  // or runnable
    uint64_t meeting = 0;            // the one it waits for
    bool done = false;
  };

  static void enter() {
    FiberTeam& team = *entering_;
    team.arrived(nullptr);
    for (Fiber& self = *team.current_;;) {
      (*team.work_)(self.thread);
      self.done = true;
      team.pause();
    }
  }

  // Changes of stack, which the address sanitizer wants to know.
  void resume(Fiber& fiber) {
    current_ = &fiber;
    entering_ = this;
#if defined(__SANITIZE_ADDRESS__)
    void* saved = nullptr;
    __sanitizer_start_switch_fiber(&saved, fiber.stack.get(), kStackBytes);
    swapcontext(&caller_, &fiber.context);
    __sanitizer_finish_switch_fiber(saved, nullptr, nullptr);
#else
    swapcontext(&caller_, &fiber.context);
#endif
  }
  void pause() {
    void* saved = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&saved, caller_stack_, caller_stack_bytes_);
#endif
    swapcontext(&current_->context, &caller_);
    arrived(saved);
  }
  void arrived([[maybe_unused]] void* saved) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(saved, &caller_stack_, &caller_stack_bytes_);
#endif
  }

  static inline FiberTeam* entering_ = nullptr;
  std::deque<Fiber> fibers_;
  std::vector<Fiber*> order_;
  std::mt19937 random_{1};
  const std::function<void(int)>* work_ = nullptr;
  Fiber* current_ = nullptr;
  ucontext_t caller_;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
};

}  // namespace shardcore::testing
