// The operators of float_codes.cpp; codes.py explains arguments and results.

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "../torch_operators.h"
#include "machine.h"

namespace {

namespace at = hpu_duo::stable;
using at::Tensor;
using Maybe = std::optional<Tensor>;

const hpu_duo::FloatKernels &kernels_of(std::string_view name) {
  const hpu_duo::FloatKernels *found = hpu_duo::find_float_kernels(name);
  TORCH_CHECK_VALUE(found, "expected best, model, or avx2 or avx512 where the CPU has it, got ", name);
  return *found;
}

// Vectors of `dim` elements as the kernels read them, of a store [X, K, S, *].
hpu_duo::CodedVectors vectors_of(const Tensor &codes, const Maybe &meta, int64_t dim) {
  const bool is_pair = meta && meta->dim() == 4 && meta->size(3) == 2, is_signed = codes.scalar_type() == at::kChar;
  TORCH_CHECK_VALUE(codes.dim() == 4 && codes.stride(3) == 1 && (is_signed || codes.scalar_type() == at::kByte) &&
                        codes.size(3) == (is_pair ? dim / 2 : dim) && dim % 32 == 0 && dim <= 256,
                    "expected bytes of vectors of ", dim, " elements, a multiple of 32 up to 256, got ",
                    codes.scalar_type(), " ", codes.sizes());
  TORCH_CHECK_VALUE(!meta || (meta->scalar_type() == at::kBFloat16 && meta->dim() == 4 && meta->stride(3) == 1 &&
                              meta->stride(2) == meta->size(3) && meta->size(3) <= 2 &&
                              meta->sizes().slice(0, 3) == codes.sizes().slice(0, 3)),
                    "expected a bfloat16 scale, or that and a zero, of each vector, side by side, got ",
                    meta ? meta->sizes() : at::IntArrayRef({}));
  TORCH_CHECK_VALUE(!is_signed || (meta && !is_pair), "expected a scale of each vector of int8");
  const auto code = is_signed ? hpu_duo::Code::kInt8 : is_pair ? hpu_duo::Code::kInt4 : hpu_duo::Code::kFp8;
  return {(const uint8_t *)codes.const_data_ptr(),
          meta ? (const uint16_t *)meta->const_data_ptr() : nullptr,
          code,
          codes.stride(0),
          codes.stride(1),
          codes.stride(2),
          meta ? meta->stride(0) : 0,
          meta ? meta->stride(1) : 0};
}

const int *numbers(const char *name, const Tensor &x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kInt && x.sizes() == shape && x.is_contiguous(), "expected contiguous ",
                    name, " of int32 ", shape, ", got ", x.scalar_type(), " ", x.sizes());
  return x.const_data_ptr<int>();
}

std::tuple<Tensor, Tensor, Tensor> attend_coded_blocks(const Tensor &query, const Tensor &k, const Maybe &k_meta,
                                                       const Tensor &v, const Maybe &v_meta, const Tensor &owner,
                                                       const Tensor &tail_block, const Tensor &tail_visible,
                                                       std::string_view instructions) {
  TORCH_CHECK_VALUE(query.dim() == 4 && k.dim() == 4 && k.size(1) == query.size(1) &&
                        v.sizes().slice(0, 3) == k.sizes().slice(0, 3),
                    "expected queries [N, K, H, D] and stores [X, K, S, *], got ", query.sizes(), ", ", k.sizes(),
                    " and ", v.sizes());
  TORCH_CHECK_VALUE(tail_visible.dim() == 3 && owner.dim() == 1 && owner.size(0) <= k.size(0),
                    "expected tail_visible [N, T, M] and at most ", k.size(0), " owners, got ", tail_visible.sizes(),
                    " and ", owner.sizes());
  const Tensor q = query.to(at::kFloat).contiguous(), tail = tail_block.contiguous(), owned = owner.contiguous();
  const Tensor visible = tail_visible.contiguous();
  const int64_t rows = q.size(0), heads = q.size(1), group = q.size(2), dim = q.size(3);
  const int64_t tails = visible.size(1), tokens = visible.size(2);
  TORCH_CHECK_VALUE(tokens > 0 && group % tokens == 0, "expected a number of tokens that divides the ", group,
                    " query heads of a row, got ", tokens);
  hpu_duo::RowPlan plan;
  plan.owner = numbers("owner", owned, {owned.size(0)});
  plan.num_owned = (int)owned.size(0);
  plan.tail = numbers("tail_block", tail, {rows, tails});
  plan.num_tails = (int)tails;
  plan.visible = numbers("tail_visible", visible, {rows, tails, tokens});
  Tensor attn = at::empty({rows, heads, group, dim}, q.options());
  Tensor largest = at::empty({rows, heads, group}, q.options()), total = at::empty({rows, heads, group}, q.options());
  const int64_t strides[] = {q.stride(0), q.stride(1), q.stride(2)};
  const int sizes[] = {(int)rows, (int)heads, (int)group, (int)dim, (int)k.size(2), (int)tokens};
  kernels_of(instructions)
      .attend_codes(q.const_data_ptr<float>(), query.scalar_type() != at::kFloat, vectors_of(k, k_meta, dim),
                    vectors_of(v, v_meta, dim), plan, attn.data_ptr<float>(), largest.data_ptr<float>(), total.data_ptr<float>(), strides, sizes,
                    at::get_num_threads());
  return {std::move(attn), std::move(largest), std::move(total)};
}

Tensor widen_codes(const Tensor &codes, const Maybe &meta, const Tensor &unit, int64_t dim, at::ScalarType dtype,
                   std::string_view instructions) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "expected float32 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(unit.dim() == 1, "expected units [n], got ", unit.sizes());
  const hpu_duo::CodedVectors from = vectors_of(codes, meta, dim);
  const Tensor units = unit.to(at::kLong).contiguous();
  const int64_t *first = units.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < units.size(0); ++n)
    TORCH_CHECK_INDEX(first[n] >= 0 && first[n] < codes.size(0), "expected units below ", codes.size(0), ", got ",
                      first[n]);
  Tensor to = at::empty({units.size(0), codes.size(1), codes.size(2), dim}, codes.options().dtype(dtype));
  const int sizes[] = {(int)codes.size(1), (int)codes.size(2), (int)dim};
  kernels_of(instructions)
      .widen_codes(from, first, units.size(0), sizes, to.data_ptr(),
                   dtype == at::kFloat ? hpu_duo::Store::kFloat32 : hpu_duo::Store::kBfloat16, at::get_num_threads());
  return to;
}

const hpu_duo::Operators operators =
    hpu_duo::Operators("hpu_duo_x86_v3")
        .add<attend_coded_blocks>("attend_coded_blocks(Tensor q, Tensor k, Tensor? k_meta, Tensor v, Tensor? v_meta,"
                                  " Tensor owner, Tensor tail_block, Tensor tail_visible, int instructions=0)"
                                  " -> (Tensor, Tensor, Tensor)")
        .add<widen_codes>("widen_codes(Tensor codes, Tensor? meta, Tensor unit, int dim, ScalarType dtype,"
                          " int instructions=0) -> Tensor");

}  // namespace
