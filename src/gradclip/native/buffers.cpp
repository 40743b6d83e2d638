// NumPy arrays, and whatever else exports a buffer, as dense memory.
#include "buffers.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

namespace nb = nanobind;

namespace gradclip {
namespace {

uint8_t dtype_of(const char* format, Py_ssize_t size) {
    if (!format) return NO_MEMORY;
    const uint16_t one = 1;
    const bool little = *(const char*)&one == 1;
    if (*format == '@' || *format == '=' || *format == (little ? '<' : '>')) format++;
    if (!strcmp(format, "d") && size == 8) return FLOAT64;
    if (!strcmp(format, "f") && size == 4) return FLOAT32;
    if (!strcmp(format, "e") && size == 2) return FLOAT16;
    if (!strcmp(format, "bfloat16") && size == 2) return BFLOAT16;  // MLX says it so; the standard has no letter for it
    return NO_MEMORY;
}

// Dense in some order of its axes: no gaps, no element twice, nothing backwards. The first stride may be any `unit`.
template <class Int>
bool dense(int ndim, const Int* shape, const Int* strides, Int unit) {
    Int step = unit;
    int axis = ndim - 1;
    for (; axis >= 0 && (strides[axis] == step || shape[axis] == 1); axis--) step *= shape[axis];
    if (axis < 0 || std::find(shape, shape + ndim, Int(0)) != shape + ndim) return true;
    std::vector<std::pair<Int, Int>> axes;
    for (int i = 0; i < ndim; i++)
        if (shape[i] != 1) axes.emplace_back(strides[i], shape[i]);
    std::sort(axes.begin(), axes.end());
    step = unit;
    for (auto [stride, size] : axes) {
        if (stride != step) return false;
        step *= size;
    }
    return true;
}

bool dense(const Py_buffer& view) { return dense(view.ndim, view.shape, view.strides, view.itemsize); }

Opened open_one(PyObject* array, bool writable) {
    Opened opened;
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_RECORDS_RO)) {
        PyErr_Clear();
        return opened;
    }
    const uint8_t dtype = dtype_of(view.format, view.itemsize);
    if (dtype != NO_MEMORY && !(writable && view.readonly) && dense(view))
        opened = {(uint64_t)(uintptr_t)view.buf, (int64_t)(view.len / view.itemsize), dtype};
    PyBuffer_Release(&view);
    return opened;
}

// A bfloat16 (ml_dtypes' or a framework's own) exports no buffer, but its view as uint16 does, and holds the same memory.
bool is_bfloat16(nb::handle array) {
    nb::object dtype = nb::getattr(array, "dtype", nb::none());
    return nb::getattr(dtype, "name", nb::none()).equal(nb::str("bfloat16")) && nb::getattr(dtype, "isnative", nb::none()).is(Py_True);
}

Opened open_bfloat16(nb::handle array, bool writable) {
    nb::object bits = array.attr("view")("uint16");
    Opened opened;
    Py_buffer buffer;
    if (PyObject_GetBuffer(bits.ptr(), &buffer, PyBUF_STRIDED_RO)) {
        PyErr_Clear();
        return opened;
    }
    if (buffer.itemsize == 2 && !(writable && buffer.readonly) && dense(buffer))
        opened = {(uint64_t)(uintptr_t)buffer.buf, (int64_t)(buffer.len / 2), BFLOAT16};
    PyBuffer_Release(&buffer);
    return opened;
}

// DLPack's tables, as its standard lays them out (version 1.3): what a framework's C exchange function fills in.
struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLPackExchange {
    uint32_t major, minor;
    void *older, *allocate, *managed, *to_python;
    int (*look)(void* array, DLTensor* out);  // borrows: nothing is copied or kept
};

constexpr int32_t CPU = 1;
enum Code : uint8_t { FLOAT = 2, BFLOAT = 4 };

uint8_t dtype_of(const DLTensor& x) {
    if (x.lanes != 1) return NO_MEMORY;
    if (x.code == BFLOAT) return x.bits == 16 ? BFLOAT16 : NO_MEMORY;
    if (x.code != FLOAT) return NO_MEMORY;
    return x.bits == 64 ? FLOAT64 : x.bits == 32 ? FLOAT32 : x.bits == 16 ? FLOAT16 : NO_MEMORY;
}

Opened open_one(const DLTensor& x) {
    Opened opened;
    opened.length = 1;
    for (int i = 0; i < x.ndim; i++) opened.length *= x.shape[i];
    opened.address = (uint64_t)(uintptr_t)x.data + x.byte_offset;
    if (x.ndim == 0 || !x.strides || dense<int64_t>(x.ndim, x.shape, x.strides, 1)) opened.dtype = dtype_of(x);
    return opened;
}

}  // namespace

std::vector<Opened> open_each(PyObject* list, PyObject* exchange) {
    const auto* table = (const DLPackExchange*)PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (!table) throw nb::python_error();
    const bool known = table->major == 1 && table->look;
    std::vector<Opened> opened;
    for (nb::handle array : nb::borrow<nb::list>(list)) {
        DLTensor x;
        if (!known || table->look(array.ptr(), &x) || x.device_type != CPU) {
            PyErr_Clear();
            return {};
        }
        opened.push_back(open_one(x));
    }
    return opened;
}

std::vector<Opened> open_all(PyObject* list, bool writable) {
    std::vector<Opened> opened;
    for (nb::handle array : nb::borrow<nb::list>(list)) {
        opened.push_back(open_one(array.ptr(), writable));
        if (opened.back().dtype == NO_MEMORY && is_bfloat16(array)) opened.back() = open_bfloat16(array, writable);
    }
    return opened;
}

}  // namespace gradclip
