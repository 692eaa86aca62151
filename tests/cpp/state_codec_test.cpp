// 8-bit moments and the split master: exact where promised, unbiased, and second moments that decay and grow.
#include "adam/state_codec.h"

#include <algorithm>
#include <functional>

#include "adam/adam_segment.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

constexpr uint32_t kLargestNoise = (1u << kDroppedBits) - 1;

TEST(state_codec, split_is_lossless) {
  Random random(60);
  for (int trial = 0; trial < 200000; ++trial) {
    const uint32_t bits = random.bits();
    const float master = bits_float(bits);
    const float again = split_to_f32(f32_to_bf16(master), split_remainder(master));
    if (std::isnan(master)) {
      ASSERT_TRUE(std::isnan(again)) << std::hex << bits;
    } else {
      ASSERT_EQ(float_bits(again), bits);
    }
  }
  for (const float edge : {0.0f, -0.0f, kInf, -kInf, 3.4028235e38f, 1e-45f, 1.17549435e-38f, 1.00390625f, -1.01171875f}) {
    EXPECT_EQ(float_bits(split_to_f32(f32_to_bf16(edge), split_remainder(edge))), float_bits(edge));
  }
  // The twin with an unsigned remainder is wrong wherever the weight was rounded up.
  const float up = bits_float(0x3f80ffffu);
  EXPECT_NE(bits_float((static_cast<uint32_t>(f32_to_bf16(up)) << 16) + static_cast<uint16_t>(split_remainder(up))), up);
}

// Others may set a weight between two steps: the master stays a number near it, zero included.
TEST(state_codec, any_finite_weight_goes_with_any_remainder) {
  for (const int remainder : {-32768, -5, -1, 0, 1, 32767}) {
    const auto rest = static_cast<int16_t>(remainder);
    for (uint32_t weight = 0; weight < 0x10000u; ++weight) {
      const auto set = static_cast<uint16_t>(weight);
      const float value = bf16_to_f32(set);
      if (!std::isfinite(value)) continue;
      const float master = split_to_f32(set, rest);
      ASSERT_LE(std::fabs(master - value), std::fabs(value) / 128 + 1e-40f) << std::hex << weight << " " << remainder;
    }
    for (const uint16_t zero : {uint16_t{0}, uint16_t{0x8000}}) {
      const float sum = bits_float((static_cast<uint32_t>(zero) << 16) + static_cast<uint32_t>(remainder));
      EXPECT_EQ(std::isnan(sum), remainder < 0);  // the twin without the rule
    }
  }
}

// CUDA's way to code and decode, for every code and around every code.
TEST(state_codec, scaling_has_the_same_bits) {
  Random random(61);
  for (const int bias : {kExpAvgBias, kExpAvgSqBias}) {
    for (uint32_t code = 0; code <= static_cast<uint32_t>(bias << 3) + 8; ++code) {
      const float x = small_float(code << kDroppedBits, bias);
      ASSERT_EQ(float_bits(small_float_by_scaling(code << kDroppedBits, bias)), float_bits(x)) << code;
      for (int trial = 0; trial < 2000; ++trial) {
        const uint32_t noise = trial % 4 == 0 ? (trial % 8 == 0 ? 0 : kLargestNoise) : random.bits() & kLargestNoise;
        const float y = bits_float(float_bits(x) + (trial % 3 == 0 ? static_cast<uint32_t>(trial % 7) : random.bits() >> 11));
        ASSERT_EQ(wide_code_by_scaling(y, bias, noise) >> kDroppedBits, static_cast<uint32_t>(small_code(y, bias, noise)))
            << y << " " << noise;
      }
    }
    for (int trial = 0; trial < 200000; ++trial) {
      const float y = bits_float(random.bits() & 0x7fffffffu);  // all magnitudes, infinity and NaN
      const uint32_t noise = random.bits() & kLargestNoise;
      ASSERT_EQ(wide_code_by_scaling(y, bias, noise) >> kDroppedBits, static_cast<uint32_t>(small_code(y, bias, noise)))
          << y << " " << noise;
    }
  }
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const float scale = std::ldexp(1.0f, exponent);
    EXPECT_EQ(inverse_of_scale(scale), 1.0f / scale);
  }
  EXPECT_TRUE(std::isnan(inverse_of_scale(scale_of(0x7f800000u))));
}

