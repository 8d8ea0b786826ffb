// The core's errors as those of infinity.errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "errors.hpp"

namespace infinity::aio {

namespace nb = nanobind;
using namespace nb::literals;

inline nb::object make_storage_error(const Failure& failure) {
    const nb::object errors = nb::module_::import_("infinity.errors");
    const nb::object offset = failure.offset ? nb::object(nb::int_(*failure.offset)) : nb::none();
    if (failure.error == end_of_file && failure.operation == "read") {
        const std::string cause = failure.path +
                                  " is shorter than expected: nothing to read at byte " +
                                  std::to_string(failure.offset.value_or(0)) + ".";
        return errors.attr("StorageError")(
            cause, "The file was cut off or is not the one that was written: restore it.",
            "path"_a = failure.path, "offset"_a = offset, "errno"_a = failure.error);
    }
    return errors.attr("storage_error")(failure.operation, failure.path, offset, failure.error);
}

[[noreturn]] inline void raise(const nb::object& error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
}

[[noreturn]] inline void raise_config_error(const std::string& cause, const std::string& cure) {
    raise(nb::module_::import_("infinity.errors").attr("ConfigError")(cause, cure));
}

// Runs something that may throw the core's exceptions, with the GIL released.
template <typename Action>
auto unlocked(const Action& action) {
    std::optional<Failure> failure;
    std::string cause;
    std::string cure;
    try {
        const nb::gil_scoped_release release;
        return action();
    } catch (const StorageFailure& error) {
        failure = error.failure();
    } catch (const BadRequest& error) {
        cause = error.what();
        cure = error.cure();
    } catch (const Unavailable& error) {
        cause = "This I/O engine cannot be used here: " + std::string(error.what()) + ".";
        cure =
            "Leave the choice to the runtime (backend=\"auto\", no INFINITY_AIO), or use threads.";
    }
    if (failure) raise(make_storage_error(*failure));
    raise_config_error(cause, cure);
}

}  // namespace infinity::aio
