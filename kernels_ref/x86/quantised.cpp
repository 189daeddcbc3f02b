// Products of bfloat16 rows with a weight of 8-bit or 4-bit codes, which is read as it is stored: AVX512-BF16.
//
// Codes lie in panels of 32 outputs. Bytes: [outputs / 32][inputs / 2][32][2]. Nibbles: [outputs / 32][inputs / 8][32][2]
// words of 16 bits, whose four nibbles, from the lowest, are inputs 0 + j, 2 + j, 4 + j and 6 + j, j being the last index.
//
// All codes are exact in bfloat16. Products with them are summed in float32 for each group of inputs, and the sum of a
// group is multiplied with its scale. A few rows read codes once, into registers. More rows read some codes at a time
// as bfloat16, from the second-level cache.

#include "quantised.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "panels.h"

namespace hpu_duo {
namespace {

constexpr int kFewRows = 4;             // codes are read into registers, bytes as float32
constexpr int kSomeRows = 12;           // and as bfloat16: more rows would widen them again and again
constexpr int kRowStep = 6;             // rows of a pass over expanded codes: 24 sums stay in registers
constexpr int kFirstRows = 4;           // rows of the pass that expands them
constexpr int64_t kRowBlock = 240;      // most rows for which codes are expanded once, with parts of most inputs
constexpr int64_t kPartInputs = 1024;   // inputs of a part: its expanded codes take 128 KiB of two panels
constexpr int kVectors = kPanel / kLanes;

inline __m512 scale_at(const QuantisedWeight &weight, int64_t place) {
  switch (weight.scale_kind) {
    case ScaleKind::kFloat: return _mm512_loadu_ps((const float *)weight.scales + place);
    case ScaleKind::kHalf:
      return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)weight.scales + place)));
    default: {
      const __m256i bits = _mm256_loadu_si256((const __m256i *)((const uint16_t *)weight.scales + place));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }
}

inline __m512 zero_at(const QuantisedWeight &weight, int64_t place) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(weight.zeros + place))));
}

// Sixteen codes of a byte each.
template <CodeKind kind>
inline __m512 values_of(const uint8_t *codes) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
  if constexpr (kind == CodeKind::kInt8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  // e4m3 to float32: the sign goes to the front, the rest to the end of the exponent, which is 120 too small.
  const __m512i shifted = _mm512_slli_epi32(_mm512_cvtepi8_epi32(bytes), 20);
  const __m512 small = _mm512_castsi512_ps(_mm512_and_si512(shifted, _mm512_set1_epi32((int)0x87F00000)));
  return _mm512_mul_ps(small, _mm512_set1_ps(0x1p120f));
}

// Words of four nibbles to bfloat16, for the nibble that `shift` moves to the front: code - 8.
class Nibbles {
 public:
  Nibbles() {
    alignas(64) uint16_t table[32];
    for (int code = 0; code < 32; ++code) {
      const float value = (float)(code % 16 - 8);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      table[code] = (uint16_t)(bits >> 16);
    }
    table_ = _mm512_load_si512(table);
  }
  template <int kShift>
  inline __m512bh at(__m512i words) const {
    // An index has five bits that matter, and the table does not depend on the fifth.
    const __m512i index = kShift ? _mm512_srli_epi16(words, kShift) : words;
    return (__m512bh)_mm512_permutexvar_epi16(index, table_);
  }

 private:
  __m512i table_;
};

inline __m512bh pair_at(const bf16 *x) {
  uint32_t both;
  std::memcpy(&both, x, sizeof(both));
  return (__m512bh)_mm512_set1_epi32((int)both);
}

template <int MR, int N>
inline __attribute__((always_inline)) void add_pair(__m512 (&sum)[MR][N], const __m512bh (&right)[N], const bf16 *x,
                                                    int64_t stride) {
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    const __m512bh left = pair_at(x + m * stride);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], left, right[n]);
  }
}

// Pairs of neighbours, summed: of 32 numbers 16.
inline __m512 sum_of_pairs(__m512 low, __m512 high) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_ps(_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high));
}

