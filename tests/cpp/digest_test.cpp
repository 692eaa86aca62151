// Digests: the format, every instruction set and thread count, cuts at block boundaries, and what changes them.
#include "core/executor.h"
#include "cpp/common.h"
#include "cpp/cuda_kernels.h"
#include "digest/digest_cpu.h"

namespace shardcore::testing {
namespace {

constexpr DigestKind kDigestKinds[] = {DigestKind::f32,   DigestKind::bf16,  DigestKind::f16,
                                       DigestKind::split, DigestKind::words, DigestKind::bytes};

int64_t digest_itemsize(DigestKind kind) {
  return kind == DigestKind::bytes ? 1 : kind == DigestKind::f32 || kind == DigestKind::words ? 4 : 2;
}

struct DigestProblem {
  DigestSegment t{};
  std::vector<Buffer> buffers;  // data, rest

  DigestProblem(DigestKind kind, int64_t numel, int64_t misalign, bool scaled = true) {
    const int64_t size = digest_itemsize(kind), rest_size = kind == DigestKind::bytes ? 4 : 2;
    const int64_t num_rests = kind == DigestKind::bytes ? blocks_of(numel) : numel;
    Random random(static_cast<uint32_t>(numel + misalign));
    for (const auto& [count, itemsize] : {std::pair{numel, size}, std::pair{num_rests, rest_size}}) {
      std::vector<uint8_t> bytes(static_cast<size_t>(count * itemsize));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.integer(256));
      buffers.emplace_back(count * itemsize, misalign * itemsize);
      buffers.back().set_bytes(bytes);
    }
    t.kind = kind, t.numel = numel, t.key = 0x0123456789abcdef, t.first_block = 5;
    t.data = buffers[0].data();
    if (kind == DigestKind::split || (kind == DigestKind::bytes && scaled)) t.rest = buffers[1].data();
  }

  uint64_t cpu() const {
    SerialExecutor serial;
    uint64_t out = 0;
    digest_cpu(&t, 1, &out, serial);
    return out;
  }

  // The format, element by element.
  uint64_t naive() const {
    uint64_t total = 0;
    for (int64_t block = 0; block < blocks_of(t.numel); ++block) {
      uint64_t sum = 0;
      for (int64_t i = block * kBlock; i < std::min(t.numel, (block + 1) * kBlock); ++i) sum += word(i) * factor(i % kBlock);
      if (t.kind == DigestKind::bytes && t.rest != nullptr)
        sum += canonical(static_cast<const float*>(t.rest)[block]) * factor(kBlock);
      total += mix(sum + t.key + (t.first_block + static_cast<uint64_t>(block) + 1) * 0x9e3779b97f4a7c15u);
    }
    return total;
  }

