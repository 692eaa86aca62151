// Warps on the host: one real thread for each lane, a real barrier for each warp operation. CUDA kernel bodies that take a
// Warp run on it, and the thread sanitizer sees what CUDA's lanes would race for.
#pragma once

#include <pthread.h>

#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace shardcore::testing {

// pthread's, since the thread sanitizer knows it: leaving orders a thread after those that came to the same meeting, and after
// nothing else (a mutex would also order it after whoever has locked it meanwhile, and hide races).
class HostBarrier {
 public:
  explicit HostBarrier(unsigned count) { pthread_barrier_init(&barrier_, nullptr, count); }
  ~HostBarrier() { pthread_barrier_destroy(&barrier_); }
  HostBarrier(const HostBarrier&) = delete;
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// What a body sees of its warp: the operations of CudaWarp (csrc/core/cuda_warp.h).
class HostWarp {
 public:
  struct Shared {
    HostBarrier barrier{32};
    std::array<uint32_t, 32> slots{};
  };
  HostWarp(Shared& shared, int lane) : shared_(shared), lane_(lane) {}

  uint32_t max(uint32_t x) const {
    shared_.slots[static_cast<size_t>(lane_)] = x;
    shared_.barrier.wait();
    uint32_t largest = 0;
    for (const uint32_t slot : shared_.slots) largest = slot > largest ? slot : largest;
    shared_.barrier.wait();
    return largest;
  }

 private:
  Shared& shared_;
  int lane_;
};

// For bodies whose threads do not wait for each other.
struct NoWarp {
  uint32_t max(uint32_t) const { throw std::logic_error("a warp operation in a body without warps"); }
};

// The warps of one CUDA block, one after the other on the same 32 threads, which stay for the next block: warps share nothing.
class HostWarps {
 public:
  explicit HostWarps(int count) : count_(count) {}

  // body(thread, warp) for every thread of the block, the lanes of a warp all at once.
  template <typename Body>
  void run(const Body& body) const {
    std::vector<HostWarp::Shared> warps(static_cast<size_t>(count_));
    lanes().run([&](int lane) {
      for (int warp = 0; warp < count_; ++warp) body(32 * warp + lane, HostWarp(warps[static_cast<size_t>(warp)], lane));
    });
  }

 private:
  class Lanes {
   public:
    Lanes() {
      for (int lane = 0; lane < 32; ++lane) threads_.emplace_back([this, lane] { serve(lane); });
    }
    ~Lanes() {
      work_ = nullptr;
      start_.wait();
      for (std::thread& thread : threads_) thread.join();
    }
    void run(const std::function<void(int)>& work) {
      work_ = &work;
      start_.wait();
      end_.wait();
    }

   private:
    void serve(int lane) {
      for (start_.wait(); work_ != nullptr; start_.wait()) {
        (*work_)(lane);
        end_.wait();
      }
    }
    HostBarrier start_{33}, end_{33};
    const std::function<void(int)>* work_ = nullptr;
    std::vector<std::thread> threads_;
  };

  static Lanes& lanes() {
    static Lanes lanes;
    return lanes;
  }

  int count_;
};

}  // namespace shardcore::testing
