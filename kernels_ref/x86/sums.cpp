// Sums of attention weights by key, of queries whose log-sum-exp is known: a second product of queries and keys.
//
// A thread has some keys and goes through all queries that see them, so nothing is added up by two threads and sums
// are the same whatever their number. Queries lie in lanes, as in attention.cpp.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "attention_products.h"
#include "kernels.h"
#include "panels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int kKeys = 64;  // keys whose scores are held at a time
constexpr int kMaxDim = 256;

struct Job {
  const bf16 *q, *k;
  const float *lse;  // [S, K, G], contiguous
  float *sums;       // [K, T], contiguous
  int64_t q_token, q_head, q_member, k_token, k_head;  // strides, in items
  int num_queries, num_keys, num_heads, group, dim;
  int offset;  // query s sees keys up to s + offset

  int num_rows() const { return num_queries * group; }
  int dim_steps() const { return (dim + kDepth - 1) / kDepth; }
};

// Some rows, which are query heads of queries: their queries [dim / 2][ROWS][2], log-sum-exps, and last keys.
template <int ROWS>
struct Part {
  alignas(64) bf16 q[kMaxDim * ROWS];
  alignas(64) float lse[ROWS];
  alignas(64) int last[ROWS];  // -1 behind the last row

  void load(const Job &job, int head, int first_row) {
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row + r, query = row / job.group;
      const bool is_there = row < job.num_rows();
      last[r] = is_there ? query + job.offset : -1;
      lse[r] = is_there ? job.lse[((int64_t)query * job.num_heads + head) * job.group + row % job.group] : 0;
    }
    for (int r = 0; r < ROWS; r += kLanes)
      for (int d = 0; d < job.dim; d += kDepth) {
        const __mmask32 there = job.dim - d >= kDepth ? 0xFFFFFFFF : 0xFFFF;
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int row = std::min(first_row + r + i, job.num_rows() - 1);
          block[i] = _mm512_maskz_loadu_epi16(
              there, job.q + row / job.group * job.q_token + head * job.q_head + row % job.group * job.q_member + d);
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) _mm512_store_si512(q + ((d / 2 + i) * ROWS + r) * 2, block[i]);
      }
  }

  int last_key() const {
    int most = -1;
    for (int r = 0; r < ROWS; ++r) most = std::max(most, last[r]);
    return most;
  }
};

// Adds the weights that the rows of a part put on `width` keys, whose scores are [keys][ROWS].
template <int ROWS>
void add_weights(const Part<ROWS> &part, const float *scores, int first_key, int width, float *sums) {
  const __m512 log2e = _mm512_set1_ps(kLog2e);
  for (int j = 0; j < width; ++j) {
    __m512 sum = _mm512_load_ps(sums + j * kLanes);
    for (int r = 0; r < ROWS; r += kLanes) {
      const __mmask16 sees =
          _mm512_cmple_epi32_mask(_mm512_set1_epi32(first_key + j), _mm512_load_si512(part.last + r));
      const __m512 score = _mm512_sub_ps(_mm512_load_ps(scores + j * ROWS + r), _mm512_load_ps(part.lse + r));
      sum = _mm512_mask_add_ps(sum, sees, sum, exp2_of(_mm512_mul_ps(score, log2e)));
    }
    _mm512_store_ps(sums + j * kLanes, sum);
  }
}

// The keys [first, first + width) of a head, of which `count` are there.
template <class Product>
void sum_keys(const Job &job, int head, int first, int count, const Part<Product::kRows> *parts, int num_parts) {
  alignas(64) bf16 keys[kKeys * kMaxDim];
  alignas(64) float scores[kKeys * Product::kRows], sums[kKeys * kLanes] = {};
  const int width = round_up(count, kDepth), steps = job.dim_steps();
  for (int key = 0; key < width; key += kLanes)
    pack_keys(job.k + (int64_t)(first + key) * job.k_token + head * job.k_head, job.k_token, count - key, job.dim,
              keys + (int64_t)key * steps * kDepth);
  for (int i = 0; i < num_parts; ++i) {
    if (parts[i].last_key() < first) continue;
    Product::score(keys, width, steps, parts[i].q, scores);
    add_weights<Product::kRows>(parts[i], scores, first, width, sums);
  }
  for (int j = 0; j < count; ++j)
    job.sums[(int64_t)head * job.num_keys + first + j] = _mm512_reduce_add_ps(_mm512_load_ps(sums + j * kLanes));
}

template <class Product>
void sum_all(const Job &job, int num_threads) {
  constexpr int kRows = Product::kRows;
  const int num_parts = (job.num_rows() + kRows - 1) / kRows;
  Buffer<Part<kRows>> buffer;
  Part<kRows> *parts = buffer.reserve(num_parts);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Product product;
    for (int head = 0; head < job.num_heads; ++head) {
#pragma omp for schedule(static)
      for (int i = 0; i < num_parts; ++i) parts[i].load(job, head, i * kRows);
#pragma omp for schedule(static)
      for (int first = 0; first < job.num_keys; first += kKeys)
        sum_keys<Product>(job, head, first, std::min(kKeys, job.num_keys - first), parts, num_parts);
    }
  }
}

}  // namespace

void column_sums(const bf16 *q, const bf16 *k, const float *lse, float *sums, const int64_t *strides, const int *sizes,
                 Instructions instructions, int num_threads) {
  const Job job{q,          k,        lse,      sums,     strides[0], strides[1], strides[2], strides[3],
                strides[4], sizes[0], sizes[1], sizes[2], sizes[3],   sizes[4],   sizes[5]};
  if (!job.num_queries || !job.num_keys) return;
  if (instructions == Instructions::kBest) instructions = have_tiles() ? Instructions::kTiles : Instructions::kVectors;
  switch (instructions) {
#ifdef __AMX_BF16__
    case Instructions::kTiles: return sum_all<TileAttention<HardwareTiles>>(job, num_threads);
#endif
    case Instructions::kModel: return sum_all<TileAttention<ModelTiles>>(job, num_threads);
    default: return sum_all<VectorAttention>(job, num_threads);
  }
}

}  // namespace hpu_duo
