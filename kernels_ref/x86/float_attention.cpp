// Attention of float32 queries over a list of stored keys: as attention.cpp, in float32 throughout.
//
// Keys and values of a head are widened once. Scores are computed as [keys, rows], so that rows, which are query heads
// of queries, lie in lanes.

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "float_kernels.h"
#include "float_scores.h"

namespace hpu_duo {
namespace HPU_DUO_VARIANT {
namespace {

constexpr int kKeys = 64;               // keys whose scores are held at a time
constexpr int kSharedItems = 1 << 14;   // of keys that all parts of a tile meet while they are in a cache
constexpr int kMaxParts = 8;            // of a tile

struct Job {
  Queries queries;
  const void *k, *v;
  int64_t k_token, k_head, v_token, v_head;  // strides, in items
  float *attn, *largest, *total;             // [S, K, G, D] and [S, K, G], contiguous
  float *workspace;                          // keys and values of a head, [2][keys][dim]
  int num_keys, num_heads;
  int offset;     // query s sees keys up to s + offset
  int recent;     // and only the last so many of them; 0 for all; only where every query's last key is there
  int num_sinks;  // apart from the first so many

  int row_of(int row) const { return std::min(row, queries.num_rows - 1); }
  int last_key(int row) const { return std::min(row_of(row) / queries.group + offset, num_keys - 1); }
  int64_t place(int row, int head) const {
    const int member = row_of(row) % queries.group;
    return ((int64_t)(row_of(row) / queries.group) * num_heads + head) * queries.group + member;
  }
};

// Some rows of a tile: their queries, and what they have seen so far.
struct Part {
  alignas(64) float q[kMaxDim * kRows];     // [dim][kRows]
  alignas(64) float attn[kMaxDim * kRows];  // [dim][kRows]
  alignas(64) float largest[kRows], total[kRows];
  alignas(64) int last[kRows];  // the last key that a row sees
  int first_row;

  void load(const Job &job, int head, int row) {
    first_row = row;
    const int dim = job.queries.dim;
    job.queries.load(head, row, q);
    for (int r = 0; r < kRows; ++r) {
      const int64_t place = job.place(row + r, head);
      last[r] = job.last_key(row + r);
      total[r] = job.total[place];
      largest[r] = job.largest[place];
      for (int d = 0; d < dim; ++d) attn[d * kRows + r] = total[r] == 0 ? 0 : job.attn[place * dim + d];
    }
  }

