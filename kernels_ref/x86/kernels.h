// The kernels of this folder as operators.cpp calls them; each source says more.

#pragma once

#include <cstdint>

namespace hpu_duo {

using bf16 = uint16_t;

// What multiplies: the best for the work at hand, vectors (AVX512-BF16), tiles (AMX), or the model of tiles.
enum class Instructions { kBest, kVectors, kTiles, kModel };

// Whether this process may use AMX.
bool have_tiles();

// A packed weight, and where the products with it go.
struct Weight {
  const bf16 *packed;
  const float *bias;  // padded to whole panels, or null
  bf16 *y;
  int64_t outputs;
};

void linear(const bf16 *x, const Weight *weights, int64_t num_weights, const int *live, int64_t rows, int64_t inputs,
            Instructions instructions, int num_threads);

// What decode rows read: units that they own, which all their tokens see whole; and either tails, of which each
// token sees leading slots, or a unit each, of which each token sees an interval of positions.
struct RowPlan {
  const int *owner = nullptr;  // row of each of the first units, other numbers mean nobody
  int num_owned = 0;
  const int *tail = nullptr;   // [rows, num_tails]; null: row n's only tail is unit n
  int num_tails = 0;
  const int *visible = nullptr;  // [rows, num_tails, tokens]
  const int *position = nullptr;  // [rows, position_heads, slots]: what each slot holds, -1 = nothing
  int position_heads = 1;
  const int *begin = nullptr, *end = nullptr;  // [rows, tokens]
  const float *sinks = nullptr;  // [heads, query heads of each]: logits that take their share of the mass, or null
  float *mass = nullptr;       // [rows, heads, slots]: weights of leading slots, summed over query heads, or null
  int sink = 0;                // positions below are seen by every token that comes after them
};

void attend_rows(const bf16 *q, const bf16 *k, const bf16 *v, const RowPlan &plan, float *attn, float *largest,
                 float *total, const int64_t *strides, const int *sizes, int num_threads);

void eviction_victims(const float *score, const int *position, const bool *is_protected, int *slot, int64_t num_lines,
                 int num_slots, int num_threads);

void place_of_largest(const bf16 *rows, int *place, int64_t num_rows, int64_t width, int num_threads);

void column_sums(const bf16 *q, const bf16 *k, const float *lse, float *sums, const int64_t *strides, const int *sizes,
                 Instructions instructions, int num_threads);

int64_t attend_workspace(int num_keys, int dim);

void attend(const bf16 *q, const bf16 *k, const bf16 *v, float *attn, float *largest, float *total, bf16 *workspace,
            const int64_t *strides, const int *sizes, Instructions instructions, int num_threads);

}  // namespace hpu_duo