inline void store(const QuantisedWeight &weight, int64_t row, int64_t panel, __m512 low, __m512 high) {
  const Outputs out{(bf16 *)weight.y + panel * kPanel, weight.outputs, weight.outputs - panel * kPanel,
                    weight.bias ? weight.bias + panel * kPanel : nullptr, nullptr, 0, true, true};
  out.finish(row, 0, low, high);
}

struct Job {
  const bf16 *x;
  const float *wide;      // x in float32, where few rows are multiplied with bytes
  const float *sums;      // of x over groups [rows][groups], where the weight has zero points
  const QuantisedWeight weight;
  int64_t inputs;

  // The same rows without the first ones.
  Job from(int64_t row) const {
    QuantisedWeight rest = weight;
    rest.y = (bf16 *)rest.y + row * rest.outputs;
    return {x + row * inputs, nullptr, sums ? sums + row * weight.groups : nullptr, rest, inputs};
  }
  int64_t bytes_per_pair() const { return weight.kind == CodeKind::kInt4 ? kPanel : 2 * kPanel; }
  const uint8_t *codes(int64_t panel, int64_t input) const {
    return weight.codes + (panel * inputs + input) / 2 * bytes_per_pair();
  }
  __m512 sum_of(int64_t row, int64_t group) const { return _mm512_set1_ps(sums[row * weight.groups + group]); }
  // Sums of all groups, after one more.
  inline __m512 scaled(int64_t row, int64_t panel, int64_t group, int vector, __m512 sum, __m512 total) const {
    const int64_t place = (panel * weight.groups + group) * kPanel + vector * kLanes;
    if (weight.zeros)
      sum = _mm512_fnmadd_ps(zero_at(weight, place), sum_of(row, group), sum);
    return _mm512_fmadd_ps(sum, scale_at(weight, place), total);
  }
};

// All of a few rows with neighbouring panels of bytes.
template <CodeKind kind, int MR, int NP>
inline __attribute__((always_inline)) void few_bytes(const Job &job, int64_t panel) {
  constexpr int kParts = 4 * NP;  // a vector has a pair of inputs for each of eight outputs
  __m512 total[MR][2 * NP];
  for (auto &each : total)
    for (auto &vector : each) vector = _mm512_setzero_ps();
  for (int64_t group = 0; group < job.weight.groups; ++group) {
    const int64_t begin = group * job.weight.group, end = std::min(begin + job.weight.group, job.inputs);
    __m512 sum[MR][kParts];
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < kParts; ++n) sum[m][n] = _mm512_setzero_ps();
    const uint8_t *codes = job.codes(panel, begin);
    const int64_t ahead = job.inputs * kPanel;
    for (int64_t input = begin; input < end; input += 2, codes += 2 * kPanel) {
      __m512 x[MR];
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) {
        double both;
        std::memcpy(&both, job.wide + m * job.inputs + input, sizeof(both));
        x[m] = _mm512_castpd_ps(_mm512_set1_pd(both));
      }
#pragma GCC unroll 2
      for (int p = 0; p < NP; ++p) {
        const uint8_t *from = codes + p * ahead;
        _mm_prefetch((const char *)(from + 2048), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          const __m512 value = values_of<kind>(from + n * kLanes);
#pragma GCC unroll 4
          for (int m = 0; m < MR; ++m) sum[m][4 * p + n] = _mm512_fmadd_ps(value, x[m], sum[m][4 * p + n]);
        }
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < 2 * NP; ++n)
        total[m][n] = job.scaled(m, panel + n / 2, group, n % 2,
                                 sum_of_pairs(sum[m][2 * n], sum[m][2 * n + 1]), total[m][n]);
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < NP; ++p) store(job.weight, m, panel + p, total[m][2 * p], total[m][2 * p + 1]);
}

// Which words of two vectors are the upper halves of float32.
inline __m512i upper_halves() {
  alignas(64) uint16_t words[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) words[i] = (uint16_t)(2 * i + 1);
  return _mm512_load_si512(words);
}

