// The module: checks what comes from Python, cuts it into blocks and hands those to the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gradclip {
namespace {

const char* cpu = "baseline";
const Kernels* kernels = &kernels_baseline;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Out<T> to_numpy(std::vector<T> values) {
    auto* kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete (std::vector<T>*)p; });
    return Out<T>(kept->data(), {kept->size()}, owner);
}

void require(bool holds, const char* accepted, const std::string& given) {
    if (!holds) throw nb::value_error((std::string(accepted) + ", not " + given).c_str());
}

Threads up_to(int threads, uint64_t team) {
    require(threads >= 1, "threads must be at least 1", std::to_string(threads));
    return {threads, (Team)(uintptr_t)team};
}

void require_p(double p) { require(p > 0, "p must be a number > 0 or inf", std::to_string(p)); }

void require_dtype(int dtype) {
    require(dtype <= FLOAT16, "dtypes must be 0 (float64), 1 (float32), 2 (bfloat16) or 3 (float16)", std::to_string(dtype));
}

template <class T>
void require_one_each(const In<T>& values, size_t arrays, const char* accepted) {
    require(values.shape(0) == arrays, accepted, std::to_string(values.shape(0)) + " for " + std::to_string(arrays));
}

struct Block {
    int64_t array;
    char *x, *y;
    int64_t n;
    uint8_t dtype;
};

char* at(uint64_t address) { return (char*)(uintptr_t)address; }

struct Blocks {
    std::vector<Block> all;
    int64_t bytes = 0;

    Blocks(const In<uint64_t>& from, const In<uint64_t>& to, const In<int64_t>& lengths, const In<uint8_t>& dtypes) {
        const size_t arrays = from.shape(0);
        require_one_each(to, arrays, "there must be one target for each address");
        require_one_each(lengths, arrays, "there must be one length for each address");
        require_one_each(dtypes, arrays, "there must be one dtype for each address");
        for (size_t i = 0; i < arrays; i++) {
            require_dtype(dtypes(i));
            require(lengths(i) >= 0, "lengths must be at least 0", std::to_string(lengths(i)));
            cut((int64_t)i, at(from(i)), at(to(i)), lengths(i), dtypes(i));
        }
    }

    void cut(int64_t array, char* x, char* y, int64_t length, uint8_t dtype) {
        const int64_t size = itemsize(dtype);
        bytes += length * size;
        for (int64_t start = 0; start < length; start += BLOCK)
            all.push_back({array, x + start * size, y + start * size, std::min(BLOCK, length - start), dtype});
    }

    // Calls work(block, its index) for every block.
    template <class Work>
    void each(Threads threads, const Work& work) const {
        nb::gil_scoped_release nogil;
        parallel(threads, bytes, (int64_t)all.size(), [&](int64_t i) { work(all[(size_t)i], (size_t)i); });
    }
};

auto to_lists(const std::vector<Opened>& opened) {
    std::vector<uint64_t> addresses;
    std::vector<int64_t> lengths;
    std::vector<uint8_t> dtypes;
    for (const Opened& one : opened) {
        addresses.push_back(one.address);
        lengths.push_back(one.length);
        dtypes.push_back(one.dtype);
    }
    return std::make_tuple(to_numpy(std::move(addresses)), to_numpy(std::move(lengths)), to_numpy(std::move(dtypes)));
}

auto open_buffers(nb::list arrays, bool writable) { return to_lists(open_all(arrays.ptr(), writable)); }

auto open_tensors(nb::list tensors, nb::object exchange) {
    return to_lists(open_each(tensors.ptr(), exchange.ptr()));
}

auto measure(In<uint64_t> addresses, In<int64_t> lengths, In<uint8_t> dtypes, double p,
             std::optional<In<double>> divisors, int threads, uint64_t team) {
    require_p(p);
    if (divisors) require_one_each(*divisors, addresses.shape(0), "there must be one divisor for each address");
    const Blocks blocks(addresses, addresses, lengths, dtypes);
    std::vector<double> powers(blocks.all.size()), peaks(blocks.all.size());
    blocks.each(up_to(threads, team), [&](const Block& block, size_t i) {
        const double divisor = divisors ? (*divisors)((size_t)block.array) : 1;
        kernels->measure(block.dtype, block.x, block.n, p, divisor, &powers[i], &peaks[i]);
    });
    return std::make_tuple(to_numpy(std::move(powers)), to_numpy(std::move(peaks)));
}

