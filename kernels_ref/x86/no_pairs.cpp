// What stands for the kernels that multiply pairs of bfloat16, in a library for a CPU without AVX512-BF16.

#include <stdexcept>

#include "kernels.h"
#include "quantised.h"

namespace hpu_duo {

namespace {

[[noreturn]] void refuse() {
  throw std::invalid_argument("expected float32 inputs on a CPU without AVX512-BF16, got BFloat16");
}

}  // namespace

bool have_tiles() { return false; }

void linear(const bf16 *, const Weight *, int64_t, const int *, int64_t, int64_t, Instructions, int) { refuse(); }

void quantised_linears(const bf16 *, const QuantisedWeight *, int64_t, const int *, int64_t, int64_t, int) { refuse(); }

void attend_rows(const bf16 *, const bf16 *, const bf16 *, const RowPlan &, float *, float *, float *, const int64_t *,
                 const int *, int) {
  refuse();
}

void eviction_victims(const float *, const int *, const bool *, int *, int64_t, int, int) { refuse(); }

void place_of_largest(const bf16 *, int *, int64_t, int64_t, int) { refuse(); }

void column_sums(const bf16 *, const bf16 *, const float *, float *, const int64_t *, const int *, Instructions, int) {
  refuse();
}

int64_t attend_workspace(int, int) { refuse(); }

void attend(const bf16 *, const bf16 *, const bf16 *, float *, float *, float *, bf16 *, const int64_t *, const int *,
            Instructions, int) {
  refuse();
}

}  // namespace hpu_duo
