// Products of bfloat16 rows with a weight that is packed once; see panels.h for its layout.
//
// One row runs at the speed of memory, and many rows at that of the instructions: rows are taken in blocks whose
// inputs stay in the second-level cache while the panels of the weight go by.

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "panels.h"
#include "tile_product.h"
#include "vector_product.h"

namespace hpu_duo {
namespace {

constexpr int64_t kLeastTileRows = 2;  // one row is bound by memory, which vectors read a little faster
constexpr int64_t kSums = 1 << 18;  // of a block, held between two parts of the inputs

struct Job {
  const bf16 *x;
  const Weight *weights;
  int64_t num_weights, rows, inputs;
};

// `rows` rows from `row` on with the panels [begin, end) of a weight. They are laid out already if all inputs are.
template <class Product>
void multiply_weight(const Job &job, const Weight &weight, Product &product, int64_t row, int64_t rows, int64_t begin,
                     int64_t end, int64_t depth) {
  static thread_local Buffer<float> buffer;
  const bool is_whole = depth >= job.inputs;
  const int64_t padded = divide_up(rows, kTileRows) * kTileRows;
  const int64_t width = is_whole ? end - begin : std::min(end - begin, std::max<int64_t>(kSums / padded / kPanel, 1));
  float *sums = is_whole ? nullptr : buffer.reserve(padded * width * kPanel);
  for (int64_t panel = begin; panel < end; panel += width) {
    const int panels = (int)std::min(width, end - panel);
    for (int64_t input = 0; input < job.inputs; input += depth) {
      const int count = (int)std::min(depth, job.inputs - input);
      if (!is_whole) product.lay_out(job.x + row * job.inputs + input, job.inputs, (int)rows, count);
      const Outputs out{weight.y + row * weight.outputs + panel * kPanel,
                        weight.outputs,
                        weight.outputs - panel * kPanel,
                        weight.bias ? weight.bias + panel * kPanel : nullptr,
                        sums,
                        width * kPanel,
                        input == 0,
                        input + count == job.inputs};
      product.multiply(weight.packed + (panel * job.inputs + input) * kPanel, job.inputs * kPanel, panels, out);
    }
  }
}

// `rows` rows from `row` on with the panels [begin, end) of all weights, counted one weight after the other.
template <class Product>
void multiply_block(const Job &job, Product &product, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const int64_t depth = even_step(job.inputs, Product::kBlockItems / rows, kDepth);
  if (depth >= job.inputs) product.lay_out(job.x + row * job.inputs, job.inputs, (int)rows, (int)job.inputs);
  int64_t first = 0;
  for (const Weight *weight = job.weights; weight < job.weights + job.num_weights; ++weight) {
    const int64_t panels = divide_up(weight->outputs, kPanel);
    const int64_t from = std::clamp<int64_t>(begin - first, 0, panels), to = std::clamp<int64_t>(end - first, 0, panels);
    if (from < to) multiply_weight(job, *weight, product, row, rows, from, to, depth);
    first += panels;
  }
}

template <class Product>
void multiply_all(const Job &job, int num_threads) {
  if (!job.rows) return;
  int64_t panels = 0;
  for (int64_t n = 0; n < job.num_weights; ++n) panels += divide_up(job.weights[n].outputs, kPanel);
  const int64_t step = even_step(job.rows, Product::kMaxRows, Product::kRowStep);
  const int64_t blocks = divide_up(job.rows, step);
  // Blocks are shared out whole if that is fair, else each is cut by outputs.
  const int64_t cuts = blocks % num_threads ? std::min<int64_t>(num_threads, panels) : 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Product product;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < blocks * cuts; ++item) {
      const int64_t row = item / cuts * step, cut = item % cuts;
      multiply_block(job, product, row, std::min(step, job.rows - row), cut * panels / cuts,
                     (cut + 1) * panels / cuts);
    }
  }
}

}  // namespace

bool have_tiles() {
#ifdef __AMX_BF16__
  return HardwareTiles::are_available();
#else
  return false;
#endif
}

// y[rows, outputs] = x[rows, inputs] * weight^T + bias for each weight. `inputs` are a multiple of 32. `live` is null or
// two numbers: if `rows` is the first one, only as many rows as the second says are computed, the others are 0.
void linear(const bf16 *x, const Weight *weights, int64_t num_weights, const int *live, int64_t rows, int64_t inputs,
            Instructions instructions, int num_threads) {
  Job job{x, weights, num_weights, rows, inputs};
  if (live && rows == live[0] && live[1] < rows) {
    job.rows = live[1];
    for (const Weight *weight = weights; weight < weights + num_weights; ++weight)
      std::fill(weight->y + job.rows * weight->outputs, weight->y + rows * weight->outputs, (bf16)0);
  }
  if (instructions == Instructions::kBest)
    instructions = job.rows >= kLeastTileRows && have_tiles() ? Instructions::kTiles : Instructions::kVectors;
  switch (instructions) {
#ifdef __AMX_BF16__
    case Instructions::kTiles: return multiply_all<TileProduct<HardwareTiles>>(job, num_threads);
#endif
    case Instructions::kModel: return multiply_all<TileProduct<ModelTiles>>(job, num_threads);
    default: return multiply_all<VectorProduct>(job, num_threads);
  }
}

}  // namespace hpu_duo
