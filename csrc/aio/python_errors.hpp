// Turns the core's errors into those of infinity.errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "errors.hpp"
#include "python_typed_errors.hpp"

namespace infinity::aio {

namespace nb = nanobind;
using namespace nb::literals;
using infinity::raise;
using infinity::raise_config_error;

inline nb::object make_storage_error(const Failure& failure) {
    const nb::object offset = failure.offset ? nb::object(nb::int_(*failure.offset)) : nb::none();
    if (failure.error == end_of_file && failure.operation == "read") {
        const std::string cause = failure.path +
                                  " is shorter than expected: nothing to read at byte " +
                                  std::to_string(failure.offset.value_or(0)) + ".";
        return errors_of("StorageError")(
            cause, "The file was cut off or is not the one that was written: restore it.",
            "path"_a = failure.path, "offset"_a = offset, "errno"_a = failure.error);
    }
    return errors_of("storage_error")(failure.operation, failure.path, offset, failure.error);
}

// describe: as for PyFuture.
inline nb::object make_error(const Failure& failure, const nb::object& describe) {
    if (failure.error != other_bytes) return make_storage_error(failure);
    nb::object what = describe.is_none() ? describe : describe(failure.position);
    return errors_of("other_bytes")(failure.path, failure.offset.value_or(0), what);
}

// Runs an action that may throw the core's exceptions, with the GIL released.
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
