// encode_moment, decode_moment, split_master, join_split: reduced states from and to float32, for state dicts. On the CPU.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "adam/state_codec.h"
#include "bind/checks.h"
#include "core/fp_env.h"
#include "core/tile.h"

namespace shardcore::bind {
namespace {

constexpr int64_t kGrainBlocks = 64;

// States are the user's to edit.
void check_state(const Where& where, const at::Tensor& tensor, std::initializer_list<at::ScalarType> dtypes) {
  check_layout(where, tensor, at::Device(at::kCPU));
  if (std::find(dtypes.begin(), dtypes.end(), tensor.scalar_type()) == dtypes.end()) {
    std::ostringstream expected;
    for (const at::ScalarType dtype : dtypes) expected << (dtype == *dtypes.begin() ? "" : " or ") << dtype;
    type_error(where, "dtype ", tensor.scalar_type(), "; expected ", expected.str());
  }
}

at::Tensor empty(int64_t numel, at::ScalarType dtype) { return at::empty({numel}, at::TensorOptions().dtype(dtype)); }

// block(first, n, index) for every 256-element block.
template <typename Block>
void for_each_block(int64_t numel, const Block& block) {
  const py::gil_scoped_release no_gil;
  torch_executor().parallel_for(0, blocks_of(numel), kGrainBlocks, [&](int64_t begin, int64_t end) {
    const SubnormalGuard guard;
    for (int64_t i = begin; i < end; ++i) block(i * kBlock, std::min(kBlock, numel - i * kBlock), i);
  });
}

template <typename Code, typename Encode>
void encode(const float* x, Code* codes, float* scales, int64_t numel, const Encode& encode_one) {
  for_each_block(numel, [&](int64_t first, int64_t n, int64_t index) {
    const float scale = scales[index] = block_scale(x + first, n);
    const float inv_scale = 1.0f / scale;
    for (int64_t i = first; i < first + n; ++i) codes[i] = encode_one(x[i], inv_scale, kNearest);
  });
}

template <typename Code, typename Decode>
void decode(const Code* codes, const float* scales, float* x, int64_t numel, const Decode& decode_one) {
  for_each_block(numel, [&](int64_t first, int64_t n, int64_t index) {
    for (int64_t i = first; i < first + n; ++i) x[i] = decode_one(codes[i], scales[index]);
  });
}

py::tuple encode_moment(const at::Tensor& values, at::ScalarType dtype) {
  check_state({"encode_moment", "values"}, values, {at::kFloat});
  const at::Tensor codes = empty(values.numel(), dtype);
  const at::Tensor scales = empty(blocks_of(values.numel()), at::kFloat);
  const auto* const x = static_cast<const float*>(values.const_data_ptr());
  auto* const s = static_cast<float*>(scales.data_ptr());
  if (dtype == at::kChar) {
    encode(x, static_cast<int8_t*>(codes.data_ptr()), s, values.numel(),
           [](float value, float inv, uint32_t bits) { return encode_exp_avg(value, inv, bits); });
  } else {
    encode(x, static_cast<uint8_t*>(codes.data_ptr()), s, values.numel(),
           [](float value, float inv, uint32_t bits) { return encode_exp_avg_sq(value, inv, bits); });
  }
  return py::make_tuple(codes, scales);
}

at::Tensor decode_moment(const at::Tensor& codes, const at::Tensor& scales) {
  check_state({"decode_moment", "codes"}, codes, {at::kChar, at::kByte});
  check_state({"decode_moment", "scales"}, scales, {at::kFloat});
  if (scales.numel() != blocks_of(codes.numel())) {
    value_error({"decode_moment", "scales"}, scales.numel(), " elements; expected ", blocks_of(codes.numel()),
                " (one for 256 elements of codes)");
  }
  const at::Tensor values = empty(codes.numel(), at::kFloat);
  const auto* const s = static_cast<const float*>(scales.const_data_ptr());
  auto* const x = static_cast<float*>(values.data_ptr());
  if (codes.scalar_type() == at::kChar) {
    decode(static_cast<const int8_t*>(codes.const_data_ptr()), s, x, codes.numel(),
           [](int8_t code, float scale) { return decode_exp_avg(code, scale); });
  } else {
    decode(static_cast<const uint8_t*>(codes.const_data_ptr()), s, x, codes.numel(),
           [](uint8_t code, float scale) { return decode_exp_avg_sq(code, scale); });
  }
  return values;
}

py::tuple split_master(const at::Tensor& master) {
  check_state({"split_master", "master"}, master, {at::kFloat});
  const at::Tensor weight = empty(master.numel(), at::kBFloat16), remainder = empty(master.numel(), at::kShort);
  const auto* const x = static_cast<const float*>(master.const_data_ptr());
  auto* const w = static_cast<uint16_t*>(weight.data_ptr());
  auto* const r = static_cast<int16_t*>(remainder.data_ptr());
  for_each_block(master.numel(), [&](int64_t first, int64_t n, int64_t) {
    for (int64_t i = first; i < first + n; ++i) w[i] = f32_to_bf16(x[i]), r[i] = split_remainder(x[i]);
  });
  return py::make_tuple(weight, remainder);
}

at::Tensor join_split(const at::Tensor& weight, const at::Tensor& remainder) {
  check_state({"join_split", "weight"}, weight, {at::kBFloat16});
  check_state({"join_split", "remainder"}, remainder, {at::kShort});
  check_numel({"join_split", "remainder"}, remainder, weight.numel(), "weight");
  const at::Tensor master = empty(weight.numel(), at::kFloat);
  const auto* const w = static_cast<const uint16_t*>(weight.const_data_ptr());
  const auto* const r = static_cast<const int16_t*>(remainder.const_data_ptr());
  auto* const x = static_cast<float*>(master.data_ptr());
  for_each_block(weight.numel(), [&](int64_t first, int64_t n, int64_t) {
    for (int64_t i = first; i < first + n; ++i) x[i] = split_to_f32(w[i], r[i]);
  });
  return master;
}

}  // namespace

void bind_moments(py::module_& module) {
  module.def("encode_moment", &encode_moment, py::arg("values"), py::arg("dtype"));
  module.def("decode_moment", &decode_moment, py::arg("codes"), py::arg("scales"));
  module.def("split_master", &split_master, py::arg("master"));
  module.def("join_split", &join_split, py::arg("weight"), py::arg("remainder"));
}

}  // namespace shardcore::bind
