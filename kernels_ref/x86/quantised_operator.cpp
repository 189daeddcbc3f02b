// The operator of quantised.cpp; quantised.py explains arguments and results.

#include <cstdint>
#include <optional>
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
  TORCH_CHECK_VALUE(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == kPanel * panels),
                    "expected a packed bias of ", kPanel * panels);
  return {(const uint8_t *)codes.data_ptr(),
          scales.data_ptr(),
          zeros ? zeros->const_data_ptr<int8_t>() : nullptr,
          bias ? bias->const_data_ptr<float>() : nullptr,
          (bf16 *)y.data_ptr(),
          out_features,
          groups,
          group,
          kind_of(codes, is_nibbles),
          scale_kind_of(scales)};
}

using Maybe = std::optional<Tensor>;

std::vector<Tensor> quantised_linears(const Tensor &x, const at::TensorList &codes, const at::TensorList &scales,
                                      const std::vector<Maybe> &zeros, const std::vector<Maybe> &biases,
                                      const std::vector<int64_t> &out_features, const std::vector<int64_t> &groups,
                                      const Maybe &live) {
  const size_t count = codes.size();
  const int64_t inputs = x.size(-1), packed_inputs = (inputs + kPanel - 1) / kPanel * kPanel;
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, "expected bfloat16, got ", x.scalar_type());
  TORCH_CHECK_VALUE(hpu_duo::machine.has_pairs, "expected a CPU with AVX512-BF16");
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
  hpu_duo::quantised_linears((const bf16 *)rows.data_ptr(), weights.data(), (int64_t)count,
                             live ? live->const_data_ptr<int>() : nullptr, rows.numel() / packed_inputs, packed_inputs,
                             at::get_num_threads());
  return results;
}

Tensor quantised_linear(const Tensor &x, const Tensor &codes, const Tensor &scales, const Maybe &zeros,
                        const Maybe &bias, int64_t out_features, int64_t group, const Maybe &live) {
  return std::move(quantised_linears(x, {codes}, {scales}, {zeros}, {bias}, {out_features}, {group}, live)[0]);
}

const hpu_duo::Operators operators =
    hpu_duo::Operators("hpu_duo_x86_v3")
        .add<quantised_linear>("quantised_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias,"
                               " int out_features, int group, Tensor? live) -> Tensor")
        .add_lists<quantised_linears>("quantised_linears(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros,"
                                      " Tensor?[] bias, int[] out_features, int[] group, Tensor? live) -> Tensor[]");

}  // namespace