// Pairs of codes of sixteen outputs, which are exact in bfloat16.
template <CodeKind kind>
inline __m512i pairs_of(const uint8_t *codes, __m512i upper) {
  const __m512i low = _mm512_castps_si512(values_of<kind>(codes));
  return _mm512_permutex2var_epi16(low, upper, _mm512_castps_si512(values_of<kind>(codes + kLanes)));
}

// Some rows with a panel of bytes.
template <CodeKind kind, int MR>
inline __attribute__((always_inline)) void some_bytes(const Job &job, int64_t panel) {
  const __m512i upper = upper_halves();
  __m512 total[MR][kVectors];
  for (auto &each : total)
    for (auto &vector : each) vector = _mm512_setzero_ps();
  for (int64_t group = 0; group < job.weight.groups; ++group) {
    const int64_t begin = group * job.weight.group, end = std::min(begin + job.weight.group, job.inputs);
    __m512 sum[MR][kVectors];
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_setzero_ps();
    const uint8_t *codes = job.codes(panel, begin);
    const bf16 *x = job.x + begin;
    for (int64_t input = begin; input < end; input += 2, codes += 2 * kPanel, x += 2) {
      _mm_prefetch((const char *)(codes + 4096), _MM_HINT_T0);
      __m512bh right[kVectors];
#pragma GCC unroll 2
      for (int n = 0; n < kVectors; ++n) right[n] = (__m512bh)pairs_of<kind>(codes + n * 2 * kLanes, upper);
      add_pair(sum, right, x, job.inputs);
    }
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < kVectors; ++n) total[m][n] = job.scaled(m, panel, group, n, sum[m][n], total[m][n]);
  }
  for (int m = 0; m < MR; ++m) store(job.weight, m, panel, total[m][0], total[m][1]);
}

// A few rows with neighbouring panels of nibbles.
template <int MR, int NP>
inline __attribute__((always_inline)) void few_nibbles(const Job &job, int64_t panel) {
  constexpr int kParts = 2 * NP, kChains = MR <= 4 ? 2 : 1, kLast = kChains - 1;
  const Nibbles nibbles;
  __m512 total[MR][kParts];
  for (auto &each : total)
    for (auto &vector : each) vector = _mm512_setzero_ps();
  for (int64_t group = 0; group < job.weight.groups; ++group) {
    const int64_t begin = group * job.weight.group, end = std::min(begin + job.weight.group, job.inputs);
    __m512 sum[MR][kParts][kChains];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < kParts; ++n)
#pragma GCC unroll 2
        for (int chain = 0; chain < kChains; ++chain) sum[m][n][chain] = _mm512_setzero_ps();
    const uint8_t *codes = job.codes(panel, begin);
    const bf16 *x = job.x + begin;
    const int64_t ahead = job.inputs * kPanel / 2;
    for (int64_t input = begin; input < end; input += 8, codes += 4 * kPanel, x += 8) {
#pragma GCC unroll 8
      for (int n = 0; n < kParts; ++n) {
        const uint8_t *from = codes + n / 2 * ahead + n % 2 * 64;
        _mm_prefetch((const char *)(from + 2048), _MM_HINT_T0);
        const __m512i words = _mm512_loadu_si512(from);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          const bf16 *left = x + m * job.inputs;
          sum[m][n][0] = _mm512_dpbf16_ps(sum[m][n][0], pair_at(left), nibbles.at<0>(words));
          sum[m][n][kLast] = _mm512_dpbf16_ps(sum[m][n][kLast], pair_at(left + 2), nibbles.at<4>(words));
          sum[m][n][0] = _mm512_dpbf16_ps(sum[m][n][0], pair_at(left + 4), nibbles.at<8>(words));
          sum[m][n][kLast] = _mm512_dpbf16_ps(sum[m][n][kLast], pair_at(left + 6), nibbles.at<12>(words));
        }
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < kParts; ++n) {
        const __m512 both = kLast ? _mm512_add_ps(sum[m][n][0], sum[m][n][kLast]) : sum[m][n][0];
        total[m][n] = job.scaled(m, panel + n / 2, group, n % 2, both, total[m][n]);
      }
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < NP; ++p) store(job.weight, m, panel + p, total[m][2 * p], total[m][2 * p + 1]);
}

