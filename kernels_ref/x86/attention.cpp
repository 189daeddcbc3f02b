// Attention of bfloat16 queries over a list of keys, for CPUs with AVX512-BF16.
//
// The work is cut into tiles of query rows and blocks of keys. Keys and values are first laid out so
// that one 512-bit load holds sixteen neighbouring outputs, each with a pair of neighbouring inputs,
// which is what the instruction vdpbf16ps multiplies. Scores, maxima, sums and outputs are float32;
// weights are rounded to bfloat16 only as factors of the values.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int kTileRows = 48;     // a multiple of kStep
constexpr int kStep = 6;          // rows that one pass over packed data serves
constexpr int kKeys = 256;        // keys of a block, a multiple of kPanel
constexpr int kPanel = 64;        // outputs of one pass: four vectors
constexpr int kMaxDim = 256;

struct Job {
  const bf16 *q, *k, *v;
  int64_t q_token, q_head, q_member;  // strides, in items
  int64_t k_token, k_head, v_token, v_head;
  float *attn, *largest, *total;      // [S, K, G, D] and [S, K, G], contiguous
  bf16 *workspace;
  int num_queries, num_keys, num_heads, group, dim;
  int offset;     // query s sees keys up to s + offset
  int recent;     // and only the last so many of them; 0 for all; only where every query's last key is there
  int num_sinks;  // apart from the first so many
};

// Pairs of rows side by side: out[pair][column] holds rows 2 * pair and 2 * pair + 1.
inline void interleave(const bf16 *even, const bf16 *odd, int columns, bf16 *out) {
  for (int c = 0; c < columns; c += kLanes) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + c)));
    __m512i high = _mm512_setzero_si512();
    if (odd) high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + c)));
    _mm512_store_si512(out + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

// Sixteen keys to [dim / 2][16] pairs, padded with zeros behind the last key.
inline void pack_keys(const bf16 *k, int64_t stride, int count, int dim, bf16 *out, int width) {
  for (int d = 0; d < dim; d += 2) {
    uint32_t *line = (uint32_t *)(out + (int64_t)d * width);
    for (int key = 0; key < kLanes; ++key) {
      uint32_t pair = 0;
      if (key < count) std::memcpy(&pair, k + key * stride + d, 4);
      line[key] = pair;
    }
  }
}

// C[rows, 16 * NV] (+)= A[rows, 2 * pairs] * packed B; starts from scale * C, or from zero.
template <int MR, int NV>
inline __attribute__((always_inline)) void multiply(const bf16 *a, int lda, const bf16 *b, int ldb, int pairs,
                                                    const float *scale, float *c, int ldc) {
  __m512 sum[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n)
      sum[m][n] = scale ? _mm512_mul_ps(_mm512_load_ps(c + m * ldc + n * kLanes), _mm512_set1_ps(scale[m]))
                        : _mm512_setzero_ps();
  for (int p = 0; p < pairs; ++p) {
    __m512i vec[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) vec[n] = _mm512_load_si512(b + (int64_t)p * ldb + n * 2 * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      uint32_t pair;
      std::memcpy(&pair, a + m * lda + 2 * p, 4);
      __m512bh left = (__m512bh)_mm512_set1_epi32((int)pair);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, (__m512bh)vec[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) _mm512_store_ps(c + m * ldc + n * kLanes, sum[m][n]);
}

template <int NV>
void multiply_rows(int rows, const bf16 *a, int lda, const bf16 *b, int ldb, int pairs, const float *scale,
                   float *c, int ldc) {
  // Rows behind the last one exist in the tile: whole steps only.
  for (int r = 0; r < rows; r += kStep)
    multiply<kStep, NV>(a + r * lda, lda, b, ldb, pairs, scale ? scale + r : nullptr, c + r * ldc, ldc);
}

void multiply_panel(int vectors, int rows, const bf16 *a, int lda, const bf16 *b, int ldb, int pairs,
                    const float *scale, float *c, int ldc) {
  switch (vectors) {
    case 1: return multiply_rows<1>(rows, a, lda, b, ldb, pairs, scale, c, ldc);
    case 2: return multiply_rows<2>(rows, a, lda, b, ldb, pairs, scale, c, ldc);
    case 3: return multiply_rows<3>(rows, a, lda, b, ldb, pairs, scale, c, ldc);
    default: return multiply_rows<4>(rows, a, lda, b, ldb, pairs, scale, c, ldc);
  }
}

struct Tile {
  alignas(64) bf16 q[kTileRows * kMaxDim];
  alignas(64) bf16 weights[kTileRows * kKeys];
  alignas(64) float scores[kTileRows * kKeys];
  alignas(64) float attn[kTileRows * kMaxDim];
  alignas(64) float largest[kTileRows], total[kTileRows], scale[kTileRows];
};

// Which of sixteen keys from `key` on a query sees whose last key is `last`.
inline __mmask16 visible(const Job &job, int key, int last) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(key), lane);
  __mmask16 seen = _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(last));
  if (job.recent)
    seen &= _mm512_cmpgt_epi32_mask(index, _mm512_set1_epi32(last - job.recent)) |
            _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(job.num_sinks));
  return seen;
}

