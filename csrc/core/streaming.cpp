#include "core/streaming.h"

#include <cstring>

#include "core/executor.h"

namespace shardcore {
namespace {
constexpr int64_t kLine = 64;
constexpr int64_t kGrainLines = 32768;  // 2 MiB: to wake a second thread that rests takes longer than to copy that much
}  // namespace

void stream_copy(void* dst, const void* src, int64_t bytes, Executor& executor) {
  const bool past_caches = streams(dst, bytes);
  const int64_t lines = bytes / kLine;
  auto* const out = static_cast<char*>(dst);
  const auto* const in = static_cast<const char*>(src);
  executor.parallel_for(0, lines, kGrainLines, [&](int64_t first, int64_t last) {
    const int64_t start = first * kLine;
    const int64_t size = (last - first) * kLine;
    if (past_caches) {
      const auto numel = size / static_cast<int64_t>(sizeof(float));
      stream_floats(reinterpret_cast<float*>(out + start), reinterpret_cast<const float*>(in + start), numel);
      stream_fence();
    } else {
      std::memcpy(out + start, in + start, static_cast<size_t>(size));
    }
  });
  std::memcpy(out + lines * kLine, in + lines * kLine, static_cast<size_t>(bytes - lines * kLine));
}

}  // namespace shardcore