template <int MR, int NP>
void few(const Job &job, int64_t panel) {
  switch (job.weight.kind) {
    case CodeKind::kInt8: return few_bytes<CodeKind::kInt8, MR, NP>(job, panel);
    case CodeKind::kFp8: return few_bytes<CodeKind::kFp8, MR, NP>(job, panel);
    default: return few_nibbles<MR, NP>(job, panel);
  }
}

template <int NP>
void few_rows(const Job &job, int64_t rows, int64_t panel) {
  switch (rows) {
    case 1: return few<1, NP>(job, panel);
    case 2: return few<2, NP>(job, panel);
    // The sums of more rows fill the registers with one panel.
    case 3: return few<3, 1>(job, panel);
    default: return few<4, 1>(job, panel);
  }
}

template <int MR>
void some(const Job &job, int64_t panel) {
  switch (job.weight.kind) {
    case CodeKind::kInt8: return some_bytes<CodeKind::kInt8, MR>(job, panel);
    case CodeKind::kFp8: return some_bytes<CodeKind::kFp8, MR>(job, panel);
    default: return few_nibbles<MR, 1>(job, panel);
  }
}

// Some rows with a panel.
void some_rows(const Job &job, int64_t rows, int64_t panel) {
  // More rows than these do not leave registers to widen codes.
  const int64_t most = job.weight.kind == CodeKind::kInt8 ? kSomeRows : job.weight.kind == CodeKind::kInt4 ? 8 : 6;
  const int64_t step = even_step(rows, most, 1);
  for (int64_t row = 0; row < rows; row += step) {
    const Job part = job.from(row);
    switch (std::min(step, rows - row)) {
      case 1: some<1>(part, panel); break;
      case 2: some<2>(part, panel); break;
      case 3: some<3>(part, panel); break;
      case 4: some<4>(part, panel); break;
      case 5: some<5>(part, panel); break;
      case 6: some<6>(part, panel); break;
      case 7: some<7>(part, panel); break;
      case 8: some<8>(part, panel); break;
      case 9: some<9>(part, panel); break;
      case 10: some<10>(part, panel); break;
      case 11: some<11>(part, panel); break;
      default: some<12>(part, panel);
    }
  }
}

// Some inputs of neighbouring panels, and where the codes lie that are needed after them.
struct Part {
  bf16 *values;  // expanded codes [inputs / 2][32][2], panels `kPartInputs` inputs apart
  const uint8_t *next;
  int64_t next_panel, next_pair;  // bytes from a panel to the next one, and from a pair of inputs
  int64_t panel, input, count;
};

// Sums of a block of rows with neighbouring panels: of the current group, and of the groups before it.
struct Held {
  float *memory;
  int64_t rows;
  int vectors;  // of a row

  float *sums(int64_t row, int vector) const { return memory + (row * vectors + vector) * kLanes; }
  float *totals(int64_t row, int vector) const { return sums(rows + row, vector); }
};

// Where expanded codes of a pair of inputs are: of vector `n`, after the first pair of the part.
inline bf16 *expanded_at(bf16 *values, int n) { return values + n / 2 * kPartInputs * kPanel + n % 2 * 2 * kLanes; }

// Codes that are fetched meanwhile: some bytes for each pair of inputs.
struct Ahead {
  const uint8_t *at;  // or null
  int64_t step;

  inline void fetch() {
    if (at) _mm_prefetch((const char *)at, _MM_HINT_T1), at += step;
  }
};

