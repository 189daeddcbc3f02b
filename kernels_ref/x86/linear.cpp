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

struct Linear {
  const bf16 *x, *packed;
  const float *bias;
  bf16 *y;
  int64_t rows, outputs, inputs;
};

// `rows` rows from `row` on with the panels [begin, end).
template <class Product>
void multiply_block(const Linear &job, Product &product, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  static thread_local Buffer<float> buffer;
  const int64_t depth = even_step(job.inputs, Product::kBlockItems / rows, kDepth);
  const bool is_whole = depth >= job.inputs;
  const int64_t padded = divide_up(rows, kTileRows) * kTileRows;
  const int64_t width = is_whole ? end - begin : std::min(end - begin, std::max<int64_t>(kSums / padded / kPanel, 1));
  float *sums = is_whole ? nullptr : buffer.reserve(padded * width * kPanel);
  for (int64_t panel = begin; panel < end; panel += width) {
    const int panels = (int)std::min(width, end - panel);
    for (int64_t input = 0; input < job.inputs; input += depth) {
      const int count = (int)std::min(depth, job.inputs - input);
      product.lay_out(job.x + row * job.inputs + input, job.inputs, (int)rows, count);
      const Outputs out{job.y + row * job.outputs + panel * kPanel,
                        job.outputs,
                        job.outputs - panel * kPanel,
                        job.bias ? job.bias + panel * kPanel : nullptr,
                        sums,
                        width * kPanel,
                        input == 0,
                        input + count == job.inputs};
      product.multiply(job.packed + (panel * job.inputs + input) * kPanel, job.inputs * kPanel, panels, out);
    }
  }
}

template <class Product>
void multiply_all(const Linear &job, int num_threads) {
  if (!job.rows) return;
  const int64_t panels = divide_up(job.outputs, kPanel);
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

// y[rows, outputs] = x[rows, inputs] * weight^T + bias. `inputs` are a multiple of 32. `bias` is null or padded to
// whole panels. `live` is null or two numbers: if `rows` is the first one, only as many rows as the second says are
// computed, the others are 0.
void linear(const bf16 *x, const bf16 *packed, const float *bias, const int *live, bf16 *y, int64_t rows,
            int64_t outputs, int64_t inputs, Instructions instructions, int num_threads) {
  if (live && rows == live[0] && live[1] < rows) {
    std::fill(y + live[1] * outputs, y + rows * outputs, (bf16)0);
    rows = live[1];
  }
  const Linear job{x, packed, bias, y, rows, outputs, inputs};
  if (instructions == Instructions::kBest)
    instructions = rows >= kLeastTileRows && have_tiles() ? Instructions::kTiles : Instructions::kVectors;
  switch (instructions) {
#ifdef __AMX_BF16__
    case Instructions::kTiles: return multiply_all<TileProduct<HardwareTiles>>(job, num_threads);
#endif
    case Instructions::kModel: return multiply_all<TileProduct<ModelTiles>>(job, num_threads);
    default: return multiply_all<VectorProduct>(job, num_threads);
  }
}

}  // namespace hpu_duo
