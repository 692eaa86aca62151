// Conversions: exhaustive over 16-bit values, and rounding against an independent oracle that searches the neighbours.
#include "core/convert.h"

#include <algorithm>

#include "core/executor.h"
#include "cpp/common.h"
#include "elementwise/element_cpu.h"

namespace shardcore::testing {
namespace {

// The value of a 16-bit pattern, from the definition of the format.
double value_of(uint16_t h, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (h >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = h & ((1 << mantissa_bits) - 1);
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Rounds to nearest by comparing distances to the two neighbours; `ties_away` or ties to even mantissa.
uint16_t round_oracle(float x, int exponent_bits, int mantissa_bits, bool ties_away) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  const auto infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  uint16_t low = 0, high = infinity;  // patterns of a sign are ordered as their values
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (value_of(middle, exponent_bits, mantissa_bits) <= magnitude ? low : high) = middle;
  }
  const double below = value_of(low, exponent_bits, mantissa_bits);
  // Infinity stands where the next number of that spacing would be.
  const double above = high == infinity ? 2 * below - value_of(static_cast<uint16_t>(low - 1), exponent_bits, mantissa_bits)
                                        : value_of(high, exponent_bits, mantissa_bits);
  const double to_low = magnitude - below, to_high = above - magnitude;
  const bool up = std::isinf(magnitude) || to_high < to_low || (to_high == to_low && (ties_away || low % 2 == 1));
  return static_cast<uint16_t>(sign | (up ? high : low));
}

TEST(convert, bf16_and_f16_values_are_exact) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const auto bits = static_cast<uint16_t>(h);
    const double bf16 = value_of(bits, 8, 7), f16 = value_of(bits, 5, 10);
    const float got_bf16 = bf16_to_f32(bits), got_f16 = f16_to_f32(bits);
    if (std::isnan(bf16)) {
      ASSERT_TRUE(std::isnan(got_bf16)) << h;
    } else {
      ASSERT_EQ(float_bits(static_cast<float>(bf16)), float_bits(got_bf16)) << h;
    }
    if (std::isnan(f16)) {
      ASSERT_TRUE(std::isnan(got_f16)) << h;
    } else {
      ASSERT_EQ(float_bits(static_cast<float>(f16)), float_bits(got_f16)) << h;
    }
  }
}

TEST(convert, round_trip_of_every_16_bit_value) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const auto bits = static_cast<uint16_t>(h);
    if (std::isnan(bf16_to_f32(bits))) {
      ASSERT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(bf16_to_f32(bits))))) << h;
    } else {
      ASSERT_EQ(f32_to_bf16(bf16_to_f32(bits)), bits);
    }
    if (std::isnan(f16_to_f32(bits))) {
      ASSERT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f16_to_f32(bits))))) << h;
    } else {
      ASSERT_EQ(f32_to_f16(f16_to_f32(bits)), bits);
    }
  }
}

// Every pattern (or every fifth) of the upper 16 bits with lower bits around the places where rounding changes.
template <typename Check>
void for_many_floats(const Check& check) {
  Random random(1);
  for (uint32_t high = 0; high < 65536; high += kSlow ? 5 : 1) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u,
                               0xefffu, 0xf000u, 0xffffu, random.bits() & 0xffffu}) {
      const float x = bits_float(high << 16 | low);
      if (!std::isnan(x)) check(x);
    }
  }
}

TEST(convert, bf16_rounds_to_nearest_ties_away) {
  for_many_floats([](float x) { ASSERT_EQ(f32_to_bf16(x), round_oracle(x, 8, 7, true)) << std::hexfloat << x; });
}

TEST(convert, f16_rounds_to_nearest_ties_to_even) {
  for_many_floats([](float x) { ASSERT_EQ(f32_to_f16(x), round_oracle(x, 5, 10, false)) << std::hexfloat << x; });
}

TEST(convert, the_oracle_rejects_other_roundings) {
  int even_bf16 = 0, truncated_f16 = 0;
  for_many_floats([&](float x) {
    even_bf16 += round_oracle(x, 8, 7, false) != f32_to_bf16(x);
    truncated_f16 += static_cast<uint16_t>(float_bits(x) >> 13) != f32_to_f16(x);
  });
  EXPECT_GT(even_bf16, 1000);
  EXPECT_GT(truncated_f16, 1000);
}

TEST(convert, every_nan_stays_nan) {
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (int bit = 0; bit < 23; ++bit) {
      const float nan = bits_float(sign | 0x7f800000u | (1u << bit));
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16_plus(nan, 0xffffu))));
    }
    const float all = bits_float(sign | 0x7fffffffu);
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(all))));
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(all))));
  }
}

TEST(convert, cast_of_a_list_is_the_same_on_every_isa) {
  Random random(2);
  for_each_isa([&](const std::string&) {
    for (const DType from : kDTypes) {
      for (const DType to : kDTypes) {
        for (const int64_t n : {0, 1, 7, 15, 16, 17, 31, 33, 35, 255, 256, 257, 1000}) {
          for (const int64_t misalign : {0, 1, 3}) {
            Buffer src(n * itemsize(from), misalign * itemsize(from));
            Buffer dst(n * itemsize(to), misalign * itemsize(to));
            for (int64_t i = 0; i < n; ++i) store_from_f32(src.data(), from, i, random.with_specials());
            const ElementSegment segments[] = {assignment(nullptr, to, nullptr, from, 0),
                                               assignment(dst.data(), to, src.data(), from, n)};
            SerialExecutor executor;
            update_elements_cpu(segments, 2, kAssign, executor);
            for (int64_t i = 0; i < n; ++i) {
              Buffer expected(4, 0);
              store_from_f32(expected.data(), to, 0, load_as_f32(src.data(), from, i));
              const float want = load_as_f32(expected.data(), to, 0), got = load_as_f32(dst.data(), to, i);
              ASSERT_TRUE(float_bits(want) == float_bits(got) || (std::isnan(want) && std::isnan(got))) << i << " of " << n;
            }
            ASSERT_TRUE(dst.sentinels_intact());
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace shardcore::testing