  void store(const Job &job, int head) const {
    const int dim = job.queries.dim, count = std::min(kRows, job.queries.num_rows - first_row);
    for (int r = 0; r < count; ++r) {
      const int64_t place = job.place(first_row + r, head);
      job.largest[place] = total[r] == 0 ? kFloor : largest[r];
      job.total[place] = total[r];
      for (int d = 0; d < dim; ++d) job.attn[place * dim + d] = attn[d * kRows + r];
    }
  }
};

// Which rows see a key.
inline M visible(const Job &job, int key, I last) {
  const I index = Lanes::set(key);
  const M seen = Lanes::less(index, Lanes::add(last, Lanes::set(1)));
  if (!job.recent || key < job.num_sinks) return seen;
  return Lanes::both(seen, Lanes::less(Lanes::add(last, Lanes::set(-job.recent)), index));
}

// Scores of a vector of rows to weights. If `is_masked`, some key is hidden from some row.
template <bool is_masked>
void soften(const Job &job, Part &part, float *scores, int first_key, int width) {
  for (int r = 0; r < kRows; r += kLanes) {
    const I last = Lanes::load(part.last + r, Lanes::first(kLanes));
    const F before = Lanes::load(part.largest + r);
    F top = before;
    for (int j = 0; j < width; ++j) {
      const F score = Lanes::load(scores + j * kRows + r);
      top = Lanes::max(top, is_masked ? Lanes::select(visible(job, first_key + j, last), score, top) : score);
    }
    F total = Lanes::load(part.total + r);
    const F log2e = Lanes::set(kLog2e);
    if (Lanes::any(Lanes::less(before, top))) {
      const F fade = exp2_of(Lanes::mul(Lanes::sub(before, top), log2e));
      total = Lanes::mul(total, fade);
      for (int d = 0; d < job.queries.dim; ++d)
        Lanes::store(part.attn + d * kRows + r, Lanes::mul(fade, Lanes::load(part.attn + d * kRows + r)));
      Lanes::store(part.largest + r, top);
    }
    for (int j = 0; j < width; ++j) {
      F weight = exp2_of(Lanes::mul(Lanes::sub(Lanes::load(scores + j * kRows + r), top), log2e));
      if (is_masked) weight = Lanes::select(visible(job, first_key + j, last), weight, Lanes::set(0.0f));
      total = Lanes::add(total, weight);
      Lanes::store(scores + j * kRows + r, weight);
    }
    Lanes::store(part.total + r, total);
  }
}

// A part over keys [first, stop).
void attend_keys(const Job &job, Part &part, float *scores, int first, int stop) {
  const int dim = job.queries.dim;
  for (int key = first; key < stop; key += kKeys) {
    const int width = std::min(kKeys, stop - key), past = key + width - 1;
    const float *keys = job.workspace + (int64_t)key * dim, *values = keys + (int64_t)job.num_keys * dim;
    multiply<false>(keys, dim, 1, width, part.q, dim, scores);
    // Rows are in order of their queries, and so are their last keys.
    const int least = part.last[0], most = part.last[kRows - 1];
    if (past <= least && (!job.recent || key > most - job.recent || past < job.num_sinks))
      soften<false>(job, part, scores, key, width);
    else
      soften<true>(job, part, scores, key, width);
    multiply<true>(values, 1, dim, dim, scores, width, part.attn);
  }
}

// The rows of `num_parts` parts from `row` on, of one key/value head.
void attend_tile(const Job &job, int head, int row, int num_parts) {
  static thread_local Buffer<Part> buffer;
  alignas(64) float scores[kKeys * kRows];
  Part *parts = buffer.reserve(num_parts);
  for (int i = 0; i < num_parts; ++i) parts[i].load(job, head, row + i * kRows);
  const int end = parts[num_parts - 1].last[kRows - 1] + 1, step = kSharedItems / job.queries.dim;
  for (int shared = 0; shared < end; shared += step)
    for (int i = 0; i < num_parts; ++i) {
      // All keys up to the last one, or with a window the sinks and then the band that the part reaches.
      const auto attend = [&](int first, int stop) {
        attend_keys(job, parts[i], scores, std::max(first, shared), std::min(stop, shared + step));
      };
      const int stop = parts[i].last[kRows - 1] + 1, sinks = std::min(job.num_sinks, stop);
      const int band = job.recent ? std::max(parts[i].last[0] - job.recent + 1, 0) : 0;
      if (band <= sinks) {
        attend(0, stop);
      } else {
        attend(0, sinks);
        attend(band, stop);
      }
    }
  for (int i = 0; i < num_parts; ++i) parts[i].store(job, head);
}

template <class Stored>
void attend_all(const Job &job, int num_threads) {
  using Item = typename Stored::Item;
  const int num_parts = (job.queries.num_rows + kRows - 1) / kRows, dim = job.queries.dim;
  // Parts share what they read, as far as there is work for all threads.
  const int together = std::clamp(num_threads > 1 ? num_parts / (4 * num_threads) : num_parts, 1, kMaxParts);
  float *values = job.workspace + (int64_t)job.num_keys * dim;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  for (int head = 0; head < job.num_heads; ++head) {
    const Item *k = (const Item *)job.k + head * job.k_head, *v = (const Item *)job.v + head * job.v_head;
#pragma omp for schedule(static)
    for (int key = 0; key < job.num_keys; key += kKeys) {
      const int count = std::min(kKeys, job.num_keys - key);
      widen<Stored>(k + key * job.k_token, job.k_token, count, dim, job.workspace + (int64_t)key * dim);
      widen<Stored>(v + key * job.v_token, job.v_token, count, dim, values + (int64_t)key * dim);
    }
    // The last rows see the most keys, so they go first.
#pragma omp for schedule(dynamic)
    for (int tile = (num_parts - 1) / together; tile >= 0; --tile)
      attend_tile(job, head, tile * together * kRows, std::min(together, num_parts - tile * together));
  }
}

}  // namespace

// As `attend` of attention.cpp.
void attend(const float *q, const void *k, const void *v, Store store, float *attn, float *largest, float *total,
            float *workspace, const int64_t *strides, const int *sizes, int num_threads) {
  const Job job{{q, strides[0], strides[1], strides[2], sizes[3], sizes[4], sizes[0] * sizes[3]},
                k,
                v,
                strides[3],
                strides[4],
                strides[5],
                strides[6],
                attn,
                largest,
                total,
                workspace,
                sizes[1],
                sizes[2],
                sizes[5],
                sizes[6],
                sizes[7]};
  if (!job.queries.num_rows || !job.num_keys) return;
  with_stored(store, [&](auto stored) { attend_all<decltype(stored)>(job, num_threads); });
}

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
