// The only error that this core throws: an argument cannot be used. The bindings turn it into
// infinity.ConfigError.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace infinity::cpu_adam {

struct ConfigError : std::runtime_error {
    ConfigError(std::string cause_, std::string cure_)
        : std::runtime_error(cause_ + " " + cure_),
          cause(std::move(cause_)),
          cure(std::move(cure_)) {}
    std::string cause;
    std::string cure;
};

}  // namespace infinity::cpu_adam
