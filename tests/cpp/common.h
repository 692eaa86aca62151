// What the C++ tests share: guarded buffers, random values, comparison of bits, the list of instruction sets.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "core/convert.h"
#include "core/cpu_isa.h"
#include "core/dtype.h"
#include "core/thread_pool.h"

namespace shardcore::testing {

// Where a loop takes many times as long, exhaustive ones take a part; the preset cpu tries all.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(SHARDCORE_EMULATED)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

// Memory with sentinels on both sides and a chosen misalignment from 64 bytes. Under the address sanitizer reading the
// sentinels is an error too.
class Buffer {
 public:
  Buffer(int64_t size_bytes, int64_t misalign_bytes)
      : size_(static_cast<size_t>(size_bytes)), storage_(size_ + 3 * kGuard + static_cast<size_t>(misalign_bytes), kSentinel) {
    const auto start = reinterpret_cast<uintptr_t>(storage_.data());
    offset_ = (start + kGuard + 63) / 64 * 64 - start + static_cast<size_t>(misalign_bytes);
    guard(true);
  }
  ~Buffer() { guard(false); }
  Buffer(Buffer&&) = default;
  Buffer(const Buffer&) = delete;

  void* data() { return storage_.data() + offset_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  std::vector<uint8_t> bytes() { return {as<uint8_t>(), as<uint8_t>() + size_}; }
  void set_bytes(const std::vector<uint8_t>& bytes) {
    if (size_) std::memcpy(data(), bytes.data(), size_);
  }
  bool sentinels_intact() const {
    guard(false);
    bool intact = true;
    for (size_t i = 0; i < storage_.size(); ++i) {
      intact = intact && ((i >= offset_ && i < offset_ + size_) || storage_[i] == kSentinel);
    }
    guard(true);
    return intact;
  }

 private:
  void guard([[maybe_unused]] bool on) const {
#if defined(__SANITIZE_ADDRESS__)
    if (storage_.empty()) return;  // moved from
    const uint8_t* const end = storage_.data() + offset_ + size_;
    const auto after = static_cast<size_t>(storage_.data() + storage_.size() - end);
    if (on) {
      __asan_poison_memory_region(storage_.data(), offset_);
      __asan_poison_memory_region(end, after);
    } else {
      __asan_unpoison_memory_region(storage_.data(), storage_.size());
    }
#endif
  }

  static constexpr size_t kGuard = 128;
  static constexpr uint8_t kSentinel = 0xa5;
  size_t size_;
  size_t offset_ = 0;
  std::vector<uint8_t> storage_;
};

// NaN payloads are not part of the promise: all NaNs become one.
inline void canonicalize_nans(void* data, DType dtype, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(load_as_f32(data, dtype, i))) store_from_f32(data, dtype, i, kNan);
  }
}

// The definition of a block's norm, word for word: square in double, then halve.
inline double naive_block(const void* data, DType dtype, int64_t n) {
  double a[256] = {};
  for (int64_t j = 0; j < n; ++j) {
    const double x = load_as_f32(data, dtype, j);
    a[j] = x * x;
  }
  for (int s = 128; s >= 1; s /= 2) {
    for (int j = 0; j < s; ++j) a[j] += a[j + s];
  }
  return a[0];
}

// FNV-1a.
inline uint64_t hash_of(const std::vector<std::vector<uint8_t>>& buffers) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const auto& bytes : buffers) {
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  }
  return hash;
}

// Threads that divide even what one of them would do sooner alone.
class EagerPool final : public Executor {
 public:
  explicit EagerPool(int num_threads) : pool_(num_threads) {}
  void parallel_for(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFn& fn) override {
    pool_.parallel_for(begin, end, 1, fn);
  }

 private:
  ThreadPool pool_;
};

// Notes how many threads a job is worth.
class ThreadCount final : public Executor {
 public:
  int64_t last = 0;
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) override {
    last = (end - begin) / grain;
    fn(begin, end);
  }
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float normal(float sigma = 1.0f) { return std::normal_distribution<float>(0.0f, sigma)(engine_); }
  double uniform() { return std::uniform_real_distribution<double>(0.0, 1.0)(engine_); }
  int64_t integer(int64_t below) { return std::uniform_int_distribution<int64_t>(0, below - 1)(engine_); }
  uint32_t bits() { return static_cast<uint32_t>(engine_()); }
  // Mostly normal numbers; sometimes zeros, subnormals, huge, infinite, NaN.
  float with_specials() {
    static const float specials[] = {0.0f, -0.0f, 1e-40f, -3e-45f, 1e-30f, 3e38f, -3e38f, kInf, -kInf, kNan, 6e-8f, 65504.0f};
    return integer(6) == 0 ? specials[integer(12)] : normal();
  }

 private:
  std::mt19937 engine_;
};

// Runs a body once for each instruction set of this CPU, and puts the choice back.
template <typename Body>
void for_each_isa(const Body& body) {
  const std::string saved = cpu_isa_name(cpu_isa());
  for (const std::string& isa : cpu_isas()) {
    set_cpu_isa(isa);
    SCOPED_TRACE("isa " + isa);
    body(isa);
  }
  set_cpu_isa(saved);
}

}  // namespace shardcore::testing