// One row of scores to weights, and what the row had before to the scale it gets.
void soften(const Job &job, Tile &tile, int row, int first_key, int width, int last) {
  const float *scores = tile.scores + row * kKeys;
  bf16 *weights = tile.weights + row * kKeys;
  const int past = first_key + width - 1;
  const bool all = past <= last && (!job.recent || first_key > last - job.recent || past < job.num_sinks);
  __m512 top = _mm512_set1_ps(kFloor);
  for (int j = 0; j < width; j += kLanes) {
    const __mmask16 seen = all ? 0xFFFF : visible(job, first_key + j, last);
    top = _mm512_mask_max_ps(top, seen, top, _mm512_load_ps(scores + j));
  }
  const float before = tile.largest[row];
  const float now = std::max(before, _mm512_reduce_max_ps(top));
  const __m512 log2e = _mm512_set1_ps(kLog2e), shift = _mm512_set1_ps(-now * kLog2e);
  __m512 sum = _mm512_setzero_ps();
  for (int j = 0; j < width; j += kLanes) {
    __m512 w = exp2_of(_mm512_fmadd_ps(_mm512_load_ps(scores + j), log2e, shift));
    if (!all) w = _mm512_maskz_mov_ps(visible(job, first_key + j, last), w);
    sum = _mm512_add_ps(sum, w);
    _mm256_store_si256((__m256i *)(weights + j), (__m256i)_mm512_cvtneps_pbh(w));
  }
  const __m512 fade = exp2_of(_mm512_set1_ps((before - now) * kLog2e));
  tile.scale[row] = _mm512_cvtss_f32(fade);
  tile.total[row] = tile.total[row] * tile.scale[row] + _mm512_reduce_add_ps(sum);
  tile.largest[row] = now;
}

// Rows [begin, end) of a tile over keys [first, stop), block by block.
void attend_keys(const Job &job, Tile &tile, int begin, int end, int first, int stop, const bf16 *keys,
                 const bf16 *values) {
  const int padded = round_up(end - begin, kStep), dim = job.dim;
  for (int key = first; key < stop; key += kKeys) {
    const int width = std::min(kKeys, round_up(stop - key, kPanel));
    for (int j = 0; j < width; j += kPanel)
      multiply_panel(4, padded, tile.q, dim, keys + (int64_t)(key + j) * dim, 2 * kPanel, dim / 2, nullptr,
                     tile.scores + j, kKeys);
    for (int r = 0; r < padded; ++r) {
      const int query = std::min(begin + r, end - 1) / job.group;
      soften(job, tile, r, key, width, std::min(query + job.offset, job.num_keys - 1));
    }
    for (int d = 0; d < dim; d += kPanel) {
      const int vectors = std::min(kPanel, dim - d) / kLanes;
      multiply_panel(vectors, padded, tile.weights, kKeys, values + (int64_t)key * dim + 2 * d, 2 * dim, width / 2,
                     tile.scale, tile.attn + d, dim);
    }
  }
}

