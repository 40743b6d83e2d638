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
    return NO_MEMORY;
}

// Dense in some order of its axes: no gaps, no element twice, nothing backwards.
bool dense(const Py_buffer& view) {
    Py_ssize_t step = view.itemsize;
    int axis = view.ndim - 1;
    for (; axis >= 0 && (view.strides[axis] == step || view.shape[axis] == 1); axis--) step *= view.shape[axis];
    if (axis < 0 || view.len == 0) return true;
    std::vector<std::pair<Py_ssize_t, Py_ssize_t>> axes;
    for (int i = 0; i < view.ndim; i++)
        if (view.shape[i] != 1) axes.emplace_back(view.strides[i], view.shape[i]);
    std::sort(axes.begin(), axes.end());
    step = view.itemsize;
    for (auto [stride, size] : axes) {
        if (stride != step) return false;
        step *= size;
    }
    return true;
}

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

}  // namespace

std::vector<Opened> open_all(PyObject* list, bool writable) {
    std::vector<Opened> opened;
    for (nb::handle array : nb::borrow<nb::list>(list)) {
        opened.push_back(open_one(array.ptr(), writable));
        if (opened.back().dtype == NO_MEMORY && is_bfloat16(array)) opened.back() = open_bfloat16(array, writable);
    }
    return opened;
}

}  // namespace gradclip