// How a pass reads codes: expanded before, or as they lie, which expands them for the passes behind it.
struct Expanded {
  template <int MR, int N>
  static inline __attribute__((always_inline)) void add(__m512 (&sum)[MR][N], const Job &job, int64_t, const bf16 *x,
                                                        bf16 *values, int64_t, int64_t count, Ahead &ahead) {
    for (int64_t i = 0; i < count; i += 2, x += 2, values += 2 * kPanel) {
      ahead.fetch();
      __m512bh right[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) right[n] = (__m512bh)_mm512_load_si512(expanded_at(values, n));
      add_pair(sum, right, x, job.inputs);
    }
  }
};

template <CodeKind kind>
struct Bytes {
  template <int MR, int N>
  static inline __attribute__((always_inline)) void add(__m512 (&sum)[MR][N], const Job &job, int64_t panel,
                                                        const bf16 *x, bf16 *values, int64_t input, int64_t count,
                                                        Ahead &ahead) {
    const __m512i upper = upper_halves();
    const uint8_t *codes = job.codes(panel, input);
    const int64_t panel_bytes = job.inputs * kPanel;
    for (int64_t i = 0; i < count; i += 2, x += 2, values += 2 * kPanel, codes += 2 * kPanel) {
      ahead.fetch();
      __m512bh right[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const __m512i pairs = pairs_of<kind>(codes + n / 2 * panel_bytes + n % 2 * 2 * kLanes, upper);
        _mm512_store_si512(expanded_at(values, n), pairs);
        right[n] = (__m512bh)pairs;
      }
      add_pair(sum, right, x, job.inputs);
    }
  }
};

struct Words {
  template <int kShift, int MR, int N>
  static inline __attribute__((always_inline)) void add_nibble(__m512 (&sum)[MR][N], const __m512i (&words)[N],
                                                               const Nibbles &nibbles, const bf16 *x, int64_t stride,
                                                               bf16 *values) {
    __m512bh right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      right[n] = nibbles.at<kShift>(words[n]);
      _mm512_store_si512(expanded_at(values + kShift / 4 * 2 * kPanel, n), (__m512i)right[n]);
    }
    add_pair(sum, right, x + kShift / 4 * 2, stride);
  }
  template <int MR, int N>
  static inline __attribute__((always_inline)) void add(__m512 (&sum)[MR][N], const Job &job, int64_t panel,
                                                        const bf16 *x, bf16 *values, int64_t input, int64_t count,
                                                        Ahead &ahead) {
    const Nibbles nibbles;
    const uint8_t *codes = job.codes(panel, input);
    const int64_t panel_bytes = job.inputs * kPanel / 2;
    for (int64_t i = 0; i < count; i += 8, x += 8, values += 8 * kPanel, codes += 4 * kPanel) {
      for (int pair = 0; pair < 4; ++pair) ahead.fetch();
      __m512i words[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) words[n] = _mm512_loadu_si512(codes + n / 2 * panel_bytes + n % 2 * 64);
      add_nibble<0>(sum, words, nibbles, x, job.inputs, values);
      add_nibble<4>(sum, words, nibbles, x, job.inputs, values);
      add_nibble<8>(sum, words, nibbles, x, job.inputs, values);
      add_nibble<12>(sum, words, nibbles, x, job.inputs, values);
    }
  }
};

template <class Codes, int MR, int NP>
inline __attribute__((always_inline)) void pass(const Job &job, const Part &part, int64_t first, int64_t row, int64_t index,
                                                const Held &held) {
  constexpr int kSums = kVectors * NP;
  const int64_t group_size = job.weight.group;
  // The first passes fetch a panel each.
  Ahead ahead{index < NP ? part.next + index * part.next_panel : nullptr, part.next_pair};
  for (int64_t begin = part.input; begin < part.input + part.count;) {
    const int64_t group = begin / group_size;
    const int64_t end = std::min((group + 1) * group_size, part.input + part.count);
    __m512 sum[MR][kSums];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < kSums; ++n)
        sum[m][n] = begin == group * group_size ? _mm512_setzero_ps() : _mm512_load_ps(held.sums(row + m, n));
    Codes::add(sum, job, part.panel, job.x + (first + row) * job.inputs + begin,
               part.values + (begin - part.input) * kPanel, begin, end - begin, ahead);
    begin = end;
    if (end < std::min((group + 1) * group_size, job.inputs)) {
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < kSums; ++n) _mm512_store_ps(held.sums(row + m, n), sum[m][n]);
      continue;
    }
