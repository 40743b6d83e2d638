// One text, compiled once for each instruction set under the name GRADCLIP_KERNELS. Every copy does
// the same operations in the same order and gives the same bits: 32 lanes, no contraction, one libm.
// Only the table has external linkage: the linker could take an inline function that the copies
// share from one that this CPU cannot run.
#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif
#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

namespace gradclip {
namespace {

constexpr int LANES = 32;
constexpr int64_t AHEAD = 2048;   // bytes; a prefetch past the end of an array does nothing
constexpr int64_t READ = 4;       // places read in turns: the CPU's own prefetch ends with each page, and one is not enough
constexpr int64_t WRITTEN = 2;    // places written in turns: more of them cost some CPUs a third of their speed
constexpr int64_t PROBE = 1024;   // elements that tell clamp whether it will have to write

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Bits are signed: without the sign bit they order as magnitudes do, and SSE2 compares signed only.
struct Float64 {
    using Bits = int64_t;
    using Value = double;
    static constexpr Bits infinity = 0x7ff0000000000000, magnitude = 0x7fffffffffffffff;
    static Value widen(Bits bits) { return bits_as<double>(bits); }
    static Bits pack(Value value, uint32_t) { return bits_as<int64_t>(value); }
};

struct Float32 {
    using Bits = int32_t;
    using Value = float;
    static constexpr Bits infinity = 0x7f800000, magnitude = 0x7fffffff;
    static Value widen(Bits bits) { return bits_as<float>(bits); }
    static Bits pack(Value value, uint32_t) { return bits_as<int32_t>(value); }
};

struct BFloat16 {
    using Bits = int16_t;
    using Value = float;
    static constexpr Bits infinity = 0x7f80, magnitude = 0x7fff;
    static constexpr int digits = 7;
    static constexpr double normal = 0x1p-126;
    static Value widen(Bits bits) { return bits_as<float>((uint32_t)(uint16_t)bits << 16); }
    // `half` is 0 for a value that bfloat16 holds; see scale_fast for the others.
    static Bits pack(Value value, uint32_t half) {
        return (Bits)(uint16_t)((bits_as<uint32_t>(value) + half) >> 16);
    }
};

struct Float16 {
    using Bits = int16_t;
    using Value = float;
    static constexpr Bits infinity = 0x7c00, magnitude = 0x7fff;
    static constexpr int digits = 10;
    static constexpr double normal = 0x1p-14;
    static Value widen(Bits bits) {
        const uint32_t sign = ((uint32_t)bits & 0x8000) << 16, low = ((uint32_t)bits & 0x7fff) << 13;
        const uint32_t large = low + (low < 0x0f800000 ? 112u << 23 : 224u << 23);
        const uint32_t small = bits_as<uint32_t>(bits_as<float>(low + (113u << 23)) - 0x1p-14f);
        return bits_as<float>((low < 0x00800000 ? small : large) | sign);
    }
    static Bits pack(Value value, uint32_t) {
        const uint32_t sign = bits_as<uint32_t>(value) >> 16 & 0x8000, low = bits_as<uint32_t>(value) & 0x7fffffff;
        const uint32_t small = bits_as<uint32_t>(bits_as<float>(low) + 0.5f) - 0x3f000000;
        const uint32_t large = (low - (112u << 23) + 0xfff + (low >> 13 & 1)) >> 13;
        const uint32_t finite = low < 0x38800000 ? small : low < 0x47800000 ? large : 0x7c00;
        return (Bits)(uint16_t)(sign | (low > 0x7f800000 ? 0x7e00 | (low >> 13 & 0x3ff) : finite));
    }
};

template <class T>
inline typename T::Bits load(const char* x, int64_t i) {
    typename T::Bits bits;  // by memcpy: an address need not be aligned
    memcpy(&bits, x + i * (int64_t)sizeof bits, sizeof bits);
    return bits;
}

template <class T>
inline void store(char* y, int64_t i, typename T::Bits bits) {
    memcpy(y + i * (int64_t)sizeof bits, &bits, sizeof bits);
}

template <class T>
inline void widen_group(const char* x, typename T::Value* values) {
    for (int j = 0; j < LANES; j++) values[j] = T::widen(load<T>(x, j));
}

template <class T>
inline void pack_group(const typename T::Value* values, uint32_t half, typename T::Bits* out) {
    for (int j = 0; j < LANES; j++) out[j] = T::pack(values[j], half);
}

// Several times faster than what the compiler makes of the lines above.
#if defined(__AVX512F__)
template <>
inline void widen_group<Float16>(const char* x, float* values) {
    for (int j = 0; j < LANES; j += 16)
        _mm512_storeu_ps(values + j, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + 2 * j))));
}

