// Attention of bfloat16 queries over a list of keys.
//
// Scores are computed as [keys, queries]: sixteen queries lie in one vector, so maxima, sums and masks need no
// sums across a vector. Keys and values are first laid out as tiles, keys as they are and values transposed;
// queries and weights lie as pairs, of items and of keys. Vectors and tiles multiply the same layouts. Scores,
// maxima, sums and outputs are float32; weights are rounded to bfloat16 only as factors of the values.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_products.h"
#include "kernels.h"
#include "panels.h"
#include "vectors.h"

namespace hpu_duo {
namespace {

constexpr int kKeys = 64;        // keys whose scores are held at a time
constexpr int kSharedKeys = 512;  // keys that all parts of a tile meet while they are in a cache
constexpr int kMaxParts = 8;      // of a tile
constexpr int kMaxDim = 256;
constexpr float kSlack = 8;       // weights may grow to 2^kSlack before what was summed is scaled down

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

  int num_rows() const { return num_queries * group; }
  // Row r is member r % group of query r / group; rows behind the last one repeat it.
  int query_of(int row) const { return std::min(row, num_rows() - 1) / group; }
  int last_key(int row) const { return std::min(query_of(row) + offset, num_keys - 1); }
  int64_t place(int row, int head) const {
    const int member = std::min(row, num_rows() - 1) % group;
    return ((int64_t)query_of(row) * num_heads + head) * group + member;
  }
  int dim_steps() const { return (dim + kDepth - 1) / kDepth; }
};

// 32 values as tiles [dim / 16][16 items][32 values], with zeros behind the last value.
void pack_values(const bf16 *v, int64_t stride, int count, int dim, bf16 *out) {
  const auto items = [&](int value, int d) {
    return value < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + value * stride + d)))
                         : _mm512_setzero_si512();
  };
  for (int d = 0; d < dim; d += kLanes, out += kTileItems) {
    __m512i rows[kLanes];
    for (int p = 0; p < kLanes; ++p)
      rows[p] = _mm512_or_si512(items(2 * p, d), _mm512_slli_epi32(items(2 * p + 1, d), 16));
    transpose(rows);
    for (int r = 0; r < kLanes; ++r) _mm512_store_si512(out + r * kDepth, rows[r]);
  }
}

// Some rows of a tile: their queries, and what they have seen so far.
template <int ROWS>
struct Part {
  alignas(64) bf16 q[kMaxDim * ROWS];     // [dim / 2][ROWS][2]
  alignas(64) float attn[kMaxDim * ROWS];  // [dim][ROWS]
  // The exponent of 2 that sums are relative to, a whole number; the sum; the last key that a row sees.
  alignas(64) float exponent[ROWS], total[ROWS];
  alignas(64) int last[ROWS];
  int first_row;

  void load(const Job &job, int head, int row) {
    first_row = row;
    bool is_empty = true;
    for (int r = 0; r < ROWS; ++r) {
      const int64_t place = job.place(row + r, head);
      last[r] = job.last_key(row + r);
      total[r] = job.total[place];
      exponent[r] = job.largest[place] * kLog2e;
      is_empty &= total[r] == 0;
    }
    for (int r = 0; r < ROWS; r += kLanes) load_queries(job, head, r);
    if (is_empty) std::fill(attn, attn + job.dim * ROWS, 0.0f);
    for (int r = 0; r < ROWS; r += kLanes) {
      const __m512 whole = _mm512_ceil_ps(_mm512_load_ps(exponent + r));
      const __m512 scale = exp2_of(_mm512_sub_ps(_mm512_load_ps(exponent + r), whole));
      _mm512_store_ps(exponent + r, whole);
      _mm512_store_ps(total + r, _mm512_mul_ps(_mm512_load_ps(total + r), scale));
      if (is_empty) continue;
      for (int d = 0; d < job.dim; d += kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i)
          block[i] = _mm512_loadu_si512(job.attn + job.place(row + r + i, head) * job.dim + d);
        transpose(block);
        for (int i = 0; i < kLanes; ++i)
          _mm512_store_ps(attn + (d + i) * ROWS + r, _mm512_mul_ps(_mm512_castsi512_ps(block[i]), scale));
      }
    }
  }

  void store(const Job &job, int head) {
    for (int r = 0; r < ROWS; r += kLanes) {
      const int count = std::min(kLanes, job.num_rows() - first_row - r);
      for (int d = 0; d < job.dim && count > 0; d += kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = _mm512_load_si512(attn + (d + i) * ROWS + r);
        transpose(block);
        for (int i = 0; i < count; ++i)
          _mm512_storeu_si512(job.attn + job.place(first_row + r + i, head) * job.dim + d, block[i]);
      }
      for (int i = 0; i < count; ++i) {
        const int64_t place = job.place(first_row + r + i, head);
        job.largest[place] = total[r + i] == 0 ? kFloor : exponent[r + i] / kLog2e;
        job.total[place] = total[r + i];
      }
    }
  }

 private:
  void load_queries(const Job &job, int head, int r) {
    for (int d = 0; d < job.dim; d += kDepth) {
      const __mmask32 there = job.dim - d >= kDepth ? 0xFFFFFFFF : 0xFFFF;
      __m512i block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int row = std::min(first_row + r + i, job.num_rows() - 1);
        const bf16 *from = job.q + row / job.group * job.q_token + head * job.q_head + row % job.group * job.q_member;
        block[i] = _mm512_maskz_loadu_epi16(there, from + d);
      }
      transpose(block);
      for (int i = 0; i < kLanes; ++i) _mm512_store_si512(q + ((d / 2 + i) * ROWS + r) * 2, block[i]);
    }
  }
};

