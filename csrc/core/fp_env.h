// Clears flush-to-zero and denormals-are-zero for a scope: a program that sets them (torch.set_flush_denormal) must not
// change the bits of a step. Every worker makes one around its part of the work.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardcore {

class SubnormalGuard {
 public:
#if defined(__x86_64__)
  SubnormalGuard() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero)); }
  ~SubnormalGuard() { _mm_setcsr((_mm_getcsr() & ~kMask) | (saved_ & kMask)); }
#elif defined(__aarch64__)
  SubnormalGuard() : saved_(get()) { set(saved_ & ~kMask); }
  ~SubnormalGuard() { set((get() & ~kMask) | (saved_ & kMask)); }
#endif
  SubnormalGuard(const SubnormalGuard&) = delete;
  SubnormalGuard& operator=(const SubnormalGuard&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kFlushToZero = 0x8000u;
  static constexpr unsigned kDenormalsAreZero = 0x0040u;
  static constexpr unsigned kMask = kFlushToZero | kDenormalsAreZero;
  unsigned saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kMask = uint64_t{1} << 24;  // FPCR.FZ
  static uint64_t get() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
  uint64_t saved_;
#endif
};

}  // namespace shardcore
