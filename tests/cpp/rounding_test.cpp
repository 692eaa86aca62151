// Stochastic rounding: unbiased, keyed by (seed, step, parameter, element in the whole parameter), equal for every shard.
#include <algorithm>
#include <set>

#include "cpp/adam_problem.h"

namespace shardcore::testing {
namespace {

AdamHyper hyper_with(uint64_t seed, int64_t step) {
  AdamHyper h;
  h.lr = 1e-3, h.step = step, h.seed = seed, h.stochastic_rounding = true;
  return h;
}

// The parameter's bits after one step on a fixed problem, with the given key and pieces [0, cut), [cut, numel).
std::vector<uint16_t> stepped(uint64_t seed, int64_t step, uint64_t param_index, int64_t first_element, int64_t cut,
                              const std::string& isa) {
  constexpr int64_t kNumel = 3000;
  set_cpu_isa(isa);
  AdamProblem problem({{kNumel, DType::bf16, DType::f32}}, 50);
  std::vector<AdamSegment>& list = problem.segments();
  AdamSegment& whole = list[0];
  whole.param_index = param_index;
  whole.first_element = first_element;
  auto* const exp_avg = static_cast<float*>(whole.exp_avg);
  auto* const exp_avg_sq = static_cast<float*>(whole.exp_avg_sq);
  std::fill(exp_avg, exp_avg + kNumel, 0.0f);
  auto* const param = static_cast<uint16_t*>(whole.param);
  AdamSegment rest = whole;
  rest.param = param + cut;
  rest.grad = static_cast<const float*>(rest.grad) + cut;
  rest.exp_avg = exp_avg + cut, rest.exp_avg_sq = exp_avg_sq + cut, rest.first_element += cut, rest.numel -= cut;
  whole.numel = cut;
  list.push_back(rest);
  // Bias correction depends on the step: switch it off, so that only the random bits differ between steps.
  AdamHyper h = hyper_with(seed, step);
  h.bias_correction = false;
  problem.run_cpu({h});
  return {param, param + kNumel};
}

TEST(rounding, is_keyed_by_seed_step_parameter_and_element) {
  const std::string isa = cpu_isa_name(cpu_isa());
  const auto base = stepped(1, 1, 0, 0, 0, isa);
  EXPECT_EQ(stepped(1, 1, 0, 0, 0, isa), base);
  for (const auto& other : {stepped(2, 1, 0, 0, 0, isa), stepped(1, 2, 0, 0, 0, isa), stepped(1, 1, 1, 0, 0, isa),
                            stepped(1, 1, 0, 256, 0, isa), stepped(1, 1, 0, 1, 0, isa)}) {
    EXPECT_NE(other, base);
  }
  constexpr int64_t kLarge = int64_t{1} << 32;  // each number in all its bits
  for (const auto& other :
       {stepped(kLarge + 1, 1, 0, 0, 0, isa), stepped(1, kLarge + 1, 0, 0, 0, isa), stepped(1, 1, 1 << 16, 0, 0, isa),
        stepped(1, 1, kLarge, 0, 0, isa), stepped(1, 1, 0, kLarge, 0, isa), stepped(1, 1, 0, 256 * kLarge, 0, isa)}) {
    EXPECT_NE(other, base);
  }
}

TEST(rounding, does_not_depend_on_the_shard_or_isa) {
  const std::string saved = cpu_isa_name(cpu_isa());
  const auto base = stepped(3, 5, 2, 40, 0, saved);
  for (const std::string& isa : cpu_isas()) {
    for (const int64_t cut : {0, 1, 255, 256, 300, 1024, 2999, 3000}) {
      EXPECT_EQ(stepped(3, 5, 2, 40, cut, isa), base) << isa << " cut at " << cut;
    }
  }
  set_cpu_isa(saved);
}

// How far from its fraction the worst of 60 values is rounded up, in standard deviations.
template <typename Round>
double worst_bias(const Round& round) {
  constexpr int kTrials = 1 << 14;
  double worst = 0;
  Random random(51);
  for (int n = 0; n < 60; ++n) {
    const uint32_t fraction = n < 3 ? static_cast<uint32_t>(n) * 0x7fffu : random.bits() & 0xffffu;
    const float x = bits_float(0x3f800000u | (random.bits() & 0x400000u) | fraction);
    const uint16_t low = static_cast<uint16_t>(float_bits(x) >> 16);
    int up = 0;
    for (int64_t i = 0; i < kTrials; ++i) {
      const uint64_t key = rounding_block_key(child_key(99, static_cast<uint64_t>(n)), i);
      const uint16_t rounded = round(x, key, i);
      EXPECT_TRUE(rounded == low || rounded == low + 1);
      up += rounded != low;
    }
    const double p = fraction / 65536.0;
    worst = std::max(worst, std::fabs(up - kTrials * p) / (std::sqrt(kTrials * p * (1 - p)) + 1e-9));
  }
  return worst;
}

TEST(rounding, is_unbiased) {
  EXPECT_LT(worst_bias(f32_to_bf16_stochastic), 4.5);
  EXPECT_GT(worst_bias([](float x, uint64_t, int64_t) { return f32_to_bf16(x); }), 4.5) << "the twin that rounds to nearest";
}

TEST(rounding, bits_are_uniform_and_neighbours_independent) {
  constexpr int kBlocks = 400;
  constexpr double kCount = kBlocks * 256.0;
  int set[32] = {}, agree_lane[32] = {}, agree_block[32] = {}, agree_step[32] = {}, agree_moments[32] = {};
  for (uint64_t block = 0; block < kBlocks; ++block) {
    const uint64_t key = child_key(child_key(child_key(child_key(0, 0), 1), 0), block);
    const uint64_t next_block = child_key(child_key(child_key(child_key(0, 0), 1), 0), block + 1);
    const uint64_t next_step = child_key(child_key(child_key(child_key(0, 0), 2), 0), block);
    for (uint32_t lane = 0; lane < 256; ++lane) {
      const uint32_t r = random32(key, lane);
      ASSERT_EQ(random16(key, lane), r >> 16);
      const uint32_t lane_xor = ~(r ^ random32(key, (lane + 1) % 256));
      const uint32_t block_xor = ~(r ^ random32(next_block, lane)), step_xor = ~(r ^ random32(next_step, lane));
      const uint32_t moments_xor = ~(r ^ (r >> 12 | r << 20));  // bits of equal weight in the noises of both 8-bit moments
      for (int bit = 0; bit < 32; ++bit) {
        set[bit] += static_cast<int>(r >> bit & 1u);
        agree_lane[bit] += static_cast<int>(lane_xor >> bit & 1u);
        agree_block[bit] += static_cast<int>(block_xor >> bit & 1u);
        agree_step[bit] += static_cast<int>(step_xor >> bit & 1u);
        agree_moments[bit] += static_cast<int>(moments_xor >> bit & 1u);
      }
    }
  }
  for (int bit = 0; bit < 32; ++bit) {
    for (const int count : {set[bit], agree_lane[bit], agree_block[bit], agree_step[bit], agree_moments[bit]}) {
      EXPECT_NEAR(count, kCount / 2, 4.5 * std::sqrt(kCount) / 2) << "bit " << bit;
    }
  }
}

TEST(rounding, keeps_infinities_and_exact_values) {
  for (uint32_t noise : {0u, 1u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(f32_to_bf16_plus(kInf, noise), 0x7f80);
    EXPECT_EQ(f32_to_bf16_plus(-kInf, noise), 0xff80);
    EXPECT_EQ(f32_to_bf16_plus(1.0f, noise), 0x3f80);
    EXPECT_EQ(f32_to_bf16_plus(0.0f, noise), 0);
  }
}

}  // namespace
}  // namespace shardcore::testing
