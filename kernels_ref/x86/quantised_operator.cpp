// The operator of quantised.cpp; quantised.py explains arguments and results.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "../torch_operators.h"
#include "machine.h"
#include "quantised.h"

namespace {

namespace at = hpu_duo::stable;
using at::Tensor;
using hpu_duo::bf16;
using hpu_duo::CodeKind;
using hpu_duo::ScaleKind;

constexpr int64_t kPanel = 32;

CodeKind kind_of(const Tensor &codes, bool is_nibbles) {
  if (is_nibbles) return CodeKind::kInt4;
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kFloat8_e4m3fn,
                    "expected codes of int8 or e4m3, got ", codes.scalar_type());
  return codes.scalar_type() == at::kChar ? CodeKind::kInt8 : CodeKind::kFp8;
}

ScaleKind scale_kind_of(const Tensor &scales) {
  switch (scales.scalar_type()) {
    case at::kFloat: return ScaleKind::kFloat;
    case at::kBFloat16: return ScaleKind::kBFloat16;
    case at::kHalf: return ScaleKind::kHalf;
    default: TORCH_CHECK_VALUE(false, "expected scales of float32, bfloat16 or float16, got ", scales.scalar_type());
  }
}

// A weight as the kernel reads it, and its results.
hpu_duo::QuantisedWeight weight_of(const Tensor &codes, const Tensor &scales, const std::optional<Tensor> &zeros,
                                   const std::optional<Tensor> &bias, int64_t group, int64_t packed_inputs,
                                   const Tensor &y) {
  TORCH_CHECK_VALUE(codes.dim() == 4 && codes.is_contiguous(), "expected packed codes, got ", codes.sizes());
  TORCH_CHECK_VALUE(scales.dim() == 3 && scales.is_contiguous(), "expected packed scales, got ", scales.sizes());
  const bool is_nibbles = codes.scalar_type() == at::kShort;
  const int64_t panels = codes.size(0), groups = scales.size(1), out_features = y.size(-1);
  TORCH_CHECK_VALUE(codes.size(1) * (is_nibbles ? 8 : 2) == packed_inputs, "expected weights of ", packed_inputs,
                    " packed inputs, got codes ", codes.sizes());
  TORCH_CHECK_VALUE(packed_inputs % kPanel == 0 && out_features <= kPanel * panels && scales.size(0) == panels &&
                        scales.size(2) == kPanel && group > 0 && groups == (packed_inputs + group - 1) / group &&
                        (groups == 1 || group % kPanel == 0),
                    "expected scales of ", panels, " panels for groups of whole 32 inputs, got ", scales.sizes(),
                    " for groups of ", group);
  TORCH_CHECK_VALUE(!zeros || (zeros->scalar_type() == at::kChar && zeros->sizes() == scales.sizes() &&
                               zeros->is_contiguous()),
                    "expected zero points of int8 like the scales");
  TORCH_CHECK_VALUE(!zeros || codes.scalar_type() != at::kFloat8_e4m3fn, "expected no zero points of e4m3");
  TORCH_CHECK_VALUE(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == kPanel * panels),
                    "expected a packed bias of ", kPanel * panels);
  return {(const uint8_t *)codes.data_ptr(),
          scales.data_ptr(),
          zeros ? zeros->const_data_ptr<int8_t>() : nullptr,
          bias ? bias->const_data_ptr<float>() : nullptr,
          y.data_ptr(),
          out_features,
          groups,
          group,
          kind_of(codes, is_nibbles),
          scale_kind_of(scales)};
}

using Maybe = std::optional<Tensor>;

// The kernels of float32 arithmetic that this machine runs.
const hpu_duo::FloatKernels &kernels_of(std::string_view name) {
  const hpu_duo::FloatKernels *found = hpu_duo::find_float_kernels(name);
  TORCH_CHECK_VALUE(found, "expected best, model, or avx2 or avx512 where the CPU has it, got ", name);
  return *found;
}

std::vector<Tensor> quantised_linears(const Tensor &x, const at::TensorList &codes, const at::TensorList &scales,
                                      const std::vector<Maybe> &zeros, const std::vector<Maybe> &biases,
                                      const std::vector<int64_t> &out_features, const std::vector<int64_t> &groups,
                                      const Maybe &live, std::string_view instructions) {
  const size_t count = codes.size();
  const int64_t inputs = x.size(-1), packed_inputs = (inputs + kPanel - 1) / kPanel * kPanel;
  const bool is_float = x.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(is_float || x.scalar_type() == at::kBFloat16, "expected bfloat16 or float32, got ",
                    x.scalar_type());
  TORCH_CHECK_VALUE(is_float || hpu_duo::machine.has_pairs, "expected a CPU with AVX512-BF16");
  TORCH_CHECK_VALUE(!live || live->scalar_type() == at::kInt, "expected int32 live rows");
  const Tensor rows = inputs == packed_inputs ? x.contiguous() : at::filled_up(x, packed_inputs);
  std::vector<int64_t> shape = x.sizes().vec();
  std::vector<Tensor> results;
  std::vector<hpu_duo::QuantisedWeight> weights;
  for (size_t n = 0; n < count; ++n) {
    shape.back() = out_features[n];
    results.push_back(at::empty(shape, x.options()));
    weights.push_back(weight_of(codes[n], scales[n], zeros[n], biases[n], groups[n], packed_inputs, results.back()));
  }
  const auto run = [&](const auto &kernel, const auto *inputs_of_rows) {
    kernel(inputs_of_rows, weights.data(), (int64_t)count, live ? live->const_data_ptr<int>() : nullptr,
           rows.numel() / packed_inputs, packed_inputs, at::get_num_threads());
  };
  if (is_float)
    run(kernels_of(instructions).quantised_linears, rows.const_data_ptr<float>());
  else
    run(hpu_duo::quantised_linears, (const bf16 *)rows.data_ptr());
  return results;
}