// A 2-D view whose rows are the units.
struct Units {
    const char* x;
    int64_t units, length, stride, step;  // strides in bytes: from unit to unit, and within one
    uint8_t dtype;
    double p;
    const double* divisors;

    int64_t size() const { return itemsize(dtype); }
    int64_t cuts() const { return (length + BLOCK - 1) / BLOCK; }
    int64_t count(int64_t cut) const { return std::min(BLOCK, length - cut * BLOCK); }
    bool side_by_side() const { return step != size() && stride == size() && units > 1; }
    int64_t width() const { return side_by_side() ? TILE : 1; }
    int64_t jobs() const { return (units + width() - 1) / width() * cuts(); }

    // The partial of one cut of each unit of a tile, unit by unit at `powers`.
    void measure(int64_t job, double* powers) const {
        const int64_t tile = job / cuts(), cut = job % cuts(), first = tile * width();
        const char* from = x + first * stride + cut * BLOCK * step;
        if (side_by_side())
            measure_side_by_side(from, first, cut, powers);
        else
            measure_alone(from, first, cut, powers);
    }

    void measure_side_by_side(const char* from, int64_t first, int64_t cut, double* powers) const {
        double power[TILE], peak[TILE];
        const int many = (int)std::min<int64_t>(TILE, units - first);
        kernels->measure_tile(dtype, from, count(cut), step, many, p, divisors ? divisors + first : nullptr, power, peak);
        for (int j = 0; j < many; j++) powers[(first + j) * cuts() + cut] = power[j];
    }

    void measure_alone(const char* from, int64_t unit, int64_t cut, double* powers) const {
        double peak;
        std::vector<char> gathered;
        if (step != size() && length > 1) {
            gathered.resize((size_t)(count(cut) * size()));
            for (int64_t k = 0; k < count(cut); k++) memcpy(&gathered[(size_t)(k * size())], from + k * step, (size_t)size());
            from = gathered.data();
        }
        kernels->measure(dtype, from, count(cut), p, divisors ? divisors[unit] : 1, &powers[unit * cuts() + cut], &peak);
    }

    // With the rounding errors of the sum carried along; for p = inf the largest, NaN above all.
    double total(const double* partials) const {
        double sum = 0, error = 0;
        for (int64_t i = 0; i < cuts(); i++) {
            const double next = std::isinf(p) ? larger(sum, partials[i]) : sum + partials[i];
            if (!std::isinf(p)) error += sum >= partials[i] ? (sum - next) + partials[i] : (partials[i] - next) + sum;
            sum = next;
        }
        return std::isfinite(sum) ? sum + error : sum;
    }

    static double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }
};

Out<double> measure_units(uint64_t address, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, int dtype,
                          double p, std::optional<In<double>> divisors, int most) {
    require_p(p);
    const Threads threads = up_to(most, 0);
    require(dtype >= 0, "dtype must be at least 0", std::to_string(dtype));
    require_dtype(dtype);
    require(rows >= 0 && cols >= 0, "rows and cols must be at least 0", std::to_string(rows) + " and " + std::to_string(cols));
    if (divisors) require_one_each(*divisors, (size_t)rows, "there must be one divisor for each row");
    const int64_t size = itemsize((uint8_t)dtype);
    const Units view{at(address), rows, cols, row_stride * size, col_stride * size, (uint8_t)dtype, p,
                     divisors ? divisors->data() : nullptr};
    std::vector<double> partials((size_t)(rows * view.cuts())), powers((size_t)rows);
    {
        nb::gil_scoped_release nogil;
        parallel(threads, rows * cols * size, view.jobs(), [&](int64_t job) { view.measure(job, partials.data()); });
        for (int64_t i = 0; i < rows; i++) powers[(size_t)i] = view.total(partials.data() + i * view.cuts());
    }
    return to_numpy(std::move(powers));
}

auto count_nonfinite(In<uint64_t> addresses, In<int64_t> lengths, In<uint8_t> dtypes, int threads, uint64_t team) {
    const Blocks blocks(addresses, addresses, lengths, dtypes);
    std::vector<int64_t> nans(blocks.all.size()), infs(blocks.all.size());
    blocks.each(up_to(threads, team), [&](const Block& block, size_t i) {
        kernels->count_nonfinite(block.dtype, block.x, block.n, &nans[i], &infs[i]);
    });
    std::vector<int64_t> nan(addresses.shape(0)), inf(addresses.shape(0));
    for (size_t i = 0; i < blocks.all.size(); i++) {
        nan[(size_t)blocks.all[i].array] += nans[i];
        inf[(size_t)blocks.all[i].array] += infs[i];
    }
    return std::make_tuple(to_numpy(std::move(nan)), to_numpy(std::move(inf)));
}

