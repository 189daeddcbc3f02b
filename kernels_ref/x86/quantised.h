// Products of rows with a weight of codes, as quantised_operator.cpp calls them; quantised.cpp says more.

#pragma once

#include <cstdint>

#include "kernels.h"

namespace hpu_duo {

enum class CodeKind { kInt8, kFp8, kInt4 };
enum class ScaleKind { kFloat, kBFloat16, kHalf };

// A weight [outputs, inputs] in panels of 32 outputs, and where the products with it go.
struct QuantisedWeight {
  const uint8_t *codes;  // see quantised.cpp
  const void *scales;    // [panels][groups][32]
  const int8_t *zeros;   // of the same shape: codes of zero less the middle of all codes; or null, for the middle
  const float *bias;     // padded to whole panels, or null
  bf16 *y;
  int64_t outputs, groups, group;  // `group` inputs share a scale
  CodeKind kind;
  ScaleKind scale_kind;
};

void quantised_linears(const bf16 *x, const QuantisedWeight *weights, int64_t num_weights, const int *live, int64_t rows,
                       int64_t inputs, int num_threads);

}  // namespace hpu_duo
