// The kernels of this folder as torch's operators, so that compiled steps call them without Python.
//
// The Python modules beside this file explain arguments and results.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../torch_operators.h"
#include "floats.h"
#include "kernels.h"
#include "machine.h"

namespace {

namespace at = hpu_duo::stable;
using at::Tensor;
using hpu_duo::bf16;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kAlignment = 64;
constexpr int64_t kMostOfRows = 576;  // elements of a key or a value of decode rows
constexpr int64_t kPanel = 32;  // outputs, and inputs, that are packed together

template <typename T>
T *data(const Tensor &x) {
  return x.data_ptr<T>();
}

// The kernels read runs of head_dim items.
Tensor with_runs(const Tensor &x) { return x.stride(-1) == 1 ? x.borrowed() : x.contiguous(); }

hpu_duo::Instructions instructions_of(std::string_view name) {
  using hpu_duo::Instructions;
  TORCH_CHECK_VALUE(name != "tiles" || hpu_duo::have_tiles(), "expected a CPU and a system with AMX for tiles");
  if (name == "vectors") return Instructions::kVectors;
  if (name == "tiles") return Instructions::kTiles;
  if (name == "model") return Instructions::kModel;
  TORCH_CHECK_VALUE(name == "best", "expected best, vectors, tiles or model, got ", name);
  return Instructions::kBest;
}

// The kernels of float32 arithmetic that this machine runs.
const hpu_duo::FloatKernels &float_kernels(std::string_view name) {
  const hpu_duo::FloatKernels *found = hpu_duo::find_float_kernels(name);
  TORCH_CHECK_VALUE(found, "expected best, model, or avx2 or avx512 where the CPU has it, got ", name);
  return *found;
}

hpu_duo::Store store_of(const Tensor &x) {
  switch (x.scalar_type()) {
    case at::kBFloat16: return hpu_duo::Store::kBfloat16;
    case at::kHalf: return hpu_duo::Store::kFloat16;
    default: TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, "expected 16 bits or float32, got ", x.scalar_type());
  }
  return hpu_duo::Store::kFloat32;
}

hpu_duo::Store store_of(const Tensor &k, const Tensor &v) {
  TORCH_CHECK_VALUE(k.scalar_type() == v.scalar_type(), "expected values of ", k.scalar_type(), ", got ",
                    v.scalar_type());
  return store_of(k);
}

void require_pairs() {
  TORCH_CHECK_VALUE(hpu_duo::machine.has_pairs, "expected float32 inputs on a CPU without AVX512-BF16, got BFloat16");
}

void multiply(const Tensor &rows, const at::TensorList &packed, const std::vector<std::optional<Tensor>> &biases,
              const std::vector<Tensor> &results, const int *live, int64_t inputs, std::string_view instructions) {
  const int64_t count = (int64_t)packed.size(), num_rows = rows.numel() / inputs;
  const int num_threads = at::get_num_threads();
  std::vector<hpu_duo::Weight> weights;
  std::vector<hpu_duo::FloatWeight> float_weights;
  const bool is_float = rows.scalar_type() == at::kFloat;
  for (int64_t n = 0; n < count; ++n) {
    const std::optional<Tensor> &bias = biases[n];
    const float *terms = bias ? data<float>(*bias) : nullptr;
    const int64_t outputs = results[n].size(-1);
    if (is_float)
      float_weights.push_back({packed[n].data_ptr(), store_of(packed[n]), terms, data<float>(results[n]), outputs});
    else
      weights.push_back({data<bf16>(packed[n]), terms, data<bf16>(results[n]), outputs});
  }
  if (is_float)
    float_kernels(instructions)
        .linear(data<float>(rows), float_weights.data(), count, live, num_rows, inputs, num_threads);
  else
    require_pairs(), hpu_duo::linear(data<bf16>(rows), weights.data(), count, live, num_rows, inputs,
                                     instructions_of(instructions), num_threads);
}

std::vector<Tensor> linears(const Tensor &x, const at::TensorList &packed,
                            const std::vector<std::optional<Tensor>> &biases, const std::vector<int64_t> &out_features,
                            const std::optional<Tensor> &live, std::string_view instructions) {
  const int64_t packed_inputs = kPanel * packed[0].size(1), inputs = x.size(-1);
  const bool is_known = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(is_known && inputs <= packed_inputs && inputs > packed_inputs - kPanel,
                    "expected bfloat16 or float32 [..., ", packed_inputs - kPanel + 1, " to ", packed_inputs, "], got ",
                    x.scalar_type(), " ", x.sizes());
  const Tensor rows = inputs == packed_inputs ? x.contiguous() : at::filled_up(x, packed_inputs);
  std::vector<int64_t> shape = x.sizes().vec();
  std::vector<Tensor> results;
  for (size_t n = 0; n < packed.size(); ++n) {
    const int64_t packed_features = kPanel * packed[n].size(0);
    const std::optional<Tensor> &bias = biases[n];
    TORCH_CHECK_VALUE(out_features[n] <= packed_features && (!bias || bias->numel() == packed_features), "expected ",
                      out_features[n], " outputs and a packed bias, got a weight of ", packed_features);
    TORCH_CHECK_VALUE(kPanel * packed[n].size(1) == packed_inputs, "expected weights of ", packed_inputs,
                      " packed inputs, got one of ", kPanel * packed[n].size(1));
    shape.back() = out_features[n];
    results.push_back(at::empty(shape, x.options()));
  }
  multiply(rows, packed, biases, results, live ? data<int>(*live) : nullptr, packed_inputs, instructions);
  return results;
}

