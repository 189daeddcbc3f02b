// The tile registers of AMX: eight, of 16 rows with 64 bytes each, and the product of pairs of bfloat16.
//
// `HardwareTiles` are the instructions; `ModelTiles` are what the manual says that they compute, in plain C++.
// Sources that use tiles take one of the two as a template parameter, so they can be tested on any machine.
// An object of either class holds the configured registers of its thread while it lives.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace hpu_duo {
namespace {

constexpr int kNumTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row
constexpr int kTileItems = kTileRows * kTileBytes / (int)sizeof(bf16);

#ifdef __AMX_BF16__

class HardwareTiles {
 public:
  HardwareTiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int r = 0; r < kNumTiles; ++r) config.bytes[r] = kTileBytes, config.rows[r] = kTileRows;
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~HardwareTiles() { asm volatile("tilerelease" : : : "memory"); }
  HardwareTiles(const HardwareTiles &) = delete;
  HardwareTiles &operator=(const HardwareTiles &) = delete;

  // Asks the system for the registers, once per process.
  static bool are_available() {
    static const bool given = [] {
      constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, ...)
      return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return given;
  }

  template <int R>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(R));
  }
  // Rows `stride` bytes apart.
  template <int R>
  static void load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(R) : "memory");
  }
  template <int R>
  static void store(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(R) : "memory");
  }
  // C[m][n] += A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1], summed over k.
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

#endif

class ModelTiles {
 public:
  template <int R>
  static void zero() {
    std::memset(bytes_[R], 0, sizeof(bytes_[R]));
  }
  template <int R>
  static void load(const void *from, int64_t stride) {
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy(bytes_[R][row], (const char *)from + row * stride, kTileBytes);
  }
  template <int R>
  static void store(void *to, int64_t stride) {
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy((char *)to + row * stride, bytes_[R][row], kTileBytes);
  }
  // Even and odd items are summed on their own, from zero, fused and flushing what is denormal.
  template <int C, int A, int B>
  static void multiply() {
    constexpr int kColumns = kTileBytes / (int)sizeof(float);
    for (int m = 0; m < kTileRows; ++m)
      for (int n = 0; n < kColumns; ++n) {
        float sums[2] = {};
        for (int k = 0; k < kColumns; ++k)
          for (int odd = 0; odd < 2; ++odd)
            sums[odd] = flushed(std::fma(item(A, m, 2 * k + odd), item(B, k, 2 * n + odd), sums[odd]));
        float *c = (float *)bytes_[C][m] + n;
        *c = flushed(flushed(*c) + flushed(sums[0] + sums[1]));
      }
  }

 private:
  static float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
  static float item(int tile, int row, int column) {
    const uint32_t bits = (uint32_t)((const bf16 *)bytes_[tile][row])[column] << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return flushed(x);
  }
  alignas(64) static inline thread_local char bytes_[kNumTiles][kTileRows][kTileBytes];
};

}  // namespace
}  // namespace hpu_duo