template <>
inline void pack_group<Float16>(const float* values, uint32_t, int16_t* out) {
    const __m256i low = _mm512_cvtps_ph(_mm512_loadu_ps(values), 0);
    const __m256i high = _mm512_cvtps_ph(_mm512_loadu_ps(values + 16), 0);
    _mm512_storeu_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
#elif defined(__F16C__)
template <>
inline void widen_group<Float16>(const char* x, float* values) {
    for (int j = 0; j < LANES; j += 8)
        _mm256_storeu_ps(values + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + 2 * j))));
}

template <>
inline void pack_group<Float16>(const float* values, uint32_t, int16_t* out) {
    for (int j = 0; j < LANES; j += 16) {
        const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(values + j), 0);
        const __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps(values + j + 8), 0);
        _mm256_storeu_si256((__m256i*)(out + j), _mm256_set_m128i(high, low));
    }
}
#endif

// The bits of a number that T holds.
template <class T>
inline typename T::Bits pack_one(double value) {
    typename T::Value values[LANES] = {(typename T::Value)value};
    typename T::Bits out[LANES];
    pack_group<T>(values, 0, out);
    return out[0];
}

template <class T>
inline void prefetch(const char* x, int64_t elements) {
    for (int64_t byte = 0; byte < elements * (int64_t)sizeof(typename T::Bits); byte += 64) PREFETCH(x + byte);
}

// Copies of the last few elements, with zeros up to a whole group.
template <class T>
struct Padded {
    char bytes[LANES * sizeof(typename T::Bits)] = {};
    Padded(const char* x, int64_t n) { memcpy(bytes, x, (size_t)n * sizeof(typename T::Bits)); }
};

// The square of a float is exact in float64, so that fusing it with the sum changes no bit.
inline double plus_square(double sum, float x) {
#if defined(__FMA__)
    return __builtin_fma((double)x, (double)x, sum);
#else
    return sum + (double)x * (double)x;
#endif
}
inline double plus_square(double sum, double x) { return sum + x * x; }

struct Square {
    template <class Value>
    double operator()(double sum, Value x) const { return plus_square(sum, x); }
};
struct Absolute {
    double operator()(double sum, double x) const { return sum + fabs(x); }
};
struct Power {
    double p;
    double operator()(double sum, double x) const { return sum + pow(fabs(x), p); }
};
struct Nothing {
    double operator()(double sum, double) const { return sum; }
};

template <class Body>
inline void with_power(double p, Body body) {
    if (p == 2) return body(Square{});
    if (p == 1) return body(Absolute{});
    if (p == (double)INFINITY) return body(Nothing{});
    return body(Power{p});
}

template <class Body>
inline auto with_type(uint8_t dtype, Body body) {
    switch (dtype) {
        case FLOAT64: return body(Float64{});
        case FLOAT32: return body(Float32{});
        case BFLOAT16: return body(BFloat16{});
        default: return body(Float16{});
    }
}

template <class T>
inline void raise_peaks(const char* x, typename T::Bits* peaks) {
    for (int j = 0; j < LANES; j++) {
        const typename T::Bits bits = load<T>(x, j) & T::magnitude;
        peaks[j] = bits > peaks[j] ? bits : peaks[j];
    }
}

template <class T>
inline double as_peak(typename T::Bits bits) {
    return bits > T::infinity ? (double)NAN : (double)T::widen(bits);
}

template <class T>
inline double largest(const typename T::Bits* peaks) {
    typename T::Bits peak = 0;
    for (int j = 0; j < LANES; j++) peak = peaks[j] > peak ? peaks[j] : peak;
    return as_peak<T>(peak);
}