// What was stored is stored again without change: state dicts travel as float32.
TEST(state_codec, codes_survive_a_trip_through_float32) {
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const float scale = std::ldexp(1.0f, exponent);
    const float inv = 1.0f / scale;
    for (int code = -120; code <= 120; ++code) {
      const float x = decode_exp_avg(static_cast<int8_t>(code), scale);
      if (std::fabs(x) < 1.2e-38f && code != 0) continue;  // subnormal in float32: too few bits are left
      ASSERT_EQ(encode_exp_avg(x, inv, kNearest), code) << scale;
    }
    for (int code = 0; code <= 248; ++code) {
      const float x = decode_exp_avg_sq(static_cast<uint8_t>(code), scale);
      if (x < 1.2e-38f && code != 0) continue;
      ASSERT_EQ(encode_exp_avg_sq(x, inv, kNearest), code) << scale;
    }
    EXPECT_EQ(decode_exp_avg(120, scale), scale);
    EXPECT_EQ(decode_exp_avg(-120, scale), -scale);
    EXPECT_EQ(decode_exp_avg_sq(248, scale), scale);
  }
}

TEST(state_codec, codes_are_in_order_and_the_next_ones_are_never_passed) {
  for (int code = 0; code < 248; ++code) {
    const float low = decode_exp_avg_sq(static_cast<uint8_t>(code), 1.0f);
    const float high = decode_exp_avg_sq(static_cast<uint8_t>(code + 1), 1.0f);
    ASSERT_LT(low, high);
    for (const float x : {low, low + (high - low) * 0.25f, low + (high - low) * 0.999f}) {
      for (const uint32_t bits : {0u, 1u, kNearest, kLargestNoise}) {
        const int got = encode_exp_avg_sq(x, 1.0f, bits);
        ASSERT_TRUE(got == code || got == code + 1) << code << " became " << got;
        ASSERT_TRUE(x != low || code == 0 || got == code) << "an exact value must not move";
      }
    }
  }
  for (int code = 0; code < 120; ++code) {
    const float low = decode_exp_avg(static_cast<int8_t>(code), 1.0f),
                high = decode_exp_avg(static_cast<int8_t>(code + 1), 1.0f);
    ASSERT_LT(low, high);
    for (const uint32_t bits : {0u, kNearest, kLargestNoise}) {
      const int got = encode_exp_avg(-(low + high) / 2, 1.0f, bits);
      ASSERT_TRUE(got == -code || got == -code - 1);
    }
  }
}

TEST(state_codec, scales_are_the_smallest_powers_of_two_that_fit) {
  Random random(62);
  for (int trial = 0; trial < 200000; ++trial) {
    const uint32_t bits = trial % 3 == 0 ? (random.bits() & 0x7f800000u) : random.bits() & 0x7fffffffu;
    const float largest = bits_float(bits);
    const float scale = scale_of(bits);
    if (!std::isfinite(largest)) {
      ASSERT_TRUE(std::isnan(scale));
      continue;
    }
    int exponent = 0;
    ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << "a power of two";
    ASSERT_TRUE(scale >= largest || scale == std::ldexp(1.0f, 127));
    ASSERT_TRUE(scale < 2 * largest || scale == std::ldexp(1.0f, -126)) << largest;
    ASSERT_TRUE(std::isfinite(1.0f / scale));
  }
}

TEST(state_codec, special_blocks) {
  const float tiny = scale_of(0), nan = scale_of(float_bits(kInf));
  for (const uint32_t bits : {0u, kNearest, kLargestNoise}) {
    EXPECT_EQ(encode_exp_avg(0.0f, 1.0f / tiny, bits), 0);
    EXPECT_EQ(encode_exp_avg_sq(0.0f, 1.0f / tiny, bits), 0);
    EXPECT_EQ(decode_exp_avg(0, tiny), 0.0f);
    EXPECT_NE(encode_exp_avg_sq(1e-30f, 1.0f, bits), 0) << "a second moment must not vanish";
    EXPECT_NE(encode_exp_avg_sq(1e-45f, 1.0f / tiny, bits), 0);
    for (const float x : {1.0f, kInf, -kInf, kNan}) {
      EXPECT_TRUE(std::isnan(decode_exp_avg(encode_exp_avg(x, 1.0f / nan, bits), nan)));
      EXPECT_TRUE(std::isnan(decode_exp_avg_sq(encode_exp_avg_sq(x, 1.0f / nan, bits), nan)));
    }
    EXPECT_EQ(decode_exp_avg(encode_exp_avg(3e38f, std::ldexp(1.0f, -127), bits), std::ldexp(1.0f, 127)),
              std::ldexp(1.0f, 127));
  }
}