template <int ROWS>
struct Block {
  alignas(64) float scores[kKeys * ROWS];  // [keys][ROWS]
  alignas(64) bf16 weights[kKeys * ROWS];  // [keys / 2][ROWS][2]
};

// Which of sixteen rows see a key.
inline __mmask16 visible(const Job &job, int key, __m512i last) {
  const __m512i index = _mm512_set1_epi32(key);
  const __mmask16 seen = _mm512_cmple_epi32_mask(index, last);
  if (!job.recent || key < job.num_sinks) return seen;
  return seen & _mm512_cmpgt_epi32_mask(index, _mm512_sub_epi32(last, _mm512_set1_epi32(job.recent)));
}

// Scores of sixteen rows to weights. If `is_masked`, some key is hidden from some row.
template <bool is_masked, int ROWS>
void soften(const Job &job, Part<ROWS> &part, Block<ROWS> &block, int r, int first_key, int width) {
  const float *scores = block.scores + r;
  const __m512i last = _mm512_load_si512(part.last + r);
  const auto sees = [&](int j) -> __mmask16 { return is_masked ? visible(job, first_key + j, last) : 0xFFFF; };
  __m512 top[4];
  for (int i = 0; i < 4; ++i) top[i] = _mm512_set1_ps(kFloor);
  for (int j = 0; j < width; j += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      top[i] = _mm512_mask_max_ps(top[i], sees(j + i), top[i], _mm512_load_ps(scores + (j + i) * ROWS));
  const __m512 log2e = _mm512_set1_ps(kLog2e);
  const __m512 most = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
  const __m512 reached = _mm512_ceil_ps(_mm512_mul_ps(most, log2e)), before = _mm512_load_ps(part.exponent + r);
  __m512 exponent = before, total = _mm512_load_ps(part.total + r);
  if (_mm512_cmp_ps_mask(reached, _mm512_add_ps(before, _mm512_set1_ps(kSlack)), _CMP_GT_OQ)) {
    exponent = _mm512_max_ps(before, reached);
    const __m512 fade = exp2_of(_mm512_sub_ps(before, exponent));
    total = _mm512_mul_ps(total, fade);
    for (int d = 0; d < job.dim; ++d)
      _mm512_store_ps(part.attn + d * ROWS + r, _mm512_mul_ps(fade, _mm512_load_ps(part.attn + d * ROWS + r)));
    _mm512_store_ps(part.exponent + r, exponent);
  }
  const Exponential exponential(exponent);
  // What is summed are the rounded weights, so that their errors cancel where few keys matter.
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
#pragma GCC unroll 4
  for (int j = 0; j < width; j += 2) {
    const __m512 even = _mm512_load_ps(scores + j * ROWS), odd = _mm512_load_ps(scores + (j + 1) * ROWS);
    const __m512i pairs = is_masked ? exponential(even, odd, sees(j), sees(j + 1)) : exponential(even, odd);
    total = _mm512_dpbf16_ps(total, (__m512bh)pairs, ones);
    _mm512_store_si512(block.weights + (j * ROWS / 2 + r) * 2, pairs);
  }
  _mm512_store_ps(part.total + r, total);
}

// A part over keys [first, stop), which lie from a multiple of 32 on.
template <class Product>
void attend_keys(const Job &job, Part<Product::kRows> &part, Block<Product::kRows> &block, int first, int stop,
                 const bf16 *keys, const bf16 *values) {
  constexpr int kRows = Product::kRows;
  for (int key = first; key < stop; key += kKeys) {
    const int width = std::min(kKeys, round_up(stop - key, kDepth)), past = key + width - 1;
    Product::score(keys + (int64_t)key * job.dim_steps() * kDepth, width, job.dim_steps(), part.q, block.scores);
    // Rows are in order of their queries, and so are their last keys.
    const int least = part.last[0], most = part.last[kRows - 1];
    if (past <= least && (!job.recent || key > most - job.recent || past < job.num_sinks))
      for (int r = 0; r < kRows; r += kLanes) soften<false>(job, part, block, r, key, width);
    else
      for (int r = 0; r < kRows; r += kLanes) soften<true>(job, part, block, r, key, width);
    Product::add_values(values + (int64_t)key * job.dim, width, job.dim, block.weights, part.attn);
  }
}

// The rows of `num_parts` parts from `row` on, of one key/value head.
template <class Product>
void attend_tile(const Job &job, int head, int row, int num_parts, const bf16 *keys, const bf16 *values) {
  constexpr int kRows = Product::kRows;
  static thread_local Buffer<Part<kRows>> buffer;
  static thread_local Buffer<Block<kRows>> block;
  Part<kRows> *parts = buffer.reserve(num_parts);
  for (int i = 0; i < num_parts; ++i) parts[i].load(job, head, row + i * kRows);
  const int end = parts[num_parts - 1].last[kRows - 1] + 1;
  for (int shared = 0; shared < end; shared += kSharedKeys)
    for (int i = 0; i < num_parts; ++i) {
      // All keys up to the last one, or with a window the sinks and then the band that the part reaches.
      const auto attend = [&](int first, int stop) {
        attend_keys<Product>(job, parts[i], *block.reserve(1), std::max(first, shared),
                             std::min(stop, shared + kSharedKeys), keys, values);
      };
      const int stop = parts[i].last[kRows - 1] + 1;
      const int band = job.recent ? std::max(parts[i].last[0] - job.recent + 1, 0) / kDepth * kDepth : 0;
      const int sinks = round_up(std::min(job.num_sinks, stop), kDepth);
      if (band <= sinks) {
        attend(0, stop);
      } else {
        attend(0, sinks);
        attend(band, stop);
      }
    }
  for (int i = 0; i < num_parts; ++i) parts[i].store(job, head);
}

template <class Product>
void attend_all(const Job &job, int num_threads) {
  const int length = round_up(job.num_keys, kDepth), dim = job.dim, steps = job.dim_steps();
  const int num_parts = (job.num_rows() + Product::kRows - 1) / Product::kRows;
  // Parts share what they read, as far as there is work for all threads.
  const int together = std::clamp(num_threads > 1 ? num_parts / (4 * num_threads) : num_parts, 1, kMaxParts);
  bf16 *keys = job.workspace, *values = keys + (int64_t)length * steps * kDepth;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Product product;
    for (int head = 0; head < job.num_heads; ++head) {
      const bf16 *k_head = job.k + head * job.k_head, *v_head = job.v + head * job.v_head;
#pragma omp for schedule(static)
      for (int key = 0; key < length; key += kDepth) {
        for (int half = key; half < key + kDepth; half += kLanes)
          pack_keys(k_head + half * job.k_token, job.k_token, job.num_keys - half, dim,
                    keys + (int64_t)half * steps * kDepth);
        pack_values(v_head + key * job.v_token, job.v_token, job.num_keys - key, dim, values + (int64_t)key * dim);
      }
      // The last rows see the most keys, so they go first.
#pragma omp for schedule(dynamic)
      for (int tile = (num_parts - 1) / together; tile >= 0; --tile)
        attend_tile<Product>(job, head, tile * together * Product::kRows,
                             std::min(together, num_parts - tile * together), keys, values);
    }
  }
}

}  // namespace