Tensor linear(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias, int64_t out_features,
              const std::optional<Tensor> &live, std::string_view instructions) {
  return std::move(linears(x, {packed}, {bias}, {out_features}, live, instructions)[0]);
}

Triple attend_units(const Tensor &query, const Tensor &keys, const Tensor &values, const hpu_duo::RowPlan &plan,
                    int64_t tokens, std::string_view instructions) {
  const int64_t rows = query.size(0), heads = query.size(1), group = query.size(2), dim = query.size(3);
  TORCH_CHECK_VALUE(keys.size(1) == heads && keys.size(3) == dim &&
                        keys.sizes().slice(0, 3) == values.sizes().slice(0, 3),
                    "expected stores [X, ", heads, ", S, ", dim, "], got ", keys.sizes(), " and ", values.sizes());
  const int64_t value_dim = values.size(3);
  TORCH_CHECK_VALUE(std::max(dim, value_dim) <= kMostOfRows && dim % kPanel == 0 && value_dim % kPanel == 0,
                    "expected keys and values of a multiple of ", kPanel, " elements up to ", kMostOfRows, ", got ", dim,
                    " and ", value_dim);
  TORCH_CHECK_VALUE(tokens > 0 && group % tokens == 0, "expected a number of tokens that divides the ", group,
                    " query heads of a row, got ", tokens);
  const Tensor q = with_runs(query), k = with_runs(keys), v = with_runs(values);
  const int64_t read = plan.tail ? plan.num_owned : rows;
  TORCH_CHECK_VALUE(read <= k.size(0), "expected at most ", k.size(0), " units, got ", read);
  const auto options = q.options().dtype(at::kFloat);
  Tensor attn = at::empty({rows, heads, group, value_dim}, options);
  Tensor largest = at::empty({rows, heads, group}, options), total = at::empty({rows, heads, group}, options);
  const int64_t strides[] = {q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1),
                             k.stride(2), v.stride(0), v.stride(1), v.stride(2)};
  const int sizes[] = {(int)rows, (int)heads, (int)group, (int)dim, (int)k.size(2), (int)tokens,
                       (int)value_dim};
  const auto run = [&](const auto &kernel, const auto *queries, auto *key, auto *value, auto... store) {
    kernel(queries, key, value, store..., plan, data<float>(attn), data<float>(largest), data<float>(total), strides,
           sizes, at::get_num_threads());
  };
  if (q.scalar_type() == at::kFloat)
    run(float_kernels(instructions).attend_rows, data<float>(q), k.data_ptr(), v.data_ptr(), store_of(k, v));
  else
    require_pairs(), run(hpu_duo::attend_rows, data<bf16>(q), data<bf16>(k), data<bf16>(v));
  return {std::move(attn), std::move(largest), std::move(total)};
}

// A plan of the given size, contiguous.
Tensor plan_of(const char *name, const Tensor &plan, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(plan.sizes() == shape, "expected ", name, " to have shape ", shape, ", got ", plan.sizes());
  return plan.contiguous();
}

Triple attend_blocks(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &owner, const Tensor &tail_block,
                     const Tensor &tail_visible, std::string_view instructions) {
  TORCH_CHECK_VALUE(tail_visible.dim() == 3, "expected tail_visible [N, T, M], got ", tail_visible.sizes());
  const int64_t rows = q.size(0), tails = tail_visible.size(1), tokens = tail_visible.size(2);
  const Tensor owned = owner.contiguous(), tail = plan_of("tail_block", tail_block, {rows, tails});
  const Tensor visible = plan_of("tail_visible", tail_visible, {rows, tails, tokens});
  hpu_duo::RowPlan plan;
  plan.owner = data<int>(owned);
  plan.num_owned = (int)owned.numel();
  plan.tail = data<int>(tail);
  plan.num_tails = (int)tails;
  plan.visible = data<int>(visible);
  return attend_units(q, k, v, plan, tokens, instructions);
}

