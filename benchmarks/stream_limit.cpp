// What this machine's memory allows: the same streams as an Adam step, with next to no arithmetic.
//
// Built at run time by benchmarks/bench_cpu_adam.py and called through ctypes; knows nothing of torch or of the library.
// Buffers do not overlap. Each thread walks one contiguous range, as the engines that are compared do, and asks
// ahead for lines, as our own loop does: a loop that did not was slower than the steps that it should bound.

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

constexpr int64_t kLine = 16;  // elements

#if defined(__x86_64__) && defined(__GNUC__)
static const int64_t kAhead = __builtin_cpu_is("amd") ? 96 : 768;
#else
constexpr int64_t kAhead = 768;
#endif

template <typename... Streams>
__attribute__((always_inline)) static inline void ask(int64_t i, const Streams*... streams) {
  (__builtin_prefetch(streams + i + kAhead), ...);
}

// Reads p, g, m, v; writes p, m, v.
CLONES static void adam_streams(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
                                int64_t begin, int64_t end) {
  for (int64_t line = begin; line < end; line += kLine) {
    ask(line, p, g, m, v);
    for (int64_t i = line; i < std::min(line + kLine, end); ++i) {
      const float new_m = m[i] * 0.5f + g[i];
      const float new_v = v[i] * 0.5f + g[i];
      const float new_p = p[i] * 0.5f + (new_m - new_v);
      m[i] = new_m;
      v[i] = new_v;
      p[i] = new_p;
    }
  }
}

// The offload step: reads the bfloat16 gradient, the float32 master, m and v; writes master, m, v and the bfloat16 weight.
CLONES static void offload_streams(uint16_t* __restrict weight, const uint16_t* __restrict grad, float* __restrict master,
                                   float* __restrict m, float* __restrict v, int64_t begin, int64_t end) {
  for (int64_t line = begin; line < end; line += kLine) {
    ask(line, weight, grad, master, m, v);
    for (int64_t i = line; i < std::min(line + kLine, end); ++i) {
      const uint32_t grad_bits = static_cast<uint32_t>(grad[i]) << 16;
      float g;
      std::memcpy(&g, &grad_bits, sizeof g);
      const float new_m = m[i] * 0.5f + g;
      const float new_v = v[i] * 0.5f + g;
      const float updated = master[i] * 0.5f + (new_m - new_v);
      m[i] = new_m;
      v[i] = new_v;
      master[i] = updated;
      uint32_t bits;
      std::memcpy(&bits, &updated, sizeof bits);
      weight[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

// Threads that stay, as those of the engines do: new ones may begin on one core, and then share it for a while.
struct Team {
  explicit Team(int threads) : start(threads), end(threads) {
    for (int t = 1; t < threads; ++t) {
      std::thread([this, t] {
        for (;;) take_part(t);
      }).detach();
    }
  }

  void take_part(int thread) {
    start.arrive_and_wait();
    run(thread);
    end.arrive_and_wait();
  }

  std::function<void(int)> run;
  std::barrier<> start, end;
};

// threads: the same in every call.
static void over_threads(int64_t numel, int threads, const std::function<void(int64_t, int64_t)>& function) {
  static Team* const team = new Team(threads);  // never ends, as its threads
  team->run = [&](int t) { function(numel * t / threads, numel * (t + 1) / threads); };
  team->take_part(0);
}

extern "C" void stream_limit_adam(float* p, const float* g, float* m, float* v, int64_t numel, int threads) {
  over_threads(numel, threads, [=](int64_t begin, int64_t end) { adam_streams(p, g, m, v, begin, end); });
}

extern "C" void stream_limit_offload(uint16_t* weight, const uint16_t* grad, float* master, float* m, float* v, int64_t numel,
                                     int threads) {
  over_threads(numel, threads, [=](int64_t begin, int64_t end) { offload_streams(weight, grad, master, m, v, begin, end); });
}