// Query rows [begin, end) of one key/value head; row r is member r % group of query r / group.
void attend_tile(const Job &job, int head, int begin, int end, const bf16 *keys, const bf16 *values) {
  Tile tile;
  const int rows = end - begin, padded = round_up(rows, kStep), dim = job.dim;
  const int last_key = std::min((end - 1) / job.group + job.offset, job.num_keys - 1);
  for (int r = 0; r < padded; ++r) {
    const int row = std::min(begin + r, end - 1);
    const int64_t place = ((int64_t)(row / job.group) * job.num_heads + head) * job.group + row % job.group;
    const bf16 *q = job.q + row / job.group * job.q_token + head * job.q_head + row % job.group * job.q_member;
    std::memcpy(tile.q + r * dim, q, dim * sizeof(bf16));
    std::memcpy(tile.attn + r * dim, job.attn + place * dim, dim * sizeof(float));
    tile.largest[r] = job.largest[place];
    tile.total[r] = job.total[place];
  }
  // All keys up to the last one, or with a window the sinks and then the band that the tile reaches.
  const int band = job.recent ? std::max(begin / job.group + job.offset - job.recent + 1, 0) / kPanel * kPanel : 0;
  const int sinks = round_up(std::min(job.num_sinks, last_key + 1), kPanel);
  if (band <= sinks) {
    attend_keys(job, tile, begin, end, 0, last_key + 1, keys, values);
  } else {
    attend_keys(job, tile, begin, end, 0, sinks, keys, values);
    attend_keys(job, tile, begin, end, band, last_key + 1, keys, values);
  }
  for (int r = 0; r < rows; ++r) {
    const int row = begin + r;
    const int64_t place = ((int64_t)(row / job.group) * job.num_heads + head) * job.group + row % job.group;
    std::memcpy(job.attn + place * dim, tile.attn + r * dim, dim * sizeof(float));
    job.largest[place] = tile.largest[r];
    job.total[place] = tile.total[r];
  }
}

}  // namespace

// Items of bfloat16 that `workspace` must hold, aligned to 64 bytes.
int64_t attend_workspace(int num_keys, int dim) { return 2 * (int64_t)round_up(num_keys, kPanel) * dim; }

// Merges attention over the keys into attn, largest, total; see Job for the arguments.
void attend(const bf16 *q, const bf16 *k, const bf16 *v, float *attn, float *largest, float *total, bf16 *workspace,
            const int64_t *strides, const int *sizes, int num_threads) {
  const Job job{q,          k,          v,          strides[0], strides[1], strides[2], strides[3], strides[4],
                strides[5], strides[6], attn,       largest,    total,      workspace,  sizes[0],   sizes[1],
                sizes[2],   sizes[3],   sizes[4],   sizes[5],   sizes[6],   sizes[7]};
  const int length = round_up(job.num_keys, kPanel), dim = job.dim;
  const int num_rows = job.num_queries * job.group;
  bf16 *keys = job.workspace, *values = keys + (int64_t)length * dim;
  for (int head = 0; head < job.num_heads; ++head) {
    const bf16 *k_head = job.k + head * job.k_head, *v_head = job.v + head * job.v_head;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
      for (int key = 0; key < length; key += kPanel) {
        for (int lane = 0; lane < kPanel; lane += kLanes)
          pack_keys(k_head + (key + lane) * job.k_token, job.k_token, job.num_keys - key - lane, dim,
                    keys + (int64_t)key * dim + 2 * lane, kPanel);
        for (int row = key; row < key + kPanel; row += 2) {
          bf16 *out = values + (int64_t)row * dim;
          const bf16 *even = v_head + row * job.v_token;
          if (row < job.num_keys)
            interleave(even, row + 1 < job.num_keys ? even + job.v_token : nullptr, dim, out);
          else
            std::memset(out, 0, 2 * dim * sizeof(bf16));
        }
      }
      // The last rows see the most keys, so they go first.
#pragma omp for schedule(dynamic)
      for (int tile = (num_rows - 1) / kTileRows; tile >= 0; --tile)
        attend_tile(job, head, tile * kTileRows, std::min(num_rows, (tile + 1) * kTileRows), keys, values);
    }
  }
}

}  // namespace hpu_duo
