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
  void *y;  // as the inputs: bfloat16, or float32
  int64_t outputs, groups, group;  // `group` inputs share a scale
  CodeKind kind;
  ScaleKind scale_kind;
};

// A weight [outputs, inputs] of int8 in panels of 32 outputs, and where the products with it go.
struct Int8Weight {
  const int8_t *codes;
  const float *scales;  // of each output, padded to whole panels
  const int *sums;      // of the codes of each output, likewise
  const float *bias;    // likewise, or null
  void *y;              // as the inputs: bfloat16, or float32
  int64_t outputs;
};

// Rows that are rounded to int8: half a step to even.
struct Int8Inputs {
  const void *x;
  bool is_bfloat16;    // or float32
  const float *scale;  // of all rows; null: the largest size of each row / 127
  int64_t inputs;
};

constexpr float kLeastLargest = 0x1p-100f;  // so that a row of zeros has a scale

void quantised_linears(const bf16 *x, const QuantisedWeight *weights, int64_t num_weights, const int *live, int64_t rows,
                       int64_t inputs, int num_threads);

}  // namespace hpu_duo
