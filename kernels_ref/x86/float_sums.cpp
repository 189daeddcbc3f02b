// Sums of attention weights by key, of float32 queries: as sums.cpp.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "float_kernels.h"
#include "float_scores.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kKeys = 64;  // keys whose scores are held at a time

struct Job {
  Queries queries;
  const float *lse;  // [S, K, G], contiguous
  float *sums;       // [K, T], contiguous
  int64_t k_token, k_head;  // strides, in items
  int num_keys, num_heads;
  int offset;  // query s sees keys up to s + offset
};

// Some rows, which are query heads of queries: their queries, log-sum-exps and last keys.
struct Part {
  alignas(64) float q[kMaxDim * kRows];
  alignas(64) float lse[kRows];
  alignas(64) int last[kRows];  // -1 behind the last row

  void load(const Job &job, int head, int first_row) {
    job.queries.load(head, first_row, q);
    const int group = job.queries.group;
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r, query = row / group;
      const bool is_there = row < job.queries.num_rows;
      last[r] = is_there ? query + job.offset : -1;
      lse[r] = is_there ? job.lse[((int64_t)query * job.num_heads + head) * group + row % group] : 0;
    }
  }
  int last_key() const { return *std::max_element(last, last + kRows); }
};

// The `count` keys of a head from `first` on.
template <class Stored>
void sum_keys(const Job &job, const typename Stored::Item *k, int head, int first, int count,
              const std::vector<Part> &parts) {
  alignas(64) float keys[kKeys * kMaxDim], scores[kKeys * kRows], sums[kKeys * kLanes] = {};
  const int dim = job.queries.dim;
  widen<Stored>(k + (int64_t)first * job.k_token + head * job.k_head, job.k_token, count, dim, keys);
  for (const Part &part : parts) {
    if (part.last_key() < first) continue;
    multiply<false>(keys, dim, 1, count, part.q, dim, scores);
    for (int j = 0; j < count; ++j)
      for (int r = 0; r < kRows; r += kLanes) {
        const M sees = Lanes::less(Lanes::set(first + j - 1), Lanes::load(part.last + r, Lanes::first(kLanes)));
        const F score = Lanes::sub(Lanes::load(scores + j * kRows + r), Lanes::load(part.lse + r));
        const F weight = Lanes::select(sees, exp2_of(Lanes::mul(score, Lanes::set(kLog2e))), Lanes::set(0.0f));
        Lanes::store(sums + j * kLanes, Lanes::add(Lanes::load(sums + j * kLanes), weight));
      }
  }
  for (int j = 0; j < count; ++j)
    job.sums[(int64_t)head * job.num_keys + first + j] = Lanes::sum(Lanes::load(sums + j * kLanes));
}

}  // namespace

// As `column_sums` of sums.cpp.
void column_sums(const float *q, const void *k, Store store, const float *lse, float *sums, const int64_t *strides,
                 const int *sizes, int num_threads) {
  const Job job{{q, strides[0], strides[1], strides[2], sizes[3], sizes[4], sizes[0] * sizes[3]},
                lse,
                sums,
                strides[3],
                strides[4],
                sizes[1],
                sizes[2],
                sizes[5]};
  const int num_parts = (job.queries.num_rows + kRows - 1) / kRows;
  if (!num_parts || !job.num_keys) return;
  std::vector<Part> parts(num_parts);
  const auto run = [&](auto stored) {
    using Stored = decltype(stored);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    for (int head = 0; head < job.num_heads; ++head) {
#pragma omp for schedule(static)
      for (int i = 0; i < num_parts; ++i) parts[i].load(job, head, i * kRows);
#pragma omp for schedule(static)
      for (int first = 0; first < job.num_keys; first += kKeys)
        sum_keys<Stored>(job, (const typename Stored::Item *)k, head, first, std::min(kKeys, job.num_keys - first),
                         parts);
    }
  };
  with_stored(store, run);
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
