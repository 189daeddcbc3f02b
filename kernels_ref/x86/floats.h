// The kernels of float32 arithmetic as operators.cpp calls them: inputs and sums are float32, weights, keys and values
// are stored as bfloat16, float16 or float32. There is a table of them for each number of lanes.

#pragma once

#include <cstdint>

namespace hpu_duo {

enum class Store { kBfloat16, kFloat16, kFloat32 };

// A packed weight, and where the products with it go.
struct FloatWeight {
  const void *packed;
  Store store;
  const float *bias;  // padded to whole panels, or null
  float *y;
  int64_t outputs;
};

struct FloatKernels {
  void (*linear)(const float *x, const FloatWeight *weights, int64_t num_weights, const int *live, int64_t rows,
                 int64_t inputs, int num_threads);
};

extern const FloatKernels kModelOfLanes, kEightLanes, kSixteenLanes;

}  // namespace hpu_duo
