// The errors of infinity.errors, raised from native code.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

namespace infinity {

// An attribute of infinity.errors: a class of errors, or a function that makes one.
inline nanobind::object errors_of(const char* name) {
    return nanobind::module_::import_("infinity.errors").attr(name);
}

// Sets Python's current exception, as a translator of exceptions does.
inline void set_error(const nanobind::object& error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

[[noreturn]] inline void raise(const nanobind::object& error) {
    set_error(error);
    throw nanobind::python_error();
}

[[noreturn]] inline void raise_config_error(const std::string& cause, const std::string& cure) {
    raise(errors_of("ConfigError")(cause, cure));
}

}  // namespace infinity