 private:
  static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  static uint64_t factor(int64_t i) { return mix(static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15u) | 1; }
  static uint64_t canonical(float x) { return std::isnan(x) ? 0x7fc00000u : float_bits(x); }
  uint64_t word(int64_t i) const {
    if (t.kind == DigestKind::words) return static_cast<const uint32_t*>(t.data)[i];
    if (t.kind == DigestKind::bytes) return static_cast<const uint8_t*>(t.data)[i];
    if (t.kind == DigestKind::split)
      return canonical(split_to_f32(static_cast<const uint16_t*>(t.data)[i], static_cast<const int16_t*>(t.rest)[i]));
    return canonical(load_as_f32(t.data, static_cast<DType>(t.kind), i));
  }
};

TEST(digest, has_the_format_on_every_isa_for_every_kind_and_size) {
  for_each_isa([&](const std::string&) {
    for (const DigestKind kind : kDigestKinds) {
      for (const int64_t numel : {0, 1, 3, 17, 255, 256, 257, 511, 1000, 70001}) {
        const DigestProblem problem(kind, numel, numel % 2, numel % 3 != 0);
        ASSERT_EQ(problem.cpu(), problem.naive()) << static_cast<int>(kind) << ' ' << numel;
      }
    }
  });
}

TEST(digest, does_not_depend_on_threads_and_cuts) {
  std::vector<DigestProblem> problems;
  std::vector<DigestSegment> segments;
  for (const int64_t numel : {0, 100000, 1, 256, 70000}) problems.emplace_back(DigestKind::f32, numel, 0);
  for (const DigestProblem& problem : problems) segments.push_back(problem.t);
  std::vector<uint64_t> out(segments.size());
  ThreadPool pool(3);
  digest_cpu(segments.data(), static_cast<int64_t>(segments.size()), out.data(), pool);
  for (size_t i = 0; i < problems.size(); ++i) EXPECT_EQ(out[i], problems[i].naive());
  const DigestProblem& whole = problems[1];
  uint64_t sum = 0;
  for (int64_t first = 0; first < whole.t.numel; first += 37 * kBlock) {
    DigestProblem part(DigestKind::f32, 0, 0);
    part.t = whole.t;
    part.t.data = static_cast<const float*>(whole.t.data) + first;
    part.t.numel = std::min(37 * kBlock, whole.t.numel - first);
    part.t.first_block += static_cast<uint64_t>(first / kBlock);
    sum += part.cpu();
  }
  EXPECT_EQ(sum, out[1]);
}

TEST(digest, every_bit_of_a_word_and_every_swap_shows) {
  std::vector<float> x(512);
  Random random(3);
  for (float& value : x) value = random.normal();
  const auto digest_of = [&] {
    DigestProblem problem(DigestKind::f32, 0, 0);
    problem.t.data = x.data(), problem.t.numel = 512;
    return problem.cpu();
  };
  const uint64_t before = digest_of();
  for (size_t i = 0; i < x.size(); i += 37) {
    for (int bit = 0; bit < 31; ++bit) {
      const float old = x[i];
      x[i] = bits_float(float_bits(old) ^ (1u << bit));
      EXPECT_NE(digest_of(), before) << i << ' ' << bit;
      x[i] = old;
    }
    std::swap(x[i], x[(i + 256) % 512]);  // of two blocks
    EXPECT_NE(digest_of(), before);
    std::swap(x[i], x[(i + 256) % 512]);
    std::swap(x[i], x[i / 256 * 256 + (i + 1) % 256]);  // within one
    EXPECT_NE(digest_of(), before);
    std::swap(x[i], x[i / 256 * 256 + (i + 1) % 256]);
  }
  x[7] = 0.0f;
  const uint64_t zero = digest_of();
  x[7] = -0.0f;
  EXPECT_NE(digest_of(), zero);
  x[7] = bits_float(0x7fc00001u);
  const uint64_t nan = digest_of();
  x[7] = bits_float(0xffc12345u);
  EXPECT_EQ(digest_of(), nan);
}

TEST(digest, a_split_master_has_the_digest_of_the_master) {
  Random random(4);
  std::vector<float> master(600);
  std::vector<uint16_t> weight(600);
  std::vector<int16_t> rest(600);
  for (size_t i = 0; i < master.size(); ++i) {
    master[i] = random.normal();
    weight[i] = f32_to_bf16(master[i]), rest[i] = split_remainder(master[i]);
  }
  DigestProblem joined(DigestKind::f32, 0, 0), split(DigestKind::split, 0, 0);
  joined.t.data = master.data(), split.t.data = weight.data(), split.t.rest = rest.data();
  joined.t.numel = split.t.numel = 600;
  EXPECT_EQ(split.cpu(), joined.cpu());
}

// A warp whose sums leave out a step.
struct BlockOfHalfSums : HostBlock {
  explicit BlockOfHalfSums(const HostBlock& block) : HostBlock(block) {}
  uint64_t shfl_xor(uint64_t x, int mask) const { return mask == 8 ? 0 : HostBlock::shfl_xor(x, mask); }
};

TEST(digest, cuda_has_the_cpu_bits) {
  for (const DigestKind kind : kDigestKinds) {
    for (const int64_t misalign : {0, 1, 4}) {
      for (const int64_t numel : {int64_t{0}, int64_t{9}, int64_t{2055}, kDigestChunk + 300}) {
        if (kThreadSanitizer && (misalign == 4 || numel > 2055)) continue;
        DigestProblem problem(kind, numel, misalign, numel != 9);
        const DigestProblem other(DigestKind::f32, 1000, 0);
        EXPECT_EQ(digest_cuda_body({DigestSegment{}, problem.t, other.t}),
                  (std::vector<uint64_t>{0, problem.cpu(), other.cpu()}))
            << static_cast<int>(kind) << ' ' << numel << ' ' << misalign;
        for (Buffer& buffer : problem.buffers) EXPECT_TRUE(buffer.sentinels_intact());
        if (numel != 2055) continue;
        EXPECT_NE(digest_cuda_body<BlockOfHalfSums>({problem.t})[0], problem.cpu());
      }
    }
  }
}

}  // namespace
}  // namespace shardcore::testing