Triple attend_rings(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &leading, std::string_view instructions) {
  TORCH_CHECK_VALUE(leading.dim() == 3, "expected visible [N, 1, M], got ", leading.sizes());
  const Tensor visible = plan_of("visible", leading, {q.size(0), 1, leading.size(2)});
  hpu_duo::RowPlan plan;
  plan.num_tails = 1;
  plan.visible = data<int>(visible);
  return attend_units(q, k, v, plan, visible.size(2), instructions);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_with_weights(const Tensor &q, const Tensor &k, const Tensor &v,
                                                          const Tensor &leading, const std::optional<Tensor> &sinks, std::string_view instructions) {
  const Tensor visible = plan_of("visible", leading, {q.size(0), 1, 1});
  Tensor mass = at::zeros({q.size(0), q.size(1), k.size(2)}, q.options().dtype(at::kFloat)), logits;
  hpu_duo::RowPlan plan;
  plan.num_tails = 1;
  plan.visible = data<int>(visible);
  plan.mass = data<float>(mass);
  if (sinks) {
    logits = plan_of("sinks", *sinks, {q.size(1), q.size(2)}).to(at::kFloat);
    plan.sinks = data<float>(logits);
  }
  auto [attn, largest, total] = attend_units(q, k, v, plan, 1, instructions);
  return {std::move(attn), std::move(largest), std::move(total), std::move(mass)};
}

Triple attend_held(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &position, const Tensor &begin,
                   const Tensor &end, int64_t sink, std::string_view instructions) {
  TORCH_CHECK_VALUE(position.dim() == 3 && (position.size(1) == 1 || position.size(1) == q.size(1)) && end.dim() == 2,
                    "expected position [N, 1 or ", q.size(1), ", S] and end [N, M], got ", position.sizes(), " and ",
                    end.sizes());
  const int64_t rows = q.size(0), tokens = end.size(1);
  const Tensor held = plan_of("position", position, {rows, position.size(1), k.size(2)});
  const Tensor first = plan_of("begin", begin, {rows, tokens}), last = plan_of("end", end, {rows, tokens});
  hpu_duo::RowPlan plan;
  plan.position = data<int>(held);
  plan.position_heads = (int)held.size(1);
  plan.begin = data<int>(first);
  plan.end = data<int>(last);
  plan.sink = (int)sink;
  return attend_units(q, k, v, plan, tokens, instructions);
}

Tensor eviction_victims(const std::optional<Tensor> &score, const Tensor &position,
                        const std::optional<Tensor> &is_protected, std::string_view instructions) {
  TORCH_CHECK_VALUE(position.dim() == 3, "expected position [N, K, C], got ", position.sizes());
  const Tensor held = position.contiguous();
  Tensor scores, mask, slot = at::empty({position.size(0), position.size(1)}, position.options());
  if (score) scores = plan_of("score", *score, position.sizes());
  if (is_protected) mask = is_protected->copy(position.sizes(), is_protected->scalar_type());
  const bool is_float = instructions != "best" || !hpu_duo::machine.has_pairs;
  const auto run = is_float ? float_kernels(instructions).eviction_victims : hpu_duo::eviction_victims;
  run(score ? data<float>(scores) : nullptr, data<int>(held), is_protected ? data<bool>(mask) : nullptr,
      data<int>(slot), slot.numel(), (int)position.size(2), at::get_num_threads());
  return slot;
}

Tensor place_of_largest(const Tensor &x, std::string_view instructions) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, "expected rows [N, V] of at least one item, got ", x.sizes());
  const Tensor rows = x.contiguous();
  Tensor place = at::empty({x.size(0)}, x.options().dtype(at::kInt));
  const int num_threads = at::get_num_threads();
  if (x.scalar_type() == at::kFloat)
    float_kernels(instructions)
        .place_of_largest(data<float>(rows), data<int>(place), x.size(0), x.size(1), num_threads);
  else
    require_pairs(), hpu_duo::place_of_largest(data<bf16>(rows), data<int>(place), x.size(0), x.size(1), num_threads);
  return place;
}

Tensor column_sums(const Tensor &query, const Tensor &keys, const Tensor &lse, std::optional<int64_t> offset,
                   std::string_view instructions) {
  const Tensor q = with_runs(query), k = with_runs(keys);
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 3 && k.size(1) == q.size(1) && k.size(2) == q.size(3) &&
                        q.size(3) % 16 == 0 && q.size(3) <= 256,
                    "expected queries [S, K, G, D] and keys [T, K, D], D a multiple of 16 up to 256, got ", q.sizes(),
                    " and ", k.sizes());
  const Tensor logs = plan_of("lse", lse, {q.size(0), q.size(1), q.size(2)});
  Tensor sums = at::zeros({k.size(1), k.size(0)}, q.options().dtype(at::kFloat));
  const int64_t strides[] = {q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1)};
  const int num_keys = (int)k.size(0);
  const int sizes[] = {(int)q.size(0), num_keys, (int)q.size(1), (int)q.size(2), (int)q.size(3),
                       (int)offset.value_or(num_keys)};
  if (q.scalar_type() == at::kFloat)
    float_kernels(instructions)
        .column_sums(data<float>(q), k.data_ptr(), store_of(k), data<float>(logs), data<float>(sums), strides, sizes,
                     at::get_num_threads());
  else
    require_pairs(), hpu_duo::column_sums(data<bf16>(q), data<bf16>(k), data<float>(logs), data<float>(sums), strides,
                                          sizes, instructions_of(instructions), at::get_num_threads());
  return sums;
}

