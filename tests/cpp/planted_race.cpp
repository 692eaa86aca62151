// A warp operation whose second barrier is missing: a fast lane writes its slot again while slow ones still read it. CTest runs
// this under the thread sanitizer and wants it to be caught: then the same tool also sees what CUDA bodies would race for.
#include <atomic>
#include <cstdio>

#include "cpp/host_warps.h"

namespace shardcore::testing {
namespace {

class BrokenWarp {
 public:
  BrokenWarp(HostWarp::Shared& shared, int lane) : shared_(shared), lane_(lane) {}
  uint32_t max(uint32_t x) const {
    shared_.slots[static_cast<size_t>(lane_)] = x;
    shared_.barrier.wait();
    uint32_t largest = 0;
    for (const uint32_t slot : shared_.slots) largest = slot > largest ? slot : largest;
    return largest;
  }

 private:
  HostWarp::Shared& shared_;
  int lane_;
};

}  // namespace
}  // namespace shardcore::testing

int main() {
  using namespace shardcore::testing;
  HostWarp::Shared shared;
  std::atomic<uint32_t> sum{0};  // what is not used is not read
  HostWarps(1).run([&](int lane, const HostWarp&) {
    const BrokenWarp warp(shared, lane);
    uint32_t own = 0;
    for (uint32_t round = 0; round < 200; ++round) own += warp.max(round);
    sum += own;
  });
  std::printf("%u\n", static_cast<unsigned>(sum));
}
