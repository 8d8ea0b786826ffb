#include "table.hpp"

#include <dlfcn.h>

#include <utility>

namespace infinity::driver {

CallFailed::CallFailed(std::string call, Result code, std::string name, std::string text)
    : std::runtime_error(call + ": " + name + " (" + std::to_string(code) + ")"),
      call_(std::move(call)),
      code_(code),
      name_(std::move(name)),
      text_(std::move(text)) {}

void Table::check(Result result, const char* call) const {
    if (result == success) return;
    const char* name = nullptr;
    const char* text = nullptr;
    if (error_name(result, &name) != success || name == nullptr) name = "an error without a name";
    if (error_string(result, &text) != success || text == nullptr) text = "no description";
    throw CallFailed(call, result, name, text);
}

Table load(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Unloadable(::dlerror());
    Table table;
#define INFINITY_DRIVER_LOAD(symbol, field, ...)                                      \
    table.field = reinterpret_cast<decltype(table.field)>(::dlsym(library, #symbol)); \
    if (table.field == nullptr) throw Unloadable(path + " has no " #symbol);
    INFINITY_DRIVER_CALLS(INFINITY_DRIVER_LOAD)
#undef INFINITY_DRIVER_LOAD
    table.touched =
        reinterpret_cast<decltype(table.touched)>(::dlsym(library, "infinity_test_touched"));
    return table;
}

}  // namespace infinity::driver