// Items of bfloat16 that `workspace` must hold, aligned to 64 bytes.
int64_t attend_workspace(int num_keys, int dim) {
  return (int64_t)round_up(num_keys, kDepth) * (round_up(dim, kDepth) + dim);
}

// Merges attention over the keys into attn, largest, total; see Job for the arguments.
void attend(const bf16 *q, const bf16 *k, const bf16 *v, float *attn, float *largest, float *total, bf16 *workspace,
            const int64_t *strides, const int *sizes, Instructions instructions, int num_threads) {
  const Job job{q,          k,          v,          strides[0], strides[1], strides[2], strides[3], strides[4],
                strides[5], strides[6], attn,       largest,    total,      workspace,  sizes[0],   sizes[1],
                sizes[2],   sizes[3],   sizes[4],   sizes[5],   sizes[6],   sizes[7]};
  if (instructions == Instructions::kBest) instructions = have_tiles() ? Instructions::kTiles : Instructions::kVectors;
  switch (instructions) {
#ifdef __AMX_BF16__
    case Instructions::kTiles: return attend_all<TileAttention<HardwareTiles>>(job, num_threads);
#endif
    case Instructions::kModel: return attend_all<TileAttention<ModelTiles>>(job, num_threads);
    default: return attend_all<VectorAttention>(job, num_threads);
  }
}

}  // namespace hpu_duo
