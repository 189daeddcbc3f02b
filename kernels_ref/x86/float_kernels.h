// What the sources that are compiled for one number of lanes define, in a namespace of its own for each.

#pragma once

#include "floats.h"

#if HPU_DUO_LANES == 16
#define HPU_DUO_VARIANT lanes16
#elif HPU_DUO_LANES == 8
#define HPU_DUO_VARIANT lanes8
#else
#define HPU_DUO_VARIANT lanes_model
#endif

namespace hpu_duo {
namespace HPU_DUO_VARIANT {

void linear(const float *x, const FloatWeight *weights, int64_t num_weights, const int *live, int64_t rows,
            int64_t inputs, int num_threads);

}  // namespace HPU_DUO_VARIANT
}  // namespace hpu_duo