// Visits all groups, one of each stream in turns, the few that are left over last. The streams do not begin at the
// same place of their pages: there a load waits for the store before it.
template <int64_t streams, class Visit>
inline void in_turns(int64_t groups, Visit visit) {
    const int64_t each = groups / streams * 31 / 32;
    for (int64_t i = 0; i < each; i++)
        for (int64_t s = 0; s < streams; s++) visit(s * each + i);
    for (int64_t i = streams * each; i < groups; i++) visit(i);
}

// Adds the lanes of `width` neighbours pairwise into their first lanes.
inline void fold(double* lanes, int width) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half * width; i++) lanes[i] += lanes[i + half * width];
}

// What a block adds up to, one sum for each lane.
template <class T, class Plus>
struct Sums {
    double lanes[LANES] = {};

    void add(const char* group, Plus plus) {
        typename T::Value values[LANES];
        widen_group<T>(group, values);
        for (int j = 0; j < LANES; j++) lanes[j] = plus(lanes[j], values[j]);
    }
    double total() {
        fold(lanes, 1);
        return lanes[0];
    }
};

// The compiler takes what it widened through memory, which costs a quarter of the speed.
#if defined(__AVX512F__)
inline __m512 widened(Float16, __m256i bits) { return _mm512_cvtph_ps(bits); }
inline __m512 widened(BFloat16, __m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <class T>
struct Squares {
    __m512d lanes[LANES / 8] = {};

    void add(const char* group, Square) {
        for (int j = 0; j < LANES / 16; j++) {
            const __m512 values = widened(T{}, _mm256_loadu_si256((const __m256i*)(group + 32 * j)));
            plus_squares(lanes[2 * j], _mm512_castps512_ps256(values));
            plus_squares(lanes[2 * j + 1], _mm512_extractf32x8_ps(values, 1));
        }
    }
    static void plus_squares(__m512d& sums, __m256 values) {
        const __m512d x = _mm512_cvtps_pd(values);
        sums = _mm512_fmadd_pd(x, x, sums);
    }
    double total() {
        double sums[LANES];
        for (int j = 0; j < LANES / 8; j++) _mm512_storeu_pd(sums + 8 * j, lanes[j]);
        fold(sums, 1);
        return sums[0];
    }
};
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline __m256 widened(Float16, __m128i bits) { return _mm256_cvtph_ps(bits); }
inline __m256 widened(BFloat16, __m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

template <class T>
struct Squares {
    __m256d lanes[LANES / 4] = {};

    void add(const char* group, Square) {
        for (int j = 0; j < LANES / 8; j++) {
            const __m256 values = widened(T{}, _mm_loadu_si128((const __m128i*)(group + 16 * j)));
            plus_squares(lanes[2 * j], _mm256_castps256_ps128(values));
            plus_squares(lanes[2 * j + 1], _mm256_extractf128_ps(values, 1));
        }
    }
    static void plus_squares(__m256d& sums, __m128 values) {
        const __m256d x = _mm256_cvtps_pd(values);
        sums = _mm256_fmadd_pd(x, x, sums);
    }
    double total() {
        double sums[LANES];
        for (int j = 0; j < LANES / 4; j++) _mm256_storeu_pd(sums + 4 * j, lanes[j]);
        fold(sums, 1);
        return sums[0];
    }
};
#endif
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
template <>
struct Sums<BFloat16, Square> : Squares<BFloat16> {};
template <>
struct Sums<Float16, Square> : Squares<Float16> {};
#endif

template <class T, class Plus>
inline void measure_block(const char* x, int64_t n, Plus plus, double* power, double* peak) {
    Sums<T, Plus> sums;
    typename T::Bits peaks[LANES] = {};
    auto add = [&](const char* group) {
        sums.add(group, plus);
        raise_peaks<T>(group, peaks);
    };
    constexpr int64_t bytes = LANES * sizeof(typename T::Bits);
    const int64_t groups = n / LANES;
    in_turns<READ>(groups, [&](int64_t i) {
        prefetch<T>(x + i * bytes + AHEAD, LANES);
        add(x + i * bytes);
    });
    if (n % LANES) add(Padded<T>(x + groups * bytes, n % LANES).bytes);
    *power = sums.total();
    *peak = largest<T>(peaks);
}

void measure(uint8_t dtype, const char* x, int64_t n, double p, double divisor, double* power, double* peak) {
    with_type(dtype, [=](auto type) {
        using T = decltype(type);
        with_power(p, [=](auto plus) {
            auto divided = [=](double sum, double value) { return plus(sum, value / divisor); };
            if (divisor == 1) return measure_block<T>(x, n, plus, power, peak);
            return measure_block<T>(x, n, divided, power, peak);
        });
    });
    if (p == (double)INFINITY) *power = *peak;
}

// Element k of every unit goes to lane k % LANES, in the order of measure_block: the same bits in either direction.
template <class T, class Plus>
inline void measure_columns(const char* x, int64_t n, int64_t stride, int width, const double* divisors,
                            Plus plus, double* powers, double* peaks) {
    constexpr int64_t size = sizeof(typename T::Bits);
    double lanes[LANES * TILE] = {};
    typename T::Bits tops[TILE] = {};
    auto add = [&](const char* group, int first, double* lane) {
        typename T::Value values[LANES];
        widen_group<T>(group, values);
        if (divisors)
            for (int j = 0; j < LANES; j++) lane[j] = plus(lane[j], (double)values[j] / divisors[first + j]);
        else
            for (int j = 0; j < LANES; j++) lane[j] = plus(lane[j], values[j]);
        raise_peaks<T>(group, tops + first);
    };
    auto add_row = [&](int64_t k) {
        const char* row = x + k * stride;
        double* lane = lanes + k % LANES * TILE;
        prefetch<T>(row + (k + 8 < n ? 8 * stride : 0), width);
        int j = 0;
        for (; j + LANES <= width; j += LANES) add(row + j * size, j, lane + j);
        if (j < width) add(Padded<T>(row + j * size, width - j).bytes, j, lane + j);
    };
    auto add_rows = [&](int64_t group) {
        for (int64_t k = group * LANES; k < n && k < (group + 1) * LANES; k++) add_row(k);
    };
    in_turns<READ>(n / LANES, add_rows);
    add_rows(n / LANES);
    fold(lanes, TILE);
    for (int j = 0; j < width; j++) powers[j] = lanes[j], peaks[j] = as_peak<T>(tops[j]);
}

void measure_tile(uint8_t dtype, const char* x, int64_t n, int64_t stride, int width, double p,
                  const double* divisors, double* powers, double* peaks) {
    double padded[TILE];
    for (int j = 0; j < TILE; j++) padded[j] = divisors && j < width ? divisors[j] : 1;
    const double* divide = divisors ? padded : nullptr;
    with_type(dtype, [=](auto type) {
        with_power(p, [=](auto plus) {
            measure_columns<decltype(type)>(x, n, stride, width, divide, plus, powers, peaks);
        });
    });
    if (p == (double)INFINITY) memcpy(powers, peaks, (size_t)width * sizeof *powers);
}

template <class T>
inline void count_block(const char* x, int64_t n, int64_t* nan, int64_t* inf) {
    for (int64_t i = 0; i < n; i++) {
        const typename T::Bits bits = load<T>(x, i) & T::magnitude;
        *nan += bits > T::infinity;
        *inf += bits == T::infinity;
    }
}

void count_nonfinite(uint8_t dtype, const char* x, int64_t n, int64_t* nan, int64_t* inf) {
    int64_t nans = 0, infs = 0;
    with_type(dtype, [&](auto type) { count_block<decltype(type)>(x, n, &nans, &infs); });
    *nan = nans, *inf = infs;
}

inline void scale_group(Float64, const char* x, char* y, double coef) {
    for (int j = 0; j < LANES; j++) store<Float64>(y, j, bits_as<int64_t>(Float64::widen(load<Float64>(x, j)) * coef));
}

inline void scale_group(Float32, const char* x, char* y, double coef) {
    for (int j = 0; j < LANES; j++)
        store<Float32>(y, j, bits_as<int32_t>((float)((double)Float32::widen(load<Float32>(x, j)) * coef)));
}

// Rounds once to `digits` fraction bits and no finer than the subnormals below `normal`: adding
// 1.5 * 2^(52 - digits) times its power of two to a number leaves no room for the bits beyond.
// Inf and NaN stay: the exponent of what is added wraps to a small one.
inline double round_to(double value, int digits, double normal) {
    const double power = bits_as<double>(bits_as<uint64_t>(value) & 0x7ff0000000000000);
    const uint64_t exponent = bits_as<uint64_t>(normal > power ? normal : power);
    const double shift = bits_as<double>(exponent + ((uint64_t)(52 - digits) << 52 | 1ull << 51));
    const uint64_t sign = bits_as<uint64_t>(value) & 0x8000000000000000;  // lost where the sum is 0
    return bits_as<double>(bits_as<uint64_t>((value + shift) - shift) | sign);
}

template <class T>
inline void scale_exactly(const char* x, char* y, double coef) {
    float values[LANES];
    int16_t out[LANES];
    widen_group<T>(x, values);
    for (int j = 0; j < LANES; j++) values[j] = (float)round_to((double)values[j] * coef, T::digits, T::normal);
    pack_group<T>(values, 0, out);
    memcpy(y, out, sizeof out);
}

inline bool any(const int16_t* lanes) {
    uint64_t quads[LANES / 4];
    memcpy(quads, lanes, sizeof quads);
    uint64_t bits = 0;
    for (int j = 0; j < LANES / 4; j++) bits |= quads[j];
    return bits != 0;
}

// In float32, with twice the elements in a vector: multiplies by two floats, one on each side of coef and a few units
// in the last place away. No float product of coef lies outside of theirs or on the end of an
// interval, so where both round to the same number, no midpoint between two numbers is near and it
// is the right one. (bfloat16 adds just less and just enough to carry at the midpoint itself.)
// False where that fails, or where bfloat16 results may be subnormal: there float32 is no finer.
template <class T>
inline bool scale_fast(const char* x, char* y, float below, float above) {
    float values[LANES], low[LANES], high[LANES];
    int16_t floor[LANES], ceil[LANES];
    widen_group<T>(x, values);
    for (int j = 0; j < LANES; j++) low[j] = values[j] * below;
    for (int j = 0; j < LANES; j++) high[j] = values[j] * above;
    pack_group<T>(low, 0x7fff, floor);
    pack_group<T>(high, 0x8000, ceil);
    int16_t doubt[LANES];
    for (int j = 0; j < LANES; j++) doubt[j] = floor[j] ^ ceil[j];
    if (T::digits == BFloat16::digits)
        for (int j = 0; j < LANES; j++)
            doubt[j] |= ((floor[j] & 0x7fff) <= 0x80) & ((load<T>(x, j) & 0x7fff) != 0);
    if (any(doubt)) return false;
    memcpy(y, floor, sizeof floor);
    return true;
}

template <class T>
inline void scale_group(T, const char* x, char* y, double coef) {
    const float below = (float)(coef * (1 - 0x1p-22)), above = (float)(coef * (1 + 0x1p-22));
    const bool in_range = fabs(coef) >= 0x1p-100 && fabs(coef) <= 0x1p100;
    if (!in_range || !scale_fast<T>(x, y, below, above)) scale_exactly<T>(x, y, coef);
}

// Of two NaNs, which one a product keeps is the compiler's choice.
template <class T>
inline void fill(T, char* y, int64_t n, double value) {
    const typename T::Bits bits = pack_one<T>(value);
    for (int64_t i = 0; i < n; i++) store<T>(y, i, bits);
}

template <class T>
inline void scale_block(T type, const char* x, char* y, int64_t n, double coef) {
    constexpr int64_t bytes = LANES * sizeof(typename T::Bits);
    if (coef != coef) return fill(type, y, n, coef);
    const int64_t groups = n / LANES, rest = n % LANES;
    in_turns<WRITTEN>(groups, [=](int64_t i) {
        prefetch<T>(x + i * bytes + AHEAD, LANES);
        scale_group(type, x + i * bytes, y + i * bytes, coef);
    });
    if (rest == 0) return;
    Padded<T> last(x + groups * bytes, rest);
    scale_group(type, last.bytes, last.bytes, coef);
    memcpy(y + groups * bytes, last.bytes, (size_t)rest * sizeof(typename T::Bits));
}

void scale(uint8_t dtype, const char* x, char* y, int64_t n, double coef) {
    // Beyond 2^400 all but 0 overflows in 32 and 16 bits, and round_to would too.
    if (dtype != FLOAT64 && fabs(coef) > 0x1p400 && fabs(coef) < (double)INFINITY) coef = coef < 0 ? -0x1p400 : 0x1p400;
    with_type(dtype, [=](auto type) { scale_block(type, x, y, n, coef); });
}

// Which numbers lie outside of bounds: no NaN, and for a bound of 0 no zero of either sign.
template <class T>
struct Outside {
    typename T::Value low, high;
    Outside(double l, double h) : low((typename T::Value)l), high((typename T::Value)h) {}
    bool above(typename T::Bits bits) const { return T::widen(bits) > high; }
    bool below(typename T::Bits bits) const { return T::widen(bits) < low; }
};

// Without widening 16 bits: as integers in the order of all numbers, NaN beyond the infinities.
template <class T>
struct Outside16 {
    int16_t low, high;
    static int16_t key(int16_t bits) { return bits < 0 ? bits ^ T::magnitude : bits; }
    Outside16(double l, double h) : low(l == 0 ? -1 : key(pack_one<T>(l))), high(h == 0 ? 0 : key(pack_one<T>(h))) {}
    bool above(int16_t bits) const { return (key(bits) > high) & (key(bits) <= T::infinity); }
    bool below(int16_t bits) const { return (key(bits) < low) & (key(bits) >= ~T::infinity); }
};

template <>
struct Outside<BFloat16> : Outside16<BFloat16> { using Outside16::Outside16; };
template <>
struct Outside<Float16> : Outside16<Float16> { using Outside16::Outside16; };

template <class T>
struct Bounds {
    using Bits = typename T::Bits;
    Outside<T> outside;
    Bits low, high;

    Bounds(double l, double h) : outside(l, h), low(pack_one<T>(l)), high(pack_one<T>(h)) {}

    bool hold(const char* x, int64_t n) const {
        return !any_outside<READ>(x, n, [](const Bits*, int64_t, int) {});
    }
    // Writes x between the bounds; did anything change?
    bool apply(const char* x, char* y, int64_t n) const {
        return any_outside<WRITTEN>(x, n, [y](const Bits* clamped, int64_t i, int count) {
            memcpy(y + i * (int64_t)sizeof(Bits), clamped, (size_t)count * sizeof(Bits));
        });
    }
    // Is any number outside? `take` is given all of them as they are between the bounds.
    template <int64_t streams, class Take>
    bool any_outside(const char* x, int64_t n, Take take) const {
        Bits found[LANES] = {};
        auto look = [&](int64_t i, int count) {
            Bits clamped[LANES];
            for (int j = 0; j < count; j++) {
                const Bits bits = load<T>(x, i + j);
                const bool above = outside.above(bits), below = outside.below(bits);
                clamped[j] = above ? high : below ? low : bits;
                found[j] |= above | below;
            }
            take(clamped, i, count);
        };
        in_turns<streams>(n / LANES, [&](int64_t group) {
            prefetch<T>(x + group * LANES * (int64_t)sizeof(Bits) + AHEAD, LANES);
            look(group * LANES, LANES);
        });
        look(n / LANES * LANES, (int)(n % LANES));
        for (int j = 1; j < LANES; j++) found[0] |= found[j];
        return found[0] != 0;
    }
};

template <class T>
inline bool clamp_block(const char* x, char* y, int64_t n, const Bounds<T> bounds) {
    const bool may_hold = x == y && bounds.hold(x, n < PROBE ? n : PROBE);
    return !(may_hold && bounds.hold(x, n)) && bounds.apply(x, y, n);
}

bool clamp(uint8_t dtype, const char* x, char* y, int64_t n, double low, double high) {
    return with_type(dtype, [=](auto type) { return clamp_block(x, y, n, Bounds<decltype(type)>(low, high)); });
}

}  // namespace

extern const Kernels GRADCLIP_KERNELS;
const Kernels GRADCLIP_KERNELS = {measure, measure_tile, count_nonfinite, scale, clamp};

}  // namespace gradclip
