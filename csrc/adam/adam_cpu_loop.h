// The CPU loop of Adam, compiled once per instruction set by csrc/isa.
//
// The plain loop vectorizes; its tail is the compiler's scalar copy of the same operations, so sizes and alignments do not
// show in the bits. Weights, gradients and 8-bit moments that are not float32 go through 256-element tiles that stay in the
// first-level cache. What limits the speed then: docs/studies/.
#include <cstring>

#include "adam/adam_cpu.h"
#include "adam/adam_math.h"
#include "adam/state_codec.h"
#include "core/tile.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

// Where each stream of a step is prefetch_elements() after the start of a loop. While the arithmetic waits for its roots and
// divisions the hardware's prefetchers fall behind, so for each cache line that a loop updates it prefetches the line so many
// elements later (prefetching past the end is no error). Prefetching a whole tile at once gains less, and costs time where all
// is in cache (docs/studies/adam_from_memory.md has the figures).
struct Ahead {
  struct Stream {
    intptr_t start;
    int64_t itemsize;
  } streams[5];
};

// first: the element of the segment at which the loop starts.
SHARDCORE_HD Ahead ahead_of(const AdamSegment& t, int64_t first) {
  const int64_t from = first + prefetch_elements();
  const auto stream = [&](const void* data, int64_t size) {
    return Ahead::Stream{reinterpret_cast<intptr_t>(data) + from * size, size};
  };
  const Ahead::Stream param = stream(t.param, itemsize(t.param_dtype));
  const bool master = t.master_kind != Master::none;
  return {{stream(t.grad, itemsize(t.grad_dtype)), param, stream(t.exp_avg, itemsize(t.state_dtype)),
           stream(t.exp_avg_sq, itemsize(t.state_dtype)),
           master ? stream(t.master, t.master_kind == Master::f32 ? 4 : 2) : param}};
}

// Always inline: GCC 12 drops calls of functions that only prefetch.
SHARDCORE_HD void prefetch(const Ahead& ahead, int64_t i) {
  for (const Ahead::Stream& stream : ahead.streams)
    __builtin_prefetch(reinterpret_cast<const void*>(stream.start + i * stream.itemsize));
}

// Calls element(i) for each i < n, a cache line of float32 at a time; prefetches before each.
template <typename Element>
SHARDCORE_HD void for_each_element(const Ahead& ahead, int64_t n, const Element& element) {
  constexpr int64_t kLine = 64 / sizeof(float);
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    prefetch(ahead, i);
    for (int64_t j = i; j < i + kLine; ++j) element(j);
  }
  for (; i < n; ++i) element(i);
}

template <bool kL2, bool kAmsgrad>
void run(const AdamScalars& scalars, const Ahead& ahead, const float* SHARDCORE_RESTRICT g, float* SHARDCORE_RESTRICT p,
         float* SHARDCORE_RESTRICT m, float* SHARDCORE_RESTRICT v, float* SHARDCORE_RESTRICT vmax, int64_t n) {
  const AdamScalars s = scalars;  // a copy: stores to p, m, v cannot alias it
  for_each_element(ahead, n,
                   [&](int64_t i) { adam_element<kL2, kAmsgrad>(s, g[i], p[i], m[i], v[i], kAmsgrad ? vmax + i : nullptr); });
}

using Run = void (*)(const AdamScalars&, const Ahead&, const float*, float*, float*, float*, float*, int64_t);

Run choose_run(bool l2, bool amsgrad) {
  if (l2) return amsgrad ? run<true, true> : run<true, false>;
  return amsgrad ? run<false, true> : run<false, false>;
}

// Elements of a 256-element block of the parameter, which share a key of random bits.
struct Lanes {
  uint64_t block_key;
  uint32_t first;
};

// Calls piece(lanes, start, count) for the parts of a tile that lie in one such block: a shard's tiles may start anywhere in
// them.
template <typename Piece>
void for_each_lanes(uint64_t key, int64_t element, uint32_t n, const Piece& piece) {
  for (uint32_t start = 0, count = 0; start < n; start += count) {
    const Lanes lanes{rounding_block_key(key, element + start), static_cast<uint32_t>((element + start) & (kBlock - 1))};
    const uint32_t left = static_cast<uint32_t>(kBlock) - lanes.first;
    count = n - start < left ? n - start : left;
    piece(lanes, start, count);
  }
}

