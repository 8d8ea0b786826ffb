#include "backend.hpp"

namespace infinity::aio {

std::unique_ptr<Backend> make_backend(const std::string& name, unsigned depth) {
    if (name == "io_uring") return make_uring(depth);
    if (name == "libaio") return make_libaio(depth);
    if (name == "threads") return make_threads(depth);
    throw BadRequest("There is no I/O engine named '" + name + "'.",
                     "Use io_uring, libaio, threads or auto.");
}

}  // namespace infinity::aio
