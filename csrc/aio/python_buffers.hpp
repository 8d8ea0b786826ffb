// Buffers as Python gives them, and the objects that keep them alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <utility>
#include <vector>

#include "future.hpp"
#include "python_errors.hpp"

namespace infinity::aio {

namespace nb = nanobind;
using namespace nb::literals;

// Memory and the object that keeps it alive.
struct Span {
    std::byte* address = nullptr;
    uint64_t bytes = 0;
    nb::object owner;
};

inline constexpr const char* buffer_cure =
    "Give a C-contiguous bytearray, numpy array or CPU tensor, or (address, nbytes, owner).";

inline Span span_of_buffer(nb::handle buffer, bool writable) {
    nb::object view = nb::steal(PyMemoryView_FromObject(buffer.ptr()));
    if (!view.is_valid()) {
        PyErr_Clear();
        raise_config_error("The buffer does not give out its memory.", buffer_cure);
    }
    const Py_buffer* memory = PyMemoryView_GET_BUFFER(view.ptr());
    if (!PyBuffer_IsContiguous(memory, 'C'))
        raise_config_error("The buffer is not contiguous.", buffer_cure);
    if (writable && memory->readonly)
        raise_config_error("The buffer is read-only, and a read would write to it.", buffer_cure);
    return {static_cast<std::byte*>(memory->buf), static_cast<uint64_t>(memory->len),
            std::move(view)};
}

// Takes torch tensors and storages by their methods rather than by their type, since torch is not
// imported here.
inline Span span_of_tensor(nb::handle tensor) {
    if (nb::cast<std::string>(tensor.attr("device").attr("type")) != "cpu")
        raise_config_error("The tensor is not in host memory.",
                           "Copy it to a CPU tensor (pinned memory is fastest) first.");
    if (nb::hasattr(tensor, "is_contiguous") && !nb::cast<bool>(tensor.attr("is_contiguous")()))
        raise_config_error("The tensor is not contiguous.", buffer_cure);
    nb::object bytes = tensor.attr("nbytes");
    if (PyCallable_Check(bytes.ptr())) bytes = bytes();
    return {reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")())),
            nb::cast<uint64_t>(bytes), nb::borrow(tensor)};
}

inline Span span_of_triple(nb::handle triple) {
    int64_t address = 0;
    int64_t bytes = 0;
    if (nb::len(triple) != 3 || !nb::try_cast(triple[0], address) ||
        !nb::try_cast(triple[1], bytes))
        raise_config_error("The buffer is a tuple, but not (address, nbytes, owner).", buffer_cure);
    if (bytes < 0 || (address == 0 && bytes > 0))
        raise_config_error("The buffer's address is null or its size negative.", buffer_cure);
    return {reinterpret_cast<std::byte*>(address), static_cast<uint64_t>(bytes),
            nb::borrow(triple[2])};
}

inline Span span_of(nb::handle buffer, bool writable) {
    if (PyTuple_Check(buffer.ptr())) return span_of_triple(buffer);
    if (PyObject_CheckBuffer(buffer.ptr())) return span_of_buffer(buffer, writable);
    if (nb::hasattr(buffer, "data_ptr")) return span_of_tensor(buffer);
    raise_config_error("A " + std::string(Py_TYPE(buffer.ptr())->tp_name) + " is not a buffer.",
                       buffer_cure);
}

// Requests that Python dropped before they landed, with the owners of their memory. Used under the
// GIL only. Never destroyed: it may outlive the interpreter.
class Orphans {
  public:
    void adopt(std::shared_ptr<Future> future, nb::object owner) {
        waiting_.emplace_back(std::move(future), std::move(owner));
    }

    // Drops the owners of requests that have landed. The cost is spread: all entries are checked
    // once in as many calls as there are entries, or at once if `all` is set.
    void reap(bool all) {
        if (waiting_.empty() || (!all && ++calls_ < waiting_.size())) return;
        calls_ = 0;
        std::vector<Entry> landed;  // dropped last: an owner's destructor may call reap()
        for (size_t i = 0; i < waiting_.size();) {
            if (!waiting_[i].first->done()) {
                ++i;
                continue;
            }
            std::swap(waiting_[i], waiting_.back());
            landed.push_back(std::move(waiting_.back()));
            waiting_.pop_back();
        }
    }

    std::vector<std::shared_ptr<Future>> futures() const {
        std::vector<std::shared_ptr<Future>> found;
        for (const Entry& each : waiting_) found.push_back(each.first);
        return found;
    }

  private:
    using Entry = std::pair<std::shared_ptr<Future>, nb::object>;
    std::vector<Entry> waiting_;
    size_t calls_ = 0;
};

inline Orphans& orphans() {
    static auto* const instance = new Orphans;
    return *instance;
}

}  // namespace infinity::aio
