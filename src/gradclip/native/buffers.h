#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

typedef struct _object PyObject;

namespace gradclip {

struct Opened {
    uint64_t address = 0;
    int64_t length = 0;
    uint8_t dtype = NO_MEMORY;
};

// Where the elements of each array of a list lie. Throws nanobind::python_error.
std::vector<Opened> open_all(PyObject* list, bool writable);

// The same for the tensors of a framework that offers DLPack's exchange table, as a capsule; empty where one of them
// cannot be looked at, or lies elsewhere than in the CPU's memory.
std::vector<Opened> open_each(PyObject* list, PyObject* exchange);

}  // namespace gradclip
