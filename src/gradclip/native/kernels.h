// What every instruction set offers: kernels over one block of dense memory.
#pragma once
#include <cstdint>

namespace gradclip {

constexpr int64_t BLOCK = 65536;  // elements per partial result
constexpr int TILE = 128;         // neighbouring units measured together

enum Dtype : uint8_t { FLOAT64, FLOAT32, BFLOAT16, FLOAT16, NO_MEMORY = 255 };

constexpr int64_t itemsize(uint8_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

struct Kernels {
    // Sum of |x / divisor|^p and the largest |x| of n <= BLOCK elements.
    void (*measure)(uint8_t dtype, const char* x, int64_t n, double p, double divisor,
                    double* power, double* peak);
    // The same for `width` <= TILE neighbours; their k-th elements lie side by side at x + k * stride.
    void (*measure_tile)(uint8_t dtype, const char* x, int64_t n, int64_t stride, int width, double p,
                         const double* divisors, double* powers, double* peaks);
    void (*count_nonfinite)(uint8_t dtype, const char* x, int64_t n, int64_t* nan, int64_t* inf);
    void (*scale)(uint8_t dtype, const char* x, char* y, int64_t n, double coef);
    // Says whether anything changed; where y is x, writes only what did.
    bool (*clamp)(uint8_t dtype, const char* x, char* y, int64_t n, double low, double high);
};

extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512;

}  // namespace gradclip