void attend(const Tensor &attn, const Tensor &largest, const Tensor &total, const Tensor &query, const Tensor &keys,
            const Tensor &values, bool is_causal, int64_t sink, int64_t recent, std::string_view instructions) {
  const Tensor q = with_runs(query), k = with_runs(keys), v = with_runs(values);
  const int num_queries = (int)q.size(0), num_keys = (int)k.size(0), dim = (int)q.size(3);
  const int64_t strides[] = {q.stride(0), q.stride(1), q.stride(2), k.stride(0),
                             k.stride(1), v.stride(0), v.stride(1)};
  const int sizes[] = {num_queries, num_keys,     (int)q.size(1), (int)q.size(2), dim, is_causal ? 0 : num_keys,
                       (int)recent, (int)sink};
  if (q.scalar_type() == at::kFloat) {
    const Tensor widened = at::empty({2, num_keys, dim}, q.options());
    float_kernels(instructions)
        .attend(data<float>(q), k.data_ptr(), v.data_ptr(), store_of(k, v), data<float>(attn), data<float>(largest),
                data<float>(total), data<float>(widened), strides, sizes, at::get_num_threads());
    return;
  }
  require_pairs();
  const int64_t num_bytes = hpu_duo::attend_workspace(num_keys, dim) * (int64_t)sizeof(bf16) + kAlignment;
  const Tensor workspace = at::empty({num_bytes}, q.options().dtype(at::kByte));
  const int64_t aligned = ((int64_t)workspace.data_ptr() + kAlignment - 1) / kAlignment * kAlignment;
  hpu_duo::attend(data<bf16>(q), data<bf16>(k), data<bf16>(v), data<float>(attn), data<float>(largest),
                  data<float>(total), (bf16 *)aligned, strides, sizes, instructions_of(instructions),
                  at::get_num_threads());
}

void use(int64_t lanes, bool has_pairs) { hpu_duo::machine = {(int)lanes, has_pairs}; }

// A changed schema needs another number: the compiler's cache on disk has calls by name and number of arguments.
const hpu_duo::Operators operators =
    hpu_duo::Operators("hpu_duo_x86_v3")
        .add<linear>("linear(Tensor x, Tensor packed, Tensor? bias, int out_features, Tensor? live,"
                     " int instructions=0) -> Tensor")
        .add_lists<linears>("linears(Tensor x, Tensor[] packed, Tensor?[] bias, int[] out_features, Tensor? live,"
                            " int instructions=0) -> Tensor[]")
        .add<attend_blocks>("attend_blocks(Tensor q, Tensor k, Tensor v, Tensor owner, Tensor tail_block,"
                            " Tensor tail_visible, int instructions=0) -> (Tensor, Tensor, Tensor)")
        .add<attend_rings>("attend_rings(Tensor q, Tensor k, Tensor v, Tensor visible, int instructions=0)"
                           " -> (Tensor, Tensor, Tensor)")
        .add<attend_with_weights>("attend_with_weights(Tensor q, Tensor k, Tensor v, Tensor visible, Tensor? sinks,"
                                  " int instructions=0) -> (Tensor, Tensor, Tensor, Tensor)")
        .add<attend_held>("attend_held(Tensor q, Tensor k, Tensor v, Tensor position, Tensor begin, Tensor end,"
                          " int sink, int instructions=0) -> (Tensor, Tensor, Tensor)")
        .add<column_sums>("column_sums(Tensor q, Tensor k, Tensor lse, int? offset, int instructions=0) -> Tensor")
        .add<eviction_victims>("eviction_victims(Tensor? score, Tensor position, Tensor? is_protected,"
                               " int instructions=0) -> Tensor")
        .add<place_of_largest>("place_of_largest(Tensor x, int instructions=0) -> Tensor")
        .add<attend>("attend(Tensor(a!) attn, Tensor(b!) largest, Tensor(c!) total, Tensor q, Tensor k, Tensor v,"
                     " bool is_causal, int sink, int recent, int instructions=0) -> ()")
        .add_plain<use>("use(int lanes, bool has_pairs) -> ()");

}  // namespace