#pragma GCC unroll 8
    for (int n = 0; n < kSums; ++n) {
      const int64_t place = ((part.panel + n / 2) * job.weight.groups + group) * kPanel + n % 2 * kLanes;
      const __m512 scale = scale_at(job.weight, place);
      const __m512 zero = job.weight.zeros ? zero_at(job.weight, place) : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        __m512 each = sum[m][n];
        if (job.weight.zeros) each = _mm512_fnmadd_ps(zero, job.sum_of(first + row + m, group), each);
        const __m512 before = group ? _mm512_load_ps(held.totals(row + m, n)) : _mm512_setzero_ps();
        sum[m][n] = _mm512_fmadd_ps(each, scale, before);
        if (end < job.inputs) _mm512_store_ps(held.totals(row + m, n), sum[m][n]);
      }
    }
    if (end < job.inputs) continue;
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p)
        store(job.weight, first + row + m, part.panel + p, sum[m][2 * p], sum[m][2 * p + 1]);
  }
}

template <int MR, int NP>
void first_pass(const Job &job, const Part &part, int64_t first, const Held &held) {
  switch (job.weight.kind) {
    case CodeKind::kInt8: return pass<Bytes<CodeKind::kInt8>, MR, NP>(job, part, first, 0, 0, held);
    case CodeKind::kFp8: return pass<Bytes<CodeKind::kFp8>, MR, NP>(job, part, first, 0, 0, held);
    default: return pass<Words, MR, NP>(job, part, first, 0, 0, held);
  }
}

template <int NP>
void passes(const Job &job, const Part &part, int64_t first, int64_t rows, const Held &held) {
  int64_t row = rows < kFirstRows ? 1 : kFirstRows;
  row == 1 ? first_pass<1, NP>(job, part, first, held) : first_pass<kFirstRows, NP>(job, part, first, held);
  const int64_t count = divide_up(rows - row, kRowStep);
  for (int64_t left = count; left > 0; --left) {
    const int64_t some = divide_up(rows - row, left), index = count - left + 1;
    switch (some) {
      case 1: pass<Expanded, 1, NP>(job, part, first, row, index, held); break;
      case 2: pass<Expanded, 2, NP>(job, part, first, row, index, held); break;
      case 3: pass<Expanded, 3, NP>(job, part, first, row, index, held); break;
      case 4: pass<Expanded, 4, NP>(job, part, first, row, index, held); break;
      case 5: pass<Expanded, 5, NP>(job, part, first, row, index, held); break;
      default: pass<Expanded, 6, NP>(job, part, first, row, index, held);
    }
    row += some;
  }
}

// Rows from `first` on with NP neighbouring panels.
template <int NP>
void many_rows(const Job &job, int64_t first, int64_t rows, int64_t panel) {
  static thread_local Buffer<float> sums;
  static thread_local Buffer<bf16> expanded;
  const Held held{sums.reserve(2 * rows * NP * kPanel), rows, kVectors * NP};
  bf16 *values = expanded.reserve(2 * kPartInputs * kPanel);
  const int64_t step = even_step(job.inputs, kPartInputs, kDepth);
  const int64_t panel_bytes = job.inputs / 2 * job.bytes_per_pair();
  for (int64_t input = 0; input < job.inputs; input += step) {
    const int64_t count = std::min(step, job.inputs - input);
    const bool is_last = input + count == job.inputs;
    const uint8_t *next = is_last ? job.codes(panel + NP, 0) : job.codes(panel, input + count);
    passes<NP>(job, {values, next, panel_bytes, job.bytes_per_pair(), panel, input, count}, first, rows, held);
  }
}