void scale(In<uint64_t> sources, In<uint64_t> targets, In<int64_t> lengths, In<uint8_t> dtypes, In<double> coefs, int threads,
           uint64_t team) {
    require_one_each(coefs, sources.shape(0), "there must be one coef for each address");
    const Blocks blocks(sources, targets, lengths, dtypes);
    blocks.each(up_to(threads, team), [&](const Block& block, size_t) {
        kernels->scale(block.dtype, block.x, block.y, block.n, coefs((size_t)block.array));
    });
}

Out<uint8_t> clamp(In<uint64_t> sources, In<uint64_t> targets, In<int64_t> lengths, In<uint8_t> dtypes, In<double> lows,
                   In<double> highs, int threads, uint64_t team) {
    require_one_each(lows, sources.shape(0), "there must be one low for each address");
    require_one_each(highs, sources.shape(0), "there must be one high for each address");
    for (size_t i = 0; i < sources.shape(0); i++)
        require(lows(i) <= highs(i), "low must not exceed high",
                std::to_string(lows(i)) + " and " + std::to_string(highs(i)));
    const Blocks blocks(sources, targets, lengths, dtypes);
    std::vector<uint8_t> hits(blocks.all.size()), changed(sources.shape(0));
    blocks.each(up_to(threads, team), [&](const Block& block, size_t i) {
        const size_t array = (size_t)block.array;
        hits[i] = kernels->clamp(block.dtype, block.x, block.y, block.n, lows(array), highs(array));
    });
    for (size_t i = 0; i < hits.size(); i++) changed[(size_t)blocks.all[i].array] |= hits[i];
    return to_numpy(std::move(changed));
}

struct Path {
    const char* name;
    const Kernels* kernels;
    bool supported;
};

// Best first.
std::vector<Path> paths() {
    std::vector<Path> all;
#if defined(GRADCLIP_X86_PATHS)
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
    __builtin_cpu_init();
    const bool v3 = HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2") && HAS("f16c");
    const bool v4 = v3 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl");
    all.push_back({"avx512", &kernels_avx512, v4});
    all.push_back({"avx2", &kernels_avx2, v3});
#endif
    all.push_back({"baseline", &kernels_baseline, true});
    return all;
}

void choose_cpu() {
    const char* forced = std::getenv("GRADCLIP_CPU");
    std::string supported;
    for (const Path& path : paths()) {
        if (!path.supported) continue;
        if (!forced || !*forced || !strcmp(forced, path.name)) {
            cpu = path.name, kernels = path.kernels;
            return;
        }
        supported = path.name + (supported.empty() ? "" : ", " + supported);
    }
    const std::string line = "GRADCLIP_CPU=" + std::string(forced) + ": this machine and build offer " + supported;
    PyErr_SetString(PyExc_ImportError, line.c_str());
    throw nb::python_error();
}

}  // namespace

NB_MODULE(_core, m) {
    choose_cpu();
    in_process_of_birth();
    m.attr("BLOCK") = BLOCK;
    m.def("cpu", [] { return cpu; });
    m.def("find_team", [] { return (uint64_t)(uintptr_t)find_team(); });
    m.def("open_buffers", open_buffers, "arrays"_a, "writable"_a);
    m.def("open_tensors", open_tensors, "tensors"_a, "exchange"_a);
    m.def("measure", measure, "addresses"_a, "lengths"_a, "dtypes"_a, "p"_a, "divisors"_a.none(), "threads"_a,
          "team"_a = 0);
    m.def("measure_units", measure_units, "address"_a, "rows"_a, "cols"_a, "row_stride"_a, "col_stride"_a, "dtype"_a,
          "p"_a, "divisors"_a.none(), "threads"_a);
    m.def("count_nonfinite", count_nonfinite, "addresses"_a, "lengths"_a, "dtypes"_a, "threads"_a, "team"_a = 0);
    m.def("scale", scale, "sources"_a, "targets"_a, "lengths"_a, "dtypes"_a, "coefs"_a, "threads"_a, "team"_a = 0);
    m.def("clamp", clamp, "sources"_a, "targets"_a, "lengths"_a, "dtypes"_a, "lows"_a, "highs"_a, "threads"_a,
          "team"_a = 0);
}

}  // namespace gradclip