// bfloat16 moments, in one loop: the conversions run while the formula waits for its root and its division.
template <bool kL2>
void run_bf16(const AdamScalars& scalars, const Ahead& ahead, const Lanes& lanes, const float* SHARDCORE_RESTRICT g,
              float* SHARDCORE_RESTRICT p, uint16_t* SHARDCORE_RESTRICT exp_avg, uint16_t* SHARDCORE_RESTRICT exp_avg_sq,
              uint32_t n) {
  const AdamScalars s = scalars;
  const Lanes at = lanes;
  for_each_element(ahead, n, [&](int64_t i) {
    float m = bf16_to_f32(exp_avg[i]), v = bf16_to_f32(exp_avg_sq[i]);
    adam_element<kL2, false>(s, g[i], p[i], m, v, nullptr);
    exp_avg[i] = f32_to_bf16(m);
    exp_avg_sq[i] = f32_to_bf16_plus(v, random16(at.block_key, at.first + static_cast<uint32_t>(i)));
  });
}

void store_bf16_stochastic(uint16_t* SHARDCORE_RESTRICT dst, const float* SHARDCORE_RESTRICT src, const Lanes& lanes,
                           uint32_t n) {
  const Lanes at = lanes;
  for (uint32_t i = 0; i < n; ++i) dst[i] = f32_to_bf16_plus(src[i], random16(at.block_key, at.first + i));
}

void load_split(float* SHARDCORE_RESTRICT tile, const uint16_t* SHARDCORE_RESTRICT weight,
                const int16_t* SHARDCORE_RESTRICT remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) tile[i] = split_to_f32(weight[i], remainder[i]);
}

void store_split(const float* SHARDCORE_RESTRICT tile, uint16_t* SHARDCORE_RESTRICT weight,
                 int16_t* SHARDCORE_RESTRICT remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    weight[i] = f32_to_bf16(tile[i]);
    remainder[i] = split_remainder(tile[i]);
  }
}

// The 8-bit moments of a block, as float32 from decode to encode.
struct Q8Tiles {
  alignas(64) float m[kBlock];
  alignas(64) float v[kBlock];
  alignas(64) uint32_t bits[kBlock];
  uint32_t m_largest, v_largest;  // magnitude_bits

  void decode(const int8_t* SHARDCORE_RESTRICT m_codes, float m_scale, const uint8_t* SHARDCORE_RESTRICT v_codes, float v_scale,
              uint32_t n) {
    m_largest = v_largest = 0;
    for (uint32_t i = 0; i < n; ++i) m[i] = decode_exp_avg(m_codes[i], m_scale);
    for (uint32_t i = 0; i < n; ++i) v[i] = decode_exp_avg_sq(v_codes[i], v_scale);
  }

  // Elements [start, start + n). Random bits and largest magnitudes are computed in the loop that waits for root and division.
  template <bool kL2>
  void run(const AdamScalars& scalars, const Lanes& lanes, const float* SHARDCORE_RESTRICT g, float* SHARDCORE_RESTRICT p,
           uint32_t start, uint32_t n) {
    const AdamScalars s = scalars;
    const Lanes at = lanes;
    float *const m_part = m + start, *const v_part = v + start;
    uint32_t* const bits_part = bits + start;
    uint32_t m_max = m_largest, v_max = v_largest;
    for (uint32_t i = 0; i < n; ++i) {
      adam_element<kL2, false>(s, g[i], p[i], m_part[i], v_part[i], nullptr);
      bits_part[i] = random32(at.block_key, at.first + i);
      m_max = larger(m_max, magnitude_bits(m_part[i]));
      v_max = larger(v_max, magnitude_bits(v_part[i]));
    }
    m_largest = m_max;
    v_largest = v_max;
  }

  void encode(int8_t* SHARDCORE_RESTRICT m_codes, float& m_scale, uint8_t* SHARDCORE_RESTRICT v_codes, float& v_scale,
              uint32_t n) const {
    m_scale = scale_of(m_largest);
    v_scale = scale_of(v_largest);
    const float m_inv = 1.0f / m_scale, v_inv = 1.0f / v_scale;
    for (uint32_t i = 0; i < n; ++i) m_codes[i] = encode_exp_avg(m[i], m_inv, exp_avg_noise(bits[i]));
    for (uint32_t i = 0; i < n; ++i) v_codes[i] = encode_exp_avg_sq(v[i], v_inv, exp_avg_sq_noise(bits[i]));
  }
};