// Mean over random bits (all 32 of an element) of what is stored for x, and its standard error.
std::pair<double, double> mean_of(const std::function<float(uint32_t)>& stored) {
  constexpr int kTrials = 1 << 14;
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < kTrials; ++i) {
    const double x = stored(random32(rounding_block_key(7, i), static_cast<uint32_t>(i & 255)));
    sum += x;
    squares += x * x;
  }
  const double mean = sum / kTrials;
  return {mean, std::sqrt(std::max(0.0, squares / kTrials - mean * mean) / kTrials)};
}

TEST(state_codec, rounding_is_unbiased) {
  Random random(63);
  int biased = 0;
  for (int n = 0; n < 200; ++n) {
    const float x = std::ldexp(random.uniform(), -static_cast<int>(random.integer(12)));
    const auto m = mean_of([&](uint32_t bits) { return decode_exp_avg(encode_exp_avg(x, 1.0f, exp_avg_noise(bits)), 1.0f); });
    EXPECT_NEAR(m.first, x, 5 * m.second + 2e-5 * x);
    const float y = std::ldexp(random.uniform() + 0.01f, -static_cast<int>(random.integer(24)));
    const auto v =
        mean_of([&](uint32_t bits) { return decode_exp_avg_sq(encode_exp_avg_sq(y, 1.0f, exp_avg_sq_noise(bits)), 1.0f); });
    EXPECT_NEAR(v.first, y, 5 * v.second + 2e-5 * y);
    // The twin that cuts is biased.
    biased += std::fabs(decode_exp_avg_sq(encode_exp_avg_sq(y, 1.0f, 0), 1.0f) - y) > 5 * v.second + 1e-6 * y;
  }
  EXPECT_GT(biased, 100);
}

// exp_avg_sq at beta2 = 0.999, as float32 keeps it and as `keep` does; the largest ratio between them on the way.
double largest_drift(const std::function<float(float, int64_t)>& keep) {
  double worst = 1.0;
  for (const float target : {4.0f, 0.25f}) {  // grows, then decays
    constexpr int kElements = 512;
    std::vector<double> v(kElements, 1.0);
    double exact = 1.0;
    for (int64_t step = 0; step < 2000; ++step) {
      exact = 0.999 * exact + 0.001 * target;
      double mean = 0;
      for (int i = 0; i < kElements; ++i) {
        const float next = static_cast<float>(0.999 * v[static_cast<size_t>(i)] + 0.001 * target);
        v[static_cast<size_t>(i)] = keep(next, step * kElements + i);
        mean += v[static_cast<size_t>(i)] / kElements;
      }
      worst = std::max({worst, mean / exact, exact / mean});
    }
  }
  return worst;
}

TEST(state_codec, second_moments_grow_and_decay_as_in_float32) {
  const auto bits = [](int64_t i) { return random32(rounding_block_key(11, i), static_cast<uint32_t>(i & 255)); };
  const float scale = 8.0f;  // of another element of the block
  EXPECT_LT(largest_drift([&](float v, int64_t i) { return bf16_to_f32(f32_to_bf16_plus(v, bits(i) >> 16)); }), 1.03);
  EXPECT_LT(largest_drift([&](float v, int64_t i) {
              return decode_exp_avg_sq(encode_exp_avg_sq(v, 1 / scale, exp_avg_sq_noise(bits(i))), scale);
            }),
            1.03);
  // The twins that round to nearest freeze.
  EXPECT_GT(largest_drift([&](float v, int64_t) { return bf16_to_f32(f32_to_bf16(v)); }), 1.5);
  EXPECT_GT(
      largest_drift([&](float v, int64_t) { return decode_exp_avg_sq(encode_exp_avg_sq(v, 1 / scale, kNearest), scale); }),
      1.5);
}

}  // namespace
}  // namespace shardcore::testing