Tensor quantised_linear(const Tensor &x, const Tensor &codes, const Tensor &scales, const Maybe &zeros,
                        const Maybe &bias, int64_t out_features, int64_t group, const Maybe &live,
                        std::string_view instructions) {
  return std::move(
      quantised_linears(x, {codes}, {scales}, {zeros}, {bias}, {out_features}, {group}, live, instructions)[0]);
}

// A weight of int8, and its results.
hpu_duo::Int8Weight int8_weight_of(const Tensor &codes, const Tensor &scales, const Tensor &sums, const Maybe &bias,
                                   int64_t packed_inputs, const Tensor &y) {
  const int64_t panels = codes.size(0), padded = kPanel * panels;
  TORCH_CHECK_VALUE(codes.dim() == 4 && codes.is_contiguous() && codes.scalar_type() == at::kChar &&
                        codes.size(1) * 4 == packed_inputs && y.size(-1) <= padded,
                    "expected packed codes of int8 for ", packed_inputs, " packed inputs, got ", codes.scalar_type(),
                    " ", codes.sizes());
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.numel() == padded && sums.scalar_type() == at::kInt &&
                        sums.numel() == padded && (!bias || (bias->scalar_type() == at::kFloat && bias->numel() == padded)),
                    "expected ", padded, " scales and biases of float32 and sums of int32");
  return {codes.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), sums.const_data_ptr<int>(),
          bias ? bias->const_data_ptr<float>() : nullptr, y.data_ptr(), y.size(-1)};
}

std::vector<Tensor> int8_linears(const Tensor &x, const at::TensorList &codes, const at::TensorList &scales,
                                 const at::TensorList &sums, const std::vector<Maybe> &biases,
                                 const std::vector<int64_t> &out_features, const Maybe &input_scale, const Maybe &live,
                                 std::string_view instructions) {
  const size_t count = codes.size();
  const int64_t inputs = x.size(-1), packed_inputs = (inputs + kPanel - 1) / kPanel * kPanel;
  const bool is_bfloat16 = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK_VALUE((is_bfloat16 || x.scalar_type() == at::kFloat) && inputs <= 1 << 16,
                    "expected bfloat16 or float32 of at most 65,536 inputs, got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK_VALUE(!live || live->scalar_type() == at::kInt, "expected int32 live rows");
  TORCH_CHECK_VALUE(!input_scale || (input_scale->scalar_type() == at::kFloat && input_scale->numel() == 1),
                    "expected one scale of inputs, float32");
  const Tensor rows = inputs == packed_inputs ? x.contiguous() : at::filled_up(x, packed_inputs);
  std::vector<int64_t> shape = x.sizes().vec();
  std::vector<Tensor> results;
  std::vector<hpu_duo::Int8Weight> weights;
  for (size_t n = 0; n < count; ++n) {
    shape.back() = out_features[n];
    results.push_back(at::empty(shape, x.options()));
    weights.push_back(int8_weight_of(codes[n], scales[n], sums[n], biases[n], packed_inputs, results.back()));
  }
  const float *scale = input_scale ? input_scale->const_data_ptr<float>() : nullptr;
  const bool has_vnni = instructions == "best" && hpu_duo::have_vnni();
  const auto kernel = has_vnni ? hpu_duo::lanes16_vnni::int8_linears : kernels_of(instructions).int8_linears;
  kernel({rows.data_ptr(), is_bfloat16, scale, packed_inputs}, weights.data(), (int64_t)count,
         live ? live->const_data_ptr<int>() : nullptr, rows.numel() / packed_inputs, at::get_num_threads());
  return results;
}

Tensor int8_linear(const Tensor &x, const Tensor &codes, const Tensor &scales, const Tensor &sums, const Maybe &bias,
                   int64_t out_features, const Maybe &input_scale, const Maybe &live, std::string_view instructions) {
  return std::move(
      int8_linears(x, {codes}, {scales}, {sums}, {bias}, {out_features}, input_scale, live, instructions)[0]);
}

const hpu_duo::Operators operators =
    hpu_duo::Operators("hpu_duo_x86_v3")
        .add<quantised_linear>("linear_of_codes(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias,"
                               " int out_features, int group, Tensor? live, int instructions=0) -> Tensor")
        .add_lists<quantised_linears>("linears_of_codes(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros,"
                                      " Tensor?[] bias, int[] out_features, int[] group, Tensor? live,"
                                      " int instructions=0) -> Tensor[]")
        .add<int8_linear>("int8_linear(Tensor x, Tensor codes, Tensor scales, Tensor sums, Tensor? bias,"
                          " int out_features, Tensor? input_scale, Tensor? live, int instructions=0) -> Tensor")
        .add_lists<int8_linears>("int8_linears(Tensor x, Tensor[] codes, Tensor[] scales, Tensor[] sums,"
                                 " Tensor?[] biases, int[] out_features, Tensor? input_scale, Tensor? live,"
                                 " int instructions=0) -> Tensor[]");

}  // namespace