// Moves a tile by one step; first is its place in the segment.
void run_tile(const AdamSegment& t, const AdamScalars& s, uint64_t moments_key, const float* g, float* weight, int64_t first,
              int64_t n, Q8Tiles& tiles) {
  const bool l2 = s.l2 != 0.0f;
  const auto count = static_cast<uint32_t>(n);
  if (t.state_dtype == StateDType::f32) {
    float* const vmax = t.max_exp_avg_sq;
    choose_run(l2, vmax != nullptr)(s, ahead_of(t, first), g, weight, static_cast<float*>(t.exp_avg) + first,
                                    static_cast<float*>(t.exp_avg_sq) + first, vmax ? vmax + first : nullptr, n);
    return;
  }
  const int64_t element = t.first_element + first;
  if (t.state_dtype == StateDType::bf16) {
    auto* const m = static_cast<uint16_t*>(t.exp_avg) + first;
    auto* const v = static_cast<uint16_t*>(t.exp_avg_sq) + first;
    for_each_lanes(moments_key, element, count, [&](const Lanes& lanes, uint32_t start, uint32_t part) {
      (l2 ? run_bf16<true> : run_bf16<false>)(s, ahead_of(t, first + start), lanes, g + start, weight + start, m + start,
                                              v + start, part);
    });
    return;
  }
  auto* const m_codes = static_cast<int8_t*>(t.exp_avg) + first;
  auto* const v_codes = static_cast<uint8_t*>(t.exp_avg_sq) + first;
  float &m_scale = t.exp_avg_scale[first / kBlock], &v_scale = t.exp_avg_sq_scale[first / kBlock];
  tiles.decode(m_codes, m_scale, v_codes, v_scale, count);
  for_each_lanes(moments_key, element, count, [&](const Lanes& lanes, uint32_t start, uint32_t part) {
    l2 ? tiles.run<true>(s, lanes, g + start, weight + start, start, part)
       : tiles.run<false>(s, lanes, g + start, weight + start, start, part);
  });
  tiles.encode(m_codes, m_scale, v_codes, v_scale, count);
}

// The float32 weights of a tile: where they are, or in `tile`.
float* load_weight(const AdamSegment& t, int64_t i, int64_t n, float* tile) {
  if (t.master_kind == Master::f32) return static_cast<float*>(t.master) + i;
  if (t.master_kind != Master::split) return values_or_tile(t.param, t.param_dtype, i, n, tile);
  load_split(tile, static_cast<const uint16_t*>(t.param) + i, static_cast<const int16_t*>(t.master) + i, n);
  return tile;
}

void store_weight(const AdamSegment& t, int64_t i, int64_t n, const float* weight) {
  if (t.master_kind == Master::split) {
    store_split(weight, static_cast<uint16_t*>(t.param) + i, static_cast<int16_t*>(t.master) + i, n);
  } else if (t.master_kind == Master::f32 || t.param_dtype != DType::f32) {
    store_tile(t.param, t.param_dtype, i, n, weight);
  }
}

// The 16-bit weights of a tile before its step. A float32 master rounds to them: host tiers give them no memory then.
void words_before(const AdamSegment& t, int64_t i, int64_t n, const float* weight, uint16_t* words) {
  if (t.master_kind == Master::f32) {
    store_tile(words, t.param_dtype, 0, n, weight);
  } else {
    std::memcpy(words, static_cast<const uint16_t*>(t.param) + i, static_cast<size_t>(n) * sizeof(uint16_t));
  }
}

// Sets the bits of the words that differ. Few do, so 8 equal ones are passed by at once.
void mark_changed(const uint16_t* before, const uint16_t* after, int64_t n, uint8_t* bits) {
  const auto mark = [&](int64_t i, int64_t count) {
    for (int64_t k = 0; k < count; ++k) bits[i / 8] |= static_cast<uint8_t>((before[i + k] != after[i + k]) << k);
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (std::memcmp(before + i, after + i, 8 * sizeof(uint16_t)) != 0) mark(i, 8);
  }
  mark(i, n - i);
}

}  // namespace

void adam_span(const AdamSegment& t, const AdamScalars& s, int64_t first, int64_t last) {
  Q8Tiles tiles;
  const bool stochastic = rounds_weights_stochastically(t.param_dtype, t.master_kind, s.stochastic_rounding);
  const uint64_t param_key = child_key(s.random_key, t.param_index);
  const uint64_t moments_key = state_key(param_key);
  alignas(64) float grad_tile[kBlock];
  alignas(64) float weight_tile[kBlock];
  alignas(64) uint16_t words[kBlock];
  for_each_tile(first, last, [&](int64_t i, int64_t n) {
    const float* const g = values_or_tile(t.grad, t.grad_dtype, i, n, grad_tile);
    float* const weight = load_weight(t, i, n, weight_tile);
    if (t.changed != nullptr) words_before(t, i, n, weight, words);
    run_tile(t, s, moments_key, g, weight, i, n, tiles);
    if (stochastic) {
      auto* const param = static_cast<uint16_t*>(t.param) + i;
      for_each_lanes(param_key, t.first_element + i, static_cast<uint32_t>(n),
                     [&](const Lanes& lanes, uint32_t start, uint32_t part) {
                       store_bf16_stochastic(param + start, weight + start, lanes, part);
                     });
    } else {
      store_weight(t, i, n, weight);
    }
    if (t.changed != nullptr) mark_changed(words, static_cast<const uint16_t*>(t.param) + i, n, t.changed + i / 8);
  });
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