float sum_of(const bf16 *x, int64_t count) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += kDepth) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + i), ones);
  return _mm512_reduce_add_ps(sum);
}

void widen(const bf16 *x, int64_t count, float *wide) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(x + i));
    _mm512_storeu_ps(wide + i, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

// Of each row, the sum of the inputs of each group.
void sum_groups(const bf16 *x, const QuantisedWeight &weight, int64_t rows, int64_t inputs, float *sums,
                int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t begin = group * weight.group;
      sums[row * weight.groups + group] = sum_of(x + row * inputs + begin, std::min(weight.group, inputs - begin));
    }
}

}  // namespace

// y[rows, outputs] = x[rows, inputs] * weight^T + bias for each weight. `inputs` are a multiple of 32, and so is `group`,
// unless there is one group only. `live` is null or two numbers: if `rows` is the first one, only as many rows as the
// second says are computed, the others are 0.
void quantised_linears(const bf16 *x, const QuantisedWeight *weights, int64_t num_weights, const int *live, int64_t rows,
                       int64_t inputs, int num_threads) {
  if (live && rows == live[0] && live[1] < rows) {
    for (const QuantisedWeight *weight = weights; weight < weights + num_weights; ++weight)
      std::fill((bf16 *)weight->y + live[1] * weight->outputs, (bf16 *)weight->y + rows * weight->outputs, (bf16)0);
    rows = live[1];
  }
  if (!rows) return;
  static thread_local Buffer<float> wide, sums;
  const bool is_few = rows <= kFewRows;
  int64_t num_sums = 0, pairs = 0;
  bool is_wide = false;
  for (int64_t n = 0; n < num_weights; ++n) {
    num_sums += weights[n].zeros ? rows * weights[n].groups : 0;
    is_wide |= is_few && weights[n].kind != CodeKind::kInt4;
  }
  float *as_floats = is_wide ? wide.reserve(rows * inputs) : nullptr;
  float *of_groups = num_sums ? sums.reserve(num_sums) : nullptr;
  if (is_wide) widen(x, rows * inputs, as_floats);
  std::vector<Job> jobs;
  std::vector<int64_t> ends;  // pairs of panels up to the end of each weight
  for (int64_t n = 0; n < num_weights; ++n) {
    jobs.push_back({x, as_floats, weights[n].zeros ? of_groups : nullptr, weights[n], inputs});
    if (weights[n].zeros) {
      sum_groups(x, weights[n], rows, inputs, of_groups, num_threads);
      of_groups += rows * weights[n].groups;
    }
    pairs += divide_up(weights[n].outputs, 2 * kPanel);
    ends.push_back(pairs);
  }
  const bool is_some = rows <= kSomeRows;
  const int64_t most = kRowBlock * kPartInputs / std::clamp<int64_t>(inputs, kPartInputs / 2, kPartInputs);
  const int64_t step = is_some ? rows : even_step(rows, most, kRowStep), blocks = divide_up(rows, step);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < blocks * pairs; ++item) {
    const int64_t pair = item % pairs, first = item / pairs * step;
    const size_t n = std::upper_bound(ends.begin(), ends.end(), pair) - ends.begin();
    const int64_t panel = (pair - (n ? ends[n - 1] : 0)) * 2;
    const bool is_pair = panel * kPanel + kPanel < weights[n].outputs;
    if (is_few) {
      is_pair && rows <= 2 ? few_rows<2>(jobs[n], rows, panel) : few_rows<1>(jobs[n], rows, panel);
      if (is_pair && rows > 2) few_rows<1>(jobs[n], rows, panel + 1);
    } else if (is_some) {
      some_rows(jobs[n], rows, panel);
      if (is_pair) some_rows(jobs[n], rows, panel + 1);
    } else if (is_pair) {
      many_rows<2>(jobs[n], first, std::min(step, rows - first), panel);
    } else {
      many_rows<1>(jobs[n], first, std::min(step, rows - first), panel);
    }
  }
}

}  // namespace hpu_duo
